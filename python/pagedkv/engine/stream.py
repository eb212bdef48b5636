"""Stream: what an engine on its own thread has to tell of a few requests, for one reader on an
event loop. Filled and read on that loop only.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterable

from pagedkv.records import OutputDelta, RequestOutput

Item = OutputDelta | RequestOutput


class EngineDead(RuntimeError):
    """The engine's thread has ended by an error of its own; it answers nobody any more."""


class Stream:
    """Deltas and outputs of requests that came together, in order."""

    def __init__(self, request_ids: Iterable[str]) -> None:
        self.request_ids = tuple(request_ids)
        self._unfinished = set(self.request_ids)
        self._items: list[Item] = []
        self._ready = asyncio.Event()
        self._failure: Exception | None = None

    @property
    def is_done(self) -> bool:
        """Whether all that will ever come has been taken."""
        return not self._unfinished and not self._items

    def put(self, item: Item) -> None:
        if isinstance(item, RequestOutput):
            self._unfinished.discard(item.request_id)
        self._items.append(item)
        self._ready.set()

    def fail(self, error: Exception) -> None:
        """Nothing more will come; take() raises this when it has told what has come before."""
        self._failure = error
        self._ready.set()

    async def take(self) -> list[Item]:
        """All that has come since the last call, at least one item: a reader that is slow gets
        the deltas of one answer joined.

        Raises what fail() was called with, EngineDead say. REQUIRES not is_done.
        """
        # Without a time limit around it: asyncio.wait_for before Python 3.12 loses a cancellation
        # that comes together with an item.
        await self._ready.wait()
        if self._failure is None:
            self._ready.clear()
        items, self._items = self._items, []
        if not items:
            assert self._failure is not None
            raise self._failure
        return joined(items)


def joined(items: list[Item]) -> list[Item]:
    """The items with neighbouring deltas of the same answer as one."""
    told: list[Item] = []
    last: dict[tuple[str, int], int] = {}  # answer -> where its latest delta stands in told
    for item in items:
        if isinstance(item, RequestOutput):
            told.append(item)
            continue
        answer = (item.request_id, item.index)
        if answer not in last:
            last[answer] = len(told)
            told.append(item)
            continue
        before = told[last[answer]]
        assert isinstance(before, OutputDelta)
        told[last[answer]] = dataclasses.replace(
            item,
            text=before.text + item.text,
            token_ids=before.token_ids + item.token_ids,
            logprobs=None if item.logprobs is None else (before.logprobs or []) + item.logprobs,
        )
    return told
