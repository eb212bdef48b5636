"""A stream of events ends with the last event, the client's leaving or the time; then on_end is
called and the source of the events is closed, even where a write does not end.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from pagedkv.server.event_stream import EventStream, event


class Case:
    """A client that reads num_reads messages, then none; leaves: at once, or never."""

    def __init__(self, num_reads: int, *, leaves: bool, timeout_s: float = 30.0) -> None:
        self.sent: list[dict[str, Any]] = []
        self.calls: list[str] = []
        self._num_reads = num_reads
        self._leaves = leaves
        self._full = asyncio.Event()
        self.stream = EventStream(self._events(), lambda: self.calls.append("end"), timeout_s)

    async def _events(self) -> AsyncIterator[bytes]:
        try:
            for number in range(3):
                yield event({"number": number})
        finally:
            self.calls.append("closed")

    async def _send(self, message: Any) -> None:
        if len(self.sent) == self._num_reads:
            self._full.set()
            await asyncio.Event().wait()
        self.sent.append(message)

    async def _receive(self) -> Any:
        if self._leaves:
            await self._full.wait()
            return {"type": "http.disconnect"}
        await asyncio.Event().wait()

    async def run(self) -> None:
        await asyncio.wait_for(self.stream({}, self._receive, self._send), 30)  # type: ignore[arg-type]


def test_a_client_that_reads_all_gets_all() -> None:
    async def body() -> None:
        case = Case(100, leaves=False)
        await case.run()
        assert case.calls == ["closed", "end"]
        assert b"".join(one.get("body", b"") for one in case.sent) == b"".join(
            event({"number": number}) for number in range(3)
        )
        assert case.sent[-1]["more_body"] is False

    asyncio.run(body())


@pytest.mark.parametrize("num_reads", [0, 1, 2])
def test_a_client_that_leaves_unread_bytes_ends_the_stream(num_reads: int) -> None:
    async def body() -> None:
        case = Case(num_reads, leaves=True)
        await case.run()
        assert case.calls[0] == "end"
        assert len(case.sent) == num_reads

    asyncio.run(body())


def test_a_client_that_neither_reads_nor_leaves_is_not_waited_for() -> None:
    async def body() -> None:
        case = Case(2, leaves=False, timeout_s=0.01)
        await case.run()
        assert case.calls[0] == "end"

    asyncio.run(body())


def test_an_event_is_one_line_of_ascii() -> None:
    data = event({"text": "a\n\r\u2028\u2029\x85é"})
    assert data.isascii()
    assert data.endswith(b"\n\n")
    assert len(data.decode().splitlines()) == 2
