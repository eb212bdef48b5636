"""An event loop whose clock jumps to the next timer: sleeps cost nothing, and times are exact. And
a server on it that answers as its script says. No socket is touched.
"""

from __future__ import annotations

import asyncio
import json
import selectors
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, TypeVar

import httpx

_T = TypeVar("_T")

Piece = tuple[float, bytes]  # seconds after the one before, and what is sent then
Script = Callable[[int, dict[str, Any]], "httpx.Response | Exception | Sequence[Piece]"]
DONE = b"data: [DONE]\n\n"


class _Jumping(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "everybody waits for ever"
        self.now_s += max(timeout, 0.0)
        found: list[Any] = super().select(0)
        return found


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s


def run_virtually(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """Run it to its end; it begins at 0 seconds."""
    loop = _VirtualLoop()
    try:
        return loop.run_until_complete(coroutine)
    finally:
        loop.close()


class _Pieces(httpx.AsyncByteStream):
    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces = pieces

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for delay_s, data in self._pieces:
            await asyncio.sleep(delay_s)
            if data == b"!":
                raise httpx.ReadError("reset by peer")
            yield data


class ScriptedServer(httpx.AsyncBaseTransport):
    """script(number of the request, its body): a whole response, an error of the connection, or the
    pieces of a stream of status 200.
    """

    def __init__(self, script: Script) -> None:
        self._script = script
        self.requests: list[httpx.Request] = []

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [json.loads(one.content) for one in self.requests]

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        await request.aread()
        number = len(self.requests)
        self.requests.append(request)
        answer = self._script(number, json.loads(request.content or b"{}"))
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, httpx.Response):
            return answer
        return httpx.Response(200, stream=_Pieces(answer))


def event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def text(piece: str = "x", reason: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": piece, "finish_reason": reason}]})


def usage(num_prompt: int, num_output: int) -> bytes:
    told = {"prompt_tokens": num_prompt, "completion_tokens": num_output}
    return event({"choices": [], "usage": told})
