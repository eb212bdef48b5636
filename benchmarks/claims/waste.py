"""Where the memory of a KV cache goes that holds no token, by the words of the PagedAttention paper
(section 3.1):

* used: tokens whose K/V is there;
* reserved: room that its request will use later;
* internal: room in a request's region, or in its last block, that it will never use;
* external: free room of a contiguous cache that is enough for the first who waits, but not in one
  piece;
* free: the rest.

Wasted is reserved, internal and external, as part of all that is not free. Of a paged cache that is
the tail of each sequence's last block: (block_size - 1) / 2 tokens a sequence on average, since the
last block has 1 to block_size tokens, each as often.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from claims.reserving import Reservation
from pagedkv.scheduler import Scheduler


def tail_tokens(block_size: int) -> float:
    """Unused tokens in the last block of a sequence, on average."""
    return (block_size - 1) / 2


@dataclass(frozen=True, slots=True)
class Wasted:
    """Tokens, or their means over time. num_seqs: sequences with K/V."""

    used: float = 0.0
    reserved: float = 0.0
    internal: float = 0.0
    external: float = 0.0
    free: float = 0.0
    num_seqs: float = 0.0

    @property
    def taken(self) -> float:
        """All that is not free."""
        return self.used + self.reserved + self.internal + self.external

    def part(self, name: str) -> float:
        """Of all that is not free."""
        return float(getattr(self, name)) / self.taken if self.taken else 0.0

    @property
    def wasted(self) -> float:
        return self.part("reserved") + self.part("internal") + self.part("external")


class Waste:
    """Looks at a manager after each step. totals: K/V tokens that each request has at its end."""

    def __init__(
        self, manager: Any, scheduler: Scheduler, totals: Mapping[str, int], *, is_paged: bool
    ) -> None:
        self._manager = manager
        self._scheduler = scheduler
        self._totals = totals
        self._is_paged = is_paged
        self._seen: list[tuple[float, float, Wasted, bool]] = []  # end, seconds, what, is full

    def look(self, end_s: float, seconds: float) -> None:
        is_full = self._scheduler.num_waiting > 0
        self._seen.append((end_s, seconds, self._now(), is_full))

    def mean(self) -> Wasted:
        """Over the time in which somebody waited; over all of it if nobody ever did. Of no looks
        nothing.
        """
        if not self._seen:
            return Wasted()
        seen = [one for one in self._seen if one[3]] or self._seen
        return _mean([(seconds, wasted) for _, seconds, wasted, _ in seen])

    def over_time(self, num_parts: int = 20) -> list[tuple[float, Wasted]]:
        """The middle of each of num_parts equal parts of the run, and its mean."""
        if not self._seen:
            return []
        end_s, parts = self._seen[-1][0], []
        for k in range(num_parts):
            begin, end = end_s * k / num_parts, end_s * (k + 1) / num_parts
            seen = [(one[1], one[2]) for one in self._seen if begin < one[0] <= end]
            if seen:
                parts.append(((begin + end) / 2, _mean(seen)))
        return parts

    def _now(self) -> Wasted:
        manager, size = self._manager, self._manager.block_size
        used = reserved = internal = taken = 0
        table, running = self._scheduler.slots, self._scheduler._running
        for slot in running.order.tolist():
            entry = running.entry_at(slot)
            tokens, total = int(table.num_computed[slot]), self._totals[entry.request.request_id]
            room = -(-tokens // size) * size
            if not self._is_paged:
                room = manager.region_len(entry.seq_id)
            used += tokens
            reserved += min(room, total) - tokens
            internal += max(0, room - total)
            taken += room
        free = manager.num_blocks * size - taken
        external = 0 if self._is_paged else self._unusable(free)
        return Wasted(used, reserved, internal, external, free - external, len(running))

    def _unusable(self, free: int) -> int:
        queue = self._scheduler._queue
        if not len(queue):
            return 0
        wanted = Reservation.of_key(queue[0].request.extra_key)
        size = self._manager.block_size
        needed = wanted.num_lanes * -(-wanted.num_tokens // size) * size
        largest = max((hole for _, hole in self._manager.holes()), default=0) * size
        return free if largest < needed <= free else 0


def _mean(seen: list[tuple[float, Wasted]]) -> Wasted:
    seconds = sum(one for one, _ in seen)
    names = ("used", "reserved", "internal", "external", "free", "num_seqs")
    return Wasted(
        *(sum(s * getattr(wasted, name) for s, wasted in seen) / seconds for name in names)
    )
