"""AsyncEngine: an engine on a thread of its own, for callers on an event loop.

The thread owns the engine. Everything else asks by commands, which it obeys between two steps, in
the order in which they came; results go back to the loop once a step.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pagedkv.engine.engine import Engine
from pagedkv.engine.requests import Prompt
from pagedkv.engine.run_metrics import MetricsSnapshot, RunMetrics
from pagedkv.engine.stream import EngineDead, Item, Stream
from pagedkv.records import RequestOutput, StepResult
from pagedkv.request import Request
from pagedkv.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Submission:
    """A request as Engine.add_request takes it. prompt: token ids, so that nothing is tokenized on
    the engine's thread; prompt_text: what its output shows.
    """

    request_id: str
    prompt: Prompt
    params: SamplingParams
    prompt_text: str | None = None
    cache_salt: str | None = None
    priority: int = 0
    user: str | None = None
    keeps_blocks: bool = False


class _Command:
    """A call on the engine's thread, and the future that waits for what it returns."""

    __slots__ = ("_call", "_future", "_loop")

    def __init__(
        self,
        call: Callable[[Engine], Any],
        loop: asyncio.AbstractEventLoop,
        future: asyncio.Future[Any],
    ) -> None:
        self._call = call
        self._loop = loop
        self._future = future

    def run(self, engine: Engine) -> None:
        try:
            value = self._call(engine)
        except Exception as error:
            self.refuse(error)
        else:
            self._loop.call_soon_threadsafe(_settle, self._future, value, None)

    def refuse(self, error: Exception) -> None:
        self._loop.call_soon_threadsafe(_settle, self._future, None, error)


def _settle(future: asyncio.Future[Any], value: object, error: Exception | None) -> None:
    if future.done():  # whoever waited has gone
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(value)


