"""The running sequences: which request holds which slot, in order of rank."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pagedkv.scheduler.entry import Entry, ForkGroup
from pagedkv.scheduler.slots import FREE, SlotTable


class RunningSet:
    """Owner of the slot table. order int64 [num_running]: slots, lowest rank first."""

    def __init__(self, max_num_seqs: int, max_model_len: int) -> None:
        self.slots = SlotTable(max_num_seqs, max_model_len)
        self.by_slot: list[Entry | None] = [None] * max_num_seqs
        self.order: NDArray[np.int64] = np.empty(0, dtype=np.int64)

    def __len__(self) -> int:
        return int(self.order.size)

    def entry_at(self, slot: int) -> Entry:
        entry = self.by_slot[slot]
        if entry is None:
            raise RuntimeError(f"slot {slot} has no request")
        return entry

    def enter(
        self, entry: Entry, num_computed: int, worst_blocks: int, *, num_freed_blocks: int
    ) -> int:
        """Give a request a slot. REQUIRES a free one."""
        table = self.slots
        slot = table.take(
            entry.request, entry.seq_id, entry.token_ids, rank=entry.rank, worst_blocks=worst_blocks
        )
        table.num_computed[slot] = num_computed
        table.num_freed_blocks[slot] = num_freed_blocks
        table.cumulative_logprobs[slot] = entry.cumulative_logprob
        group = entry.group
        if group is not None and group.search is None and not group.is_forked:
            table.num_answers[slot] = entry.request.sampling_params.num_forks
        entry.slot = slot
        self.by_slot[slot] = entry
        order = np.append(self.order, slot)
        if order.size > 1 and entry.key < self.entry_at(int(order[-2])).key:
            order = order[np.lexsort((table.seq_ids[order], table.ranks[order]))]
        self.order = order
        return slot

    def is_only(self, group: ForkGroup | None) -> bool:
        """Whether nothing runs, or nothing but the beams of this search."""
        if self.order.size == 0:
            return True
        if group is None or group.search is None:
            return False
        return sum(beam.slot is not None for beam in group.beams) == self.order.size

    def leave(self, entries: Sequence[Entry]) -> None:
        """Take their slots back."""
        for entry in entries:
            assert entry.slot is not None
            entry.candidates = None
            entry.cumulative_logprob = float(self.slots.cumulative_logprobs[entry.slot])
            entry.num_freed_blocks = int(self.slots.num_freed_blocks[entry.slot])
            self.slots.release(entry.slot)
            self.by_slot[entry.slot] = None
            entry.slot = None
        self.order = self.order[self.slots.seq_ids[self.order] != FREE]
