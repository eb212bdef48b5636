"""The baseline: a request's K/V in one contiguous region, reserved when it starts, as engines had
it before pages. A scheduler drives it in place of a BlockManager.

A region's blocks are consecutive block ids, so the same model and kernels run on both. How much is
reserved is the request's Reservation (reserving.py), which it carries as its cache_salt: without
pages there is no prefix cache that would read it. Several answers to one prompt have a lane each in
one region. A fork reads its parent's lane until one of the two writes: then the writer gets a lane
of its own and everything is copied, where pages copy one block.

There is no CPU pool, and nothing is found again.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from claims.lanes import Lane, Lanes
from claims.reserving import Reservation
from pagedkv.block_manager import (
    BlockState,
    CanAllocate,
    MissReason,
    OutOfBlocks,
    Statistics,
    UnknownSequence,
)
from pagedkv.records import ScheduledStep, no_evictions
from pagedkv.scheduler import Scheduler

_COUNTERS = [name for name in dir(Statistics) if not name.startswith("_")]


@dataclass(slots=True)
class _Sequence:
    lane: Lane
    num_tokens: int


class ContiguousManager:
    """What a scheduler without CPU pool, prefix cache and sliding window asks of a BlockManager.
    Methods mean what they mean there.

    Invariant: a lane's holders are its sequences.
    """

    has_offloading = False

    def __init__(self, num_blocks: int, block_size: int = 16) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_copies = 0
        self._lanes = Lanes(num_blocks, block_size)
        self._sequences: dict[int, _Sequence] = {}
        self._steps: list[int] = []  # in flight
        self._last_step = 0

    # -- questions ---------------------------------------------------------------------

    @property
    def num_allocatable_blocks(self) -> int:
        """Free blocks and free lanes. 0 while something drains: how much fits is not known then."""
        return 0 if self._lanes.draining else self._lanes.num_free_blocks

    @property
    def num_returning_blocks(self) -> int:
        return sum(lane.num_blocks for lane in self._lanes.draining)

    def holes(self) -> list[tuple[int, int]]:
        """(start, size) of the free parts of the pool, in blocks."""
        return self._lanes.holes.as_pairs()

    def region_len(self, seq_id: int) -> int:
        """Tokens that its lane has room for."""
        return self._sequence(seq_id).lane.num_blocks * self.block_size

    def num_tokens(self, seq_id: int) -> int:
        return self._sequence(seq_id).num_tokens

    def place(self, seq_id: int) -> tuple[int, int]:
        """The first block of its lane, and its tokens."""
        one = self._sequence(seq_id)
        return one.lane.start, one.num_tokens

    def block_table(self, seq_id: int) -> NDArray[np.int32]:
        one = self._sequence(seq_id)
        end = one.lane.start + self._lanes.blocks_for(one.num_tokens)
        return np.arange(one.lane.start, end, dtype=np.int32)

    def num_freed_blocks(self, seq_id: int) -> int:
        self._sequence(seq_id)
        return 0

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._sequences

    def match(self, token_ids: ArrayLike, *, extra_key: bytes = b"") -> int:
        return 0

    @property
    def last_miss(self) -> SimpleNamespace:
        return SimpleNamespace(reason=MissReason.CACHING_OFF, evicted_in=0, evicted_for=0)

    # -- one sequence ------------------------------------------------------------------

    def can_allocate(
        self,
        token_ids: ArrayLike,
        *,
        max_new_tokens: int | None = None,
        reserve_tokens: int = 0,
        extra_key: bytes = b"",
        window: int = 0,
    ) -> CanAllocate:
        """No watermark: what runs has its region already."""
        wanted = Reservation.of_key(extra_key)
        if wanted.num_lanes * self._lanes.blocks_for(wanted.num_tokens) > self.num_blocks:
            return CanAllocate.NEVER
        return CanAllocate.OK if self._lanes.fit([wanted]) else CanAllocate.LATER

    def allocate(
        self,
        seq_id: int,
        token_ids: ArrayLike,
        *,
        max_new_tokens: int | None = None,
        extra_key: bytes = b"",
        window: int = 0,
    ) -> int:
        """Returns 0: nothing is found again."""
        if seq_id in self._sequences:
            raise ValueError(f"sequence {seq_id} exists")
        wanted = Reservation.of_key(extra_key)
        num_tokens = int(np.asarray(token_ids).size)
        if num_tokens > wanted.num_tokens:
            raise ValueError(f"{num_tokens} tokens do not fit in a region for {wanted.num_tokens}")
        held = num_tokens if max_new_tokens is None else min(num_tokens, max_new_tokens)
        self._sequences[seq_id] = _Sequence(self._lanes.take(wanted), held)
        return 0

    def fork_batch(self, parent_ids: ArrayLike, child_ids: ArrayLike) -> None:
        for parent_id, child_id in zip(_ids(parent_ids), _ids(child_ids), strict=True):
            parent = self._sequence(parent_id)
            parent.lane.holders += 1
            self._sequences[child_id] = _Sequence(parent.lane, parent.num_tokens)

    def free(self, seq_id: int) -> None:
        self.free_batch([seq_id])

    def free_batch(self, seq_ids: ArrayLike) -> None:
        gone = _ids(seq_ids)
        for seq_id in gone:
            self._sequence(seq_id)
        for seq_id in gone:
            self._let_go(self._sequences.pop(seq_id).lane)

    # -- a step ------------------------------------------------------------------------

    def num_blocks_needed(self, seq_ids: ArrayLike, counts: ArrayLike) -> int:
        """Blocks of new lanes; more than can be taken, if they cannot all be placed now."""
        writers = [wanted for _, wanted in self._copiers(_ids(seq_ids))]
        if not writers:
            return 0
        if not self._lanes.draining and self._lanes.fit(writers):
            return sum(self._lanes.blocks_for(wanted.num_tokens) for wanted in writers)
        return self.num_allocatable_blocks + 1

    def append_batch(self, seq_ids: ArrayLike, counts: ArrayLike) -> NDArray[np.int64]:
        ids, new = _ids(seq_ids), _ids(counts)
        for seq_id, count in zip(ids, new, strict=True):
            num_tokens, room = self.num_tokens(seq_id), self.region_len(seq_id)
            if num_tokens + count > room:
                raise OutOfBlocks(f"{num_tokens} + {count} tokens in a region for {room}")
        copiers = self._copiers(ids)
        if copiers and not self._lanes.fit([wanted for _, wanted in copiers]):
            raise OutOfBlocks(f"{len(copiers)} lanes more are needed and do not fit")
        pairs: list[tuple[int, int]] = []
        for seq_id, wanted in copiers:
            one, lane = self._sequences[seq_id], self._lanes.take(wanted)
            used = range(self._lanes.blocks_for(one.num_tokens))
            pairs += [(one.lane.start + i, lane.start + i) for i in used]
            self._let_go(one.lane)
            one.lane = lane
        for seq_id, count in zip(ids, new, strict=True):
            self._sequences[seq_id].num_tokens += count
        self.num_copies += len(pairs)
        return np.array(pairs, dtype=np.int64).reshape(-1, 2)

    def publish_batch(
        self,
        seq_ids: ArrayLike,
        token_ids: ArrayLike,
        counts: ArrayLike,
        num_computed_tokens: ArrayLike,
    ) -> None:
        for seq_id in _ids(seq_ids):
            self._sequence(seq_id)

    def begin_step(self) -> int:
        self._last_step += 1
        self._steps.append(self._last_step)
        return self._last_step

    def end_step(self, step_id: int, *, has_failed: bool = False) -> None:
        if not self._steps or self._steps[0] != step_id:
            raise ValueError(f"step {step_id} is not the oldest of those in flight, {self._steps}")
        self._lanes.end_step(self._steps.pop(0))

    def num_swap_out_blocks(self, seq_ids: ArrayLike) -> int:
        """Blocks that come back if all of these go. None is ever swapped: there is no CPU pool."""
        lanes = [self._sequence(seq_id).lane for seq_id in _ids(seq_ids)]
        distinct = {id(lane): lane for lane in lanes}
        return sum(
            lane.num_blocks
            for lane in distinct.values()
            if sum(other is lane for other in lanes) == lane.holders
        )

    def take_evicted(self) -> NDArray[np.int64]:
        return no_evictions()

    # -- the whole ---------------------------------------------------------------------

    def reset_prefix_cache(self) -> int:
        return 0

    def statistics(self) -> Any:
        """With BlockManager's names. A reserved block counts as referenced."""
        num_free, draining = self._lanes.holes.num_free, self.num_returning_blocks
        lanes = {id(one.lane): (one.lane, one.num_tokens) for one in self._sequences.values()}
        num_tokens = sum(num_tokens for _, num_tokens in lanes.values())
        known = {
            "num_blocks": self.num_blocks,
            "num_free": num_free,
            "num_draining": draining,
            "num_referenced": self.num_blocks - num_free - draining,
            "num_shared": sum(lane.num_blocks for lane, _ in lanes.values() if lane.holders > 1),
            "num_sequences": len(self._sequences),
            "num_tokens": num_tokens,
            "num_copies": self.num_copies,
            "block_occupancy": 1 - num_free / self.num_blocks,
            "token_occupancy": num_tokens / (self.num_blocks * self.block_size),
        }
        return SimpleNamespace(**(dict.fromkeys(_COUNTERS, 0) | known))

    def ref_counts(self) -> NDArray[np.int32]:
        counts = np.zeros(self.num_blocks, dtype=np.int32)
        for lane in self._lanes:
            counts[lane.start : lane.start + lane.num_blocks] = lane.holders
        return counts

    def states(self) -> NDArray[np.uint8]:
        states = np.full(self.num_blocks, BlockState.FREE.value, dtype=np.uint8)
        for lane in self._lanes:
            state = BlockState.DRAINING if lane.draining_until else BlockState.REFERENCED
            states[lane.start : lane.start + lane.num_blocks] = state.value
        return states

    def cpu_states(self) -> NDArray[np.uint8]:
        return np.empty(0, dtype=np.uint8)

    def check_invariants(self) -> None:
        """Raise AssertionError if the books are wrong."""
        self._lanes.check_invariants()
        held = [one.lane for one in self._sequences.values()]
        for lane in self._lanes:
            assert lane.holders == sum(one is lane for one in held), "holders are miscounted"
        for one in self._sequences.values():
            room = one.lane.num_blocks * self.block_size
            assert 0 < one.num_tokens <= room, f"{one.num_tokens} tokens in room for {room}"

    # -- inside ------------------------------------------------------------------------

    def _sequence(self, seq_id: int) -> _Sequence:
        if seq_id not in self._sequences:
            raise UnknownSequence(f"no sequence {seq_id}")
        return self._sequences[seq_id]

    def _let_go(self, lane: Lane) -> None:
        self._lanes.let_go(lane, self._steps[-1] if self._steps else None)

    def _copiers(self, seq_ids: list[int]) -> list[tuple[int, Reservation]]:
        """Those who would write into a lane that somebody else reads then, and what they need."""
        holders: dict[int, int] = {}
        found = []
        for seq_id in seq_ids:
            lane = self._sequence(seq_id).lane
            left = holders.get(id(lane), lane.holders)
            if left > 1:
                holders[id(lane)] = left - 1
                room = lane.num_blocks * self.block_size
                found.append((seq_id, Reservation(lane.region.family, room)))
        return found


class ContiguousScheduler(Scheduler):
    """The scheduler, but for one shortcut that is right only with pages: that who found no room
    finds none before more blocks are free. Here fewer may lie better.
    """

    def schedule(self) -> ScheduledStep | None:
        self._ask_again()
        return super().schedule()

    def schedule_ahead(self) -> ScheduledStep | None:
        self._ask_again()
        return super().schedule_ahead()

    def _ask_again(self) -> None:
        for entry in self._queue:
            entry.blocked_at = None


def _ids(values: ArrayLike) -> list[int]:
    ids: list[int] = np.asarray(values, dtype=np.int64).ravel().tolist()
    return ids
