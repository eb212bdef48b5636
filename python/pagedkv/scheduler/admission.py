"""Who may start: what can never run is refused with its numbers, what does not fit yet waits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pagedkv.block_manager import FREED_BLOCK, BlockManager, CanAllocate
from pagedkv.request import Request
from pagedkv.scheduler.entry import Entry
from pagedkv.scheduler.running import RunningSet
from pagedkv.scheduler.slots import SlotTable
from pagedkv.scheduler.window import Window

# Steps of growth that are left to running sequences when a swapped-out one comes back beside them.
# Fewer: it is pushed out again before it has gone far. More: blocks lie idle.
_GROWTH_STEPS = 16


class Admission:
    """Answers for queued requests. Changes neither queue nor manager.

    Where a sequence's worst case is kept for it, so that it is not preempted any more, blocks that
    it has stand for a part of that. One that two such sequences share stands for a part of both
    where it stays with both; behind a sliding window each gives it back and goes on with one of its
    own, so there it counts once.
    """

    def __init__(
        self, manager: BlockManager, max_model_len: int, window: Window, running: RunningSet
    ) -> None:
        self._manager = manager
        self._running = running
        self._max_model_len = max_model_len
        self._window = window

    def worst_case(self, request: Request) -> int:
        """Blocks it holds if it generates all it may. The last token is returned but never attended
        to, so its K/V needs no place.
        """
        return self._window.blocks_for(request.prompt_len + request.max_tokens - 1)

    def check(self, request: Request) -> None:
        """Raise ValueError if the request is longer than the context or the whole pool."""
        prompt_len, max_tokens = request.prompt_len, request.max_tokens
        total = prompt_len + max_tokens
        if total > self._max_model_len:
            raise ValueError(
                f"request {request.request_id!r}: the prompt has {prompt_len} tokens and "
                f"{max_tokens} more are requested, {total} in all, but max_model_len is "
                f"{self._max_model_len}"
            )
        needed = self.worst_case(request)
        if request.num_candidates:
            self._check_beams(request, request.num_forks * needed)
        if needed > self._manager.num_blocks:
            raise ValueError(
                f"request {request.request_id!r} can never run: its {prompt_len} prompt tokens and "
                f"up to {max_tokens} generated ones need {needed} blocks of "
                f"{self._manager.block_size} tokens{self._of_the_window()}, but the pool has "
                f"{self._manager.num_blocks}. Shorten the prompt, lower max_tokens, or raise "
                "num_gpu_blocks_override or kv_cache_memory_bytes"
            )

    def _of_the_window(self) -> str:
        size = self._window.size
        return f" for a sliding window of {size} tokens" if size else ""

    def _check_beams(self, request: Request, needed: int) -> None:
        """Beams wait for each other, so they must fit together even when they share nothing."""
        if needed > self._manager.num_blocks:
            raise ValueError(
                f"request {request.request_id!r} can never run: its {request.num_forks} beams need "
                f"up to {needed} blocks of {self._manager.block_size} tokens together, but the "
                f"pool has {self._manager.num_blocks}. Lower beam_width or max_tokens, or raise "
                "num_gpu_blocks_override or kv_cache_memory_bytes"
            )

    def promised_blocks(
        self, table: SlotTable, slots: NDArray[np.int64], computed: NDArray[np.int64]
    ) -> int:
        """Blocks that running sequences will still take: for tokens they already have, and up to
        their worst case where that is reserved.

        Held back from new admissions, which would otherwise push prompts in progress out again.

        Args:
            computed: [slots.size], tokens of each that have their blocks.
        """
        size = self._manager.block_size
        wanted = self._window.blocks_for_each(table, slots)
        wanted = np.maximum(wanted, table.worst_blocks[slots])
        held = (computed + size - 1) // size - table.num_freed_blocks[slots]
        reserved = slots[table.worst_blocks[slots] > 0]
        return int((wanted - held).sum()) + self._counted_twice(table.seq_ids[reserved].tolist())

    def _counted_twice(self, seq_ids: list[int], beside: Sequence[int] = ()) -> int:
        """Behind a sliding window, the entries of these sequences' tables beyond one for each block
        that none of those beside holds.
        """
        if not self._window.size or not seq_ids or len(seq_ids) + len(beside) == 1:
            return 0
        held = self._held(seq_ids)
        return held.size - np.setdiff1d(held, self._held(beside)).size

    def _held(self, seq_ids: Sequence[int]) -> NDArray[np.int32]:
        tables = [self._manager.block_table(seq_id) for seq_id in seq_ids]
        held = np.concatenate([np.empty(0, dtype=np.int32), *tables])
        blocks: NDArray[np.int32] = held[held != FREED_BLOCK]
        return blocks

    def copied_blocks(
        self, table: SlotTable, slots: NDArray[np.int64], num_new: NDArray[np.int64]
    ) -> int:
        """Blocks that copies on write take, beyond those promised, when the running sequences in
        these slots compute num_new tokens each.
        """
        size, computed = self._manager.block_size, table.num_computed[slots]
        grown = (computed + num_new + size - 1) // size - (computed + size - 1) // size
        return self._manager.num_blocks_needed(table.seq_ids[slots], num_new) - int(grown.sum())

    def held_blocks(self, table: SlotTable, slot: int) -> int:
        """Blocks in the table of a running sequence."""
        computed = int(table.num_computed[slot])
        return -(-computed // self._manager.block_size) - int(table.num_freed_blocks[slot])

    def kept_blocks(self, entry: Entry) -> int:
        """Blocks for the tokens it has, or for all it can ever have where that is reserved."""
        num_freed = entry.num_freed_blocks if entry.is_swapped else 0
        needed = self._window.blocks_for(entry.token_ids.size, num_freed)
        return max(needed, self.worst_case(entry.request)) if entry.is_reserved else needed

    def needed_blocks(self, entry: Entry) -> int:
        """Blocks that it must find free to start, with its unit, a cached prefix not counted on."""
        needed = sum(self.kept_blocks(one) for one in entry.unit)
        if not entry.is_swapped:
            return needed
        # What other sequences share with them has stayed in the pool. One more for each, since the
        # block it writes next may be shared with a fork and copied then.
        manager, size = self._manager, self._manager.block_size
        held = sum(
            -(-manager.num_tokens(one.seq_id) // size) - one.num_freed_blocks for one in entry.unit
        )
        returning = manager.num_swap_in_blocks([one.seq_id for one in entry.unit])
        reserved = [one.seq_id for one in entry.unit if one.is_reserved]
        table, order = self._running.slots, self._running.order
        beside = table.seq_ids[order[table.worst_blocks[order] > 0]].tolist()
        held -= self._counted_twice(reserved, beside)
        return needed - held + returning + len(entry.unit)

    def has_room(self, entry: Entry, promised: int, *, num_running: int) -> bool:
        """Whether it may start now. Alone in the pool it always may: it fits, as check has shown,
        and the watermark counts only beside others.
        """
        available = self._manager.num_allocatable_blocks
        needed = self.needed_blocks(entry)
        if num_running == 0 and needed <= available:
            return True
        if entry.is_swapped:
            # Beside others it leaves them some steps' growth, or it would soon be pushed out again.
            # Behind a window they hardly grow.
            num_steps = 1 if self._window.size else _GROWTH_STEPS
            growth = num_running * num_steps // self._manager.block_size + 1
            return needed + promised + growth <= available
        # Asking again costs a hash of its whole prompt, and cannot end differently until there are
        # more blocks.
        if entry.blocked_at is not None and available <= entry.blocked_at:
            return False
        # With promises outstanding a cached prefix is not counted on: too careful until those
        # prompts are done, never wrong. Behind a window little of it would be held anyway.
        is_careful = promised or entry.is_reserved or self._window.size
        if is_careful and needed + promised > available:
            return False
        if self._can_allocate(entry) == CanAllocate.OK:
            entry.blocked_at = None
            return True
        entry.blocked_at = available
        return False

    def _can_allocate(self, entry: Entry) -> CanAllocate:
        window = self._window
        return self._manager.can_allocate(
            entry.token_ids,
            max_new_tokens=window.first_chunk if window.size else None,
            extra_key=entry.request.extra_key,
            window=window.size,
        )
