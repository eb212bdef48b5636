"""Requests that do not run, in the order in which they get their turn."""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from pagedkv.scheduler.entry import Entry


def rank_of(policy: str, priority: int, num_steps: int, ageing_steps: int) -> int:
    """The place of an arrival among the others: the smaller, the earlier; equals by arrival.

    Under "priority", waiting for ageing_steps steps makes up for one level of priority. Since every
    request ages alike, that is a number which never changes: a request stands as though it had
    arrived priority * ageing_steps steps later. So one of priority p is passed only by those of
    priority q < p that arrive at most (p - q) * ageing_steps steps after it.
    """
    if policy == "fcfs":
        return 0
    return num_steps + priority * ageing_steps


class RankedQueue:
    """Waiting and swapped-out requests in one order, since they wait for the same blocks."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries)

    def __getitem__(self, index: int) -> Entry:
        return self._entries[index]

    def __contains__(self, entry: Entry) -> bool:
        place = self._place(entry)
        return place < len(self._entries) and self._entries[place] is entry

    def push(self, entry: Entry) -> None:
        bisect.insort(self._entries, entry, key=_key)

    def remove(self, entry: Entry) -> None:
        """REQUIRES that it is here."""
        if entry not in self:
            raise RuntimeError(f"request {entry.request.request_id!r} is not queued")
        del self._entries[self._place(entry)]

    def _place(self, entry: Entry) -> int:
        return bisect.bisect_left(self._entries, entry.key, key=_key)


def _key(entry: Entry) -> tuple[int, int]:
    return entry.key
