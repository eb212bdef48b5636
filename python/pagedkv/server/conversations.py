"""Conversations: what can be forked. Requests that run, by the ids of their responses, and those
that have ended and were to be kept for a while: tokens here, blocks pinned in the engine.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from pagedkv.engine import AsyncEngine
from pagedkv.records import CompletionOutput, RequestOutput


@dataclass(frozen=True, slots=True)
class Origin:
    """How a response came to be. tenant: whoever may fork it. messages: of a chat. keep_s: for how
    long it can be forked when it has ended; None: not at all. cache_salt: of its blocks.
    """

    tenant: str
    messages: tuple[dict[str, Any], ...] | None = None
    keep_s: float | None = None
    cache_salt: str | None = None


@dataclass(frozen=True, slots=True)
class Running:
    """request_ids: of the engine's; answer i of a fork is one of its own."""

    origin: Origin
    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Kept:
    """A response that has ended, of one prompt."""

    origin: Origin
    output: RequestOutput

    def answer(self, choice: int) -> CompletionOutput | None:
        answers = self.output.outputs
        return answers[choice] if choice < len(answers) else None


class Conversations:
    """Used on one event loop. At most max_kept are kept; the oldest go before their time."""

    def __init__(self, engine: AsyncEngine, max_kept: int) -> None:
        self._engine = engine
        self._max_kept = max_kept
        self._running: dict[str, Running] = {}
        self._kept: OrderedDict[str, tuple[Kept, asyncio.TimerHandle]] = OrderedDict()

    def begin(self, response_id: str, origin: Origin, request_ids: tuple[str, ...]) -> None:
        self._running[response_id] = Running(origin, request_ids)

    def end(self, response_id: str, output: RequestOutput | None) -> None:
        """output: the whole of it, where it came so far and is of one prompt."""
        running = self._running.pop(response_id, None)
        if running is None or output is None or running.origin.keep_s is None:
            return
        timer = asyncio.get_running_loop().call_later(
            running.origin.keep_s, self.forget, response_id
        )
        self._kept[response_id] = Kept(running.origin, output), timer
        while len(self._kept) > self._max_kept:
            self.forget(next(iter(self._kept)))

    def forget(self, response_id: str) -> None:
        """What was kept of it is free."""
        found = self._kept.pop(response_id, None)
        if found is not None:
            kept, timer = found
            timer.cancel()
            name, num_answers = kept.output.request_id, len(kept.output.outputs)
            self._engine.unpin([name, *(f"{name}-{k}" for k in range(num_answers))])

    def running(self, response_id: str, tenant: str) -> Running | None:
        found = self._running.get(response_id)
        return found if found is not None and found.origin.tenant == tenant else None

    def kept(self, response_id: str, tenant: str) -> Kept | None:
        found = self._kept.get(response_id)
        return found[0] if found is not None and found[0].origin.tenant == tenant else None
