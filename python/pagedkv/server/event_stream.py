"""EventStream: server-sent events that end with whichever comes first: the last event, the client's
leaving, or the time.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

DONE = b"data: [DONE]\n\n"


def event(data: Any) -> bytes:
    """One event. ASCII only: some clients break lines where Unicode does."""
    return f"data: {json.dumps(data, separators=(',', ':'))}\n\n".encode()


async def left(receive: Receive) -> None:
    """Wait until the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends events, then calls on_end, whatever happens. timeout_s: a client that does not read is
    not waited for any longer.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncIterator[bytes], on_end: Callable[[], None], timeout_s: float
    ) -> None:
        self.status_code = 200
        self.background = None
        self._events = events
        self._on_end = on_end
        self._timeout_s = timeout_s
        self.init_headers({"cache-control": "no-cache"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send_all(send))
        leaving = asyncio.ensure_future(left(receive))
        try:
            await asyncio.wait(
                {sending, leaving},
                timeout=self._timeout_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            self._on_end()
            for task in (sending, leaving):
                task.cancel()
            ended, _ = await asyncio.gather(sending, leaving, return_exceptions=True)
        if isinstance(ended, Exception):
            raise ended

    async def _send_all(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        async for data in self._events:
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
