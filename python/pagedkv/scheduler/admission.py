"""Who may start: what can never run is refused with its numbers, what does not fit yet waits."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pagedkv.block_manager import BlockManager, CanAllocate
from pagedkv.request import Request
from pagedkv.scheduler.entry import Entry
from pagedkv.scheduler.slots import SlotTable


class Admission:
    """Answers for the head of the waiting queue. Changes neither queue nor manager."""

    def __init__(self, manager: BlockManager, max_model_len: int) -> None:
        self._manager = manager
        self._max_model_len = max_model_len
        # The head found no room while this many blocks were allocatable. Asking again costs a hash
        # of its whole prompt, and cannot end differently until there are more.
        self._blocked: tuple[Entry, int] | None = None

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._manager.block_size)

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
        # The last token is returned but never attended to, so its K/V needs no place.
        needed = self.blocks_for(total - 1)
        if needed > self._manager.num_blocks:
            raise ValueError(
                f"request {request.request_id!r} can never run: its {prompt_len} prompt tokens and "
                f"up to {max_tokens} generated ones need {needed} blocks of "
                f"{self._manager.block_size} tokens, but the pool has {self._manager.num_blocks}. "
                "Shorten the prompt, lower max_tokens, or raise num_gpu_blocks_override or "
                "kv_cache_memory_bytes"
            )

    def promised_blocks(self, table: SlotTable, order: NDArray[np.int64]) -> int:
        """Blocks that running sequences will still take for tokens they already have.

        Held back from new admissions, which would otherwise push prompts in progress out again.
        """
        size = self._manager.block_size
        known, computed = table.num_tokens[order], table.num_computed[order]
        return int(((known + size - 1) // size - (computed + size - 1) // size).sum())

    def has_room(self, entry: Entry, promised: int) -> bool:
        """Whether the head of the queue may start now. Alone in the pool it always may: it fits, as
        check has shown, and the watermark counts only beside others.
        """
        available = self._manager.num_allocatable_blocks
        if self._blocked is not None:
            blocked, then_available = self._blocked
            if blocked is entry and available <= then_available:
                return False
        # With promises outstanding a cached prefix is not counted on: too careful until those
        # prompts are done, never wrong.
        if promised and self.blocks_for(entry.token_ids.size) + promised > available:
            return False
        if self._can_allocate(entry) == CanAllocate.OK:
            self._blocked = None
            return True
        self._blocked = (entry, available)
        return False

    def _can_allocate(self, entry: Entry) -> CanAllocate:
        return self._manager.can_allocate(entry.token_ids, extra_key=entry.request.extra_key)