class AsyncEngine:
    """All methods but the constructor belong to the event loop that start() was called on. snapshot
    may be read anywhere: it is replaced behind each step, never changed.

    Example::

        engine = AsyncEngine(Engine.from_config(config))
        engine.start()
        stream = await engine.submit([Submission("a", [1, 2, 3], SamplingParams())], stream=True)
        while not stream.is_done:
            print(await stream.take())
        await engine.stop()
    """

    def __init__(self, engine: Engine, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._clock = clock
        self._commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._streams: dict[str, Stream] = {}
        # How many aborts of an id the engine has not obeyed yet: what comes of it is nobody's.
        self._leaving: dict[str, int] = {}
        self._failure: EngineDead | None = None
        self._busy_since_s: float | None = None  # start of the step or command that runs
        self._metrics = RunMetrics(engine)
        self.snapshot: MetricsSnapshot = self._metrics.snapshot()  # the last one
        self._after_step: list[Callable[[Engine], None]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="pagedkv-engine", daemon=True)
        self.tokenizer = engine.tokenizer
        self.max_model_len = engine.max_model_len
        self.max_num_seqs = engine.max_num_seqs

    # -- life ----------------------------------------------------------------------------

    def after_step(self, call: Callable[[Engine], None]) -> None:
        """Call this on the engine's thread behind each step and each batch of commands: to publish
        a snapshot, say. It raises nothing. REQUIRES that start() has not been called.
        """
        self._after_step.append(call)

    def start(self) -> None:
        """Start the thread; results go to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self, timeout_s: float = 30.0) -> None:
        """End every unfinished request ("abort"), and the thread; a step that does not end in time
        is left behind.
        """
        if self._failure is None:
            self._failure = EngineDead("the server is shutting down")
        self._commands.put(None)
        await asyncio.get_running_loop().run_in_executor(None, self._thread.join, timeout_s)

    @property
    def failure(self) -> EngineDead | None:
        """Why the engine answers nobody any more; None while it does."""
        return self._failure

    @property
    def stalled_s(self) -> float:
        """For how long the step or command that runs now has been running; 0 at rest."""
        since = self._busy_since_s
        return 0.0 if since is None else self._clock() - since

    @property
    def num_unfinished(self) -> int:
        """Requests that were submitted and have not ended, as the loop knows."""
        return len(self._streams)

    # -- requests ------------------------------------------------------------------------

    async def call(self, function: Callable[[Engine], _T]) -> _T:
        """Run a function on the engine's thread, between two steps, and return what it returns.

        Raises EngineDead, and what the function raises.
        """
        result: _T = await self._post(function)
        return result

    async def submit(self, submissions: Sequence[Submission], *, stream: bool) -> Stream:
        """Queue requests, all or none, and return where their results come.

        stream: their text comes in deltas before the output. Whoever stops reading before is_done
        calls abort.

        Raises:
            ValueError, TypeError: what is wrong with one of them; none was queued then.
            EngineDead: the engine has failed.
        """

        def add(engine: Engine) -> None:
            requests = [
                engine.make_request(
                    one.request_id,
                    one.prompt,
                    one.params,
                    prompt_text=one.prompt_text,
                    cache_salt=one.cache_salt,
                    priority=one.priority,
                    user=one.user,
                    keeps_blocks=one.keeps_blocks,
                )
                for one in submissions
            ]
            added: list[str] = []
            try:
                for request in requests:
                    engine.add(request, stream=stream)
                    added.append(request.request_id)
            except BaseException:
                for request_id in added:
                    engine.abort(request_id)
                raise

        return await self._open([one.request_id for one in submissions], add)

    async def fork(
        self,
        request_id: str,
        n: int,
        params_of: Callable[[Request, int], SamplingParams],
        *,
        stream: bool,
    ) -> Stream:
        """Forks of an unfinished request; see Engine.fork. params_of: theirs, made on the engine's
        thread from the request and the number of tokens that it has generated.

        Raises as Engine.fork does, and EngineDead.
        """
        opened: list[Stream] = []
        is_gone = False

        def listen(names: list[str]) -> None:
            opened.append(self._listen(names))
            if is_gone:
                self.abort(names)

        def fork(engine: Engine) -> None:
            parent = engine.parent(request_id)
            if parent is None:
                raise ValueError(
                    f"request {request_id!r} is not running, or asks for several answers: it "
                    "cannot be forked"
                )
            names = engine.fork(request_id, n, params_of(*parent), stream=stream)
            self._tell(listen, names)  # before any result of theirs

        try:
            await self._post(fork)
        except asyncio.CancelledError:
            is_gone = True
            if opened:
                self.abort(opened[0].request_ids)
            raise
        return opened[0]

    def unpin(self, names: Iterable[str]) -> None:
        """Give up blocks that requests have kept beyond their end."""

        def drop(engine: Engine) -> None:
            for name in names:
                engine.unpin(name)

        if self._failure is None:
            self._command(drop)

    def abort(self, request_ids: Iterable[str]) -> None:
        """End these requests if they have not ended; nothing more comes of them."""
        ids = [one for one in request_ids if self._streams.pop(one, None) is not None]
        if not ids or self._failure is not None:
            return

        def end(engine: Engine) -> None:
            try:
                for request_id in ids:
                    engine.abort(request_id)
            finally:
                self._tell(self._left, ids)  # behind all that has come of them

        for one in ids:
            self._leaving[one] = self._leaving.get(one, 0) + 1
        self._command(end)

    def abort_all(self) -> None:
        """End every unfinished request; each stream gets its output, with "abort", and ends."""

        def end(engine: Engine) -> None:
            for request_id in ids:
                output = engine.abort(request_id)
                if output is not None:
                    self._tell(self._deliver, StepResult([], [output]))

        ids = list(self._streams)
        if ids and self._failure is None:
            self._command(end)

    async def _open(self, request_ids: list[str], call: Callable[[Engine], None]) -> Stream:
        stream = self._listen(request_ids)
        try:
            await self._post(call)
        except asyncio.CancelledError:
            self.abort(request_ids)  # behind the command that adds them
            raise
        except BaseException:
            for request_id in request_ids:
                self._streams.pop(request_id, None)
            raise
        return stream

    def _listen(self, request_ids: list[str]) -> Stream:
        for i, request_id in enumerate(request_ids):
            if request_id in self._streams or request_id in request_ids[:i]:
                raise ValueError(f"request id {request_id!r} is in use by an unfinished request")
        stream = Stream(request_ids)
        self._streams.update(dict.fromkeys(request_ids, stream))
        return stream

    def _post(self, call: Callable[[Engine], Any]) -> asyncio.Future[Any]:
        if self._failure is not None:
            raise self._failure
        return self._command(call)

    def _command(self, call: Callable[[Engine], Any]) -> asyncio.Future[Any]:
        assert self._loop is not None, "AsyncEngine.start has not been called"
        future: asyncio.Future[Any] = self._loop.create_future()
        self._commands.put(_Command(call, self._loop, future))
        return future

    # -- what the thread tells the loop --------------------------------------------------

    def _tell(self, function: Callable[..., None], *args: Any) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *args)

    def _deliver(self, result: StepResult) -> None:
        items: list[Item] = [*result.deltas, *result.finished]
        for item in items:
            if item.request_id in self._leaving:
                continue
            stream = self._streams.get(item.request_id)
            if stream is not None:
                stream.put(item)
            if isinstance(item, RequestOutput):
                self._streams.pop(item.request_id, None)

    def _left(self, request_ids: Sequence[str]) -> None:
        for one in request_ids:
            self._leaving[one] -= 1
            if self._leaving[one] == 0:
                del self._leaving[one]

    def _fail(self, error: EngineDead) -> None:
        for stream in set(self._streams.values()):
            stream.fail(error)
        self._streams.clear()

    # -- the thread ----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._obey():
                result = self._engine.step() if self._engine.has_work else StepResult([], [])
                self.snapshot = self._metrics.snapshot()  # has all that anybody was told
                if result.deltas or result.finished:
                    self._tell(self._deliver, result)
                for call in self._after_step:
                    call(self._engine)
        except BaseException as error:
            logger.critical("the engine has failed and answers nobody any more", exc_info=True)
            self._failure = EngineDead(f"the engine has failed: {type(error).__name__}")
            self._tell(self._fail, self._failure)
            while (command := self._commands.get()) is not None:
                command.refuse(self._failure)

    def _obey(self) -> bool:
        """Run the commands that wait; at rest, wait for one. False: the thread is to end."""
        is_idle = not self._engine.has_work
        if is_idle:
            self._busy_since_s = None
        while True:
            try:
                command = self._commands.get(block=is_idle)
            except queue.Empty:
                self._busy_since_s = self._clock()
                return True
            self._busy_since_s = self._clock()
            if command is None:
                self._abort_rest()
                return False
            command.run(self._engine)
            is_idle = False

    def _abort_rest(self) -> None:
        for request_id in list(self._streams):
            output = self._engine.abort(request_id)
            if output is not None:
                self._tell(self._deliver, StepResult([], [output]))
