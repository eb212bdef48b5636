"""LiveView: one engine, shown to whoever watches, as lines of JSON: a start, then frames.

While nobody watches, nothing is done at all. While somebody does, the engine is looked at between
two steps where it has news, at most every MIN_INTERVAL_S, and less often where that would cost more
CPU time than MAX_PART of a core: looks on the engine's thread and encoding on the event loop are
measured, and the next one waits until they are paid for. All watchers get the same frames.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any, Protocol, TypeVar

from pagedkv._core import Snapshot
from pagedkv.inspect.frames import MAX_TEXT_CHARS, Frame, FrameEncoder, start_frame
from pagedkv.records import Activity, QueueLook
from pagedkv.request import Request

logger = logging.getLogger(__name__)

MAX_PART = 0.007
MIN_INTERVAL_S = 0.1
# What no step tells of (a reset of the cache, say) is seen at least so soon.
QUIET_INTERVAL_S = 1.0
HEARTBEAT_S = 5.0
MAX_VIEWERS = 8
_MAX_FRAMES = 32  # that wait for one viewer; more, and it gets a full one instead

Look = tuple[Snapshot, QueueLook, Activity]

_T = TypeVar("_T")


class View(Protocol):
    """What an engine gives to those who show it (Engine.open_view)."""

    has_news: bool

    def take(self) -> Look: ...


class LiveEngine(Protocol):
    """An AsyncEngine."""

    max_num_seqs: int
    tokenizer: Any

    def call(self, function: Callable[[Any], _T]) -> Awaitable[_T]: ...


class TooManyViewersError(RuntimeError):
    """MAX_VIEWERS watch already."""


class Viewer:
    """Frames on their way to one who watches. is_behind: the next frame must be a full one."""

    def __init__(self) -> None:
        self.is_behind = True
        self.has_ended = False
        self._lines: deque[bytes] = deque()
        self._ready = asyncio.Event()

    def put(self, line: bytes) -> None:
        if len(self._lines) >= _MAX_FRAMES:
            self._lines.clear()
            self.is_behind = True
            return
        self._lines.append(line)
        self._ready.set()

    def end(self) -> None:
        self.has_ended = True
        self._ready.set()

    async def lines(self) -> AsyncIterator[bytes]:
        """Until it has ended; an empty line where there is nothing for a while."""
        while self._lines or not self.has_ended:
            if not self._lines:
                self._ready.clear()
                try:
                    await asyncio.wait_for(self._ready.wait(), HEARTBEAT_S)
                except asyncio.TimeoutError:
                    yield b"\n"
                continue
            yield self._lines.popleft()


class LiveView:
    """Belongs to an event loop. stopping: the server takes no more requests; watching ends then.

    Example::

        viewer = view.join()
        async for line in viewer.lines():
            send(line)
        view.leave(viewer)
    """

    def __init__(
        self, engine: LiveEngine, model: str, stopping: asyncio.Event, *, shows_text: bool
    ) -> None:
        self._engine = engine
        self._model = model
        self._stopping = stopping
        self._shows_text = shows_text
        self._viewers: set[Viewer] = set()
        self._showing: asyncio.Task[None] | None = None
        self._has_changed = asyncio.Event()  # somebody has come, or the last one has left

    def join(self) -> Viewer:
        """Raises TooManyViewersError."""
        if len(self._viewers) >= MAX_VIEWERS:
            raise TooManyViewersError(f"{MAX_VIEWERS} watch already; no more are served at a time")
        viewer = Viewer()
        if self._stopping.is_set():
            viewer.end()
            return viewer
        self._viewers.add(viewer)
        self._has_changed.set()
        if self._showing is None:
            self._showing = asyncio.ensure_future(self._show())
        return viewer

    def leave(self, viewer: Viewer) -> None:
        self._viewers.discard(viewer)
        if not self._viewers:
            self._has_changed.set()

    async def _show(self) -> None:
        """As long as anybody watches."""
        try:
            while self._viewers and not self._stopping.is_set():
                view: View = await self._engine.call(lambda engine: engine.open_view())
                try:
                    await self._frames(view)
                finally:
                    await self._engine.call(partial(_close, view))
        except Exception as error:
            if not self._stopping.is_set():  # or the engine has ended before it could be told
                logger.error("the live view ends: %s: %s", type(error).__name__, error)
        finally:
            self._showing = None
            for viewer in self._viewers:
                viewer.end()
            self._viewers.clear()

    async def _frames(self, view: View) -> None:
        text_of = partial(_text_of, self._engine.tokenizer) if self._shows_text else None
        encoder = FrameEncoder(text_of)
        start = b""
        cpu_s, looked_s = 0.0, -QUIET_INTERVAL_S
        while self._viewers and not self._stopping.is_set():
            now_s = time.monotonic()
            has_newcomer = any(viewer.is_behind for viewer in self._viewers)
            if view.has_news or has_newcomer or now_s - looked_s >= QUIET_INTERVAL_S:
                looked_s = now_s
                look, look_s = await self._engine.call(partial(_timed_look, view))
                began_s = time.thread_time()
                if not start:
                    start = _line(self._start(look[0]))
                frame = encoder.next(*look)
                self._send(start, frame, encoder, cpu_s)
                cpu_s = look_s + time.thread_time() - began_s
                due_s = now_s + interval_s(cpu_s)
            else:
                due_s = now_s + MIN_INTERVAL_S
            await self._until(due_s)

    async def _until(self, due_s: float) -> None:
        """Or until nobody watches any more."""
        while (left_s := due_s - time.monotonic()) > 0:
            self._has_changed.clear()
            waits = [
                asyncio.ensure_future(event.wait()) for event in (self._has_changed, self._stopping)
            ]
            await asyncio.wait(waits, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            for one in waits:
                one.cancel()
            if not self._viewers or self._stopping.is_set():
                return

    def _send(self, start: bytes, frame: Frame | None, encoder: FrameEncoder, cpu_s: float) -> None:
        """To those who have all before it the frame, to others all."""
        line = full = b""
        for viewer in self._viewers:
            if viewer.is_behind:
                if not full:
                    is_whole = frame is not None and "full" in frame
                    full = start + _line(frame if frame and is_whole else encoder.full())
                viewer.is_behind = False
                viewer.put(full)
            elif frame is not None:
                line = line or _line({**frame, "cpu_us": round(1e6 * cpu_s)})
                viewer.put(line)

    def _start(self, snapshot: Snapshot) -> Frame:
        return start_frame(
            model=self._model,
            block_size=snapshot.block_size,
            num_blocks=snapshot.statistics.num_blocks,
            num_cpu_blocks=snapshot.statistics.num_cpu_blocks,
            max_num_seqs=self._engine.max_num_seqs,
            shows_text=self._shows_text,
        )


def _text_of(tokenizer: Any, request: Request) -> str:
    """Its beginning."""
    if request.prompt is not None:
        return request.prompt
    ids = request.prompt_token_ids[:MAX_TEXT_CHARS].tolist()
    text: str = tokenizer.decode(ids, skip_special_tokens=False)
    return text


def interval_s(cpu_s: float) -> float:
    """From a look that cost so much to the next one."""
    return max(MIN_INTERVAL_S, cpu_s / MAX_PART)


def _close(view: View, engine: Any) -> None:
    engine.close_view(view)


def _timed_look(view: View, _: Any) -> tuple[Look, float]:
    """On the engine's thread; with the CPU time that it took."""
    began_s = time.thread_time()
    look = view.take()
    return look, time.thread_time() - began_s


def _line(frame: Frame) -> bytes:
    return json.dumps(frame, separators=(",", ":")).encode() + b"\n"
