"""What a sliding window saves: a sequence then holds the blocks of its window and of one chunk at
most, however long it gets. Arithmetic on token counts; the manager frees.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pagedkv.block_manager import BlockManager
from pagedkv.scheduler.slots import SlotTable


class Window:
    """A model of which every layer sees the last `size` tokens, itself included; size 0: all of
    them, or some layer does, and then nothing is ever freed.

    max_chunk: tokens of one sequence in one step: not many more than the window, or the chunk would
    need the memory that the window saves. first_chunk: of one that starts, which may have found as
    much in the prefix cache as it can hold.
    """

    def __init__(self, manager: BlockManager, size: int, max_num_batched_tokens: int) -> None:
        self.size = size
        self.max_chunk = self.first_chunk = max_num_batched_tokens
        self._manager = manager
        self._pool_len = manager.num_blocks * manager.block_size
        # Tokens before the next one whose blocks stay: those that it sees, and in any case the last
        # full block, under which the next one is published.
        self._kept = max(size - 1, manager.block_size)
        self._most = manager.num_blocks  # blocks of one sequence at once
        if size == 0:
            return
        self.max_chunk = min(max_num_batched_tokens, self._kept)
        self._most = manager.max_window_blocks(size, self.max_chunk)
        beside = self._pool_len - manager.block_size + 1 - self._kept
        if beside > 0:  # the window fits in the pool, and chunks shrink to fit beside it
            self.first_chunk = min(self.max_chunk, beside)
            self._most = min(self._most, manager.num_blocks)

    def blocks_for(self, num_tokens: int, num_freed_blocks: int = 0) -> int:
        """The most blocks that a sequence holds at once until it has num_tokens, when it has given
        back some already.
        """
        needed = -(-num_tokens // self._manager.block_size) - num_freed_blocks
        return min(needed, self._most) if self.size else needed

    def blocks_for_each(self, table: SlotTable, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """blocks_for the tokens that running sequences have now."""
        size = self._manager.block_size
        needed: NDArray[np.int64] = (table.num_tokens[slots] + size - 1) // size
        if self.size:
            np.minimum(needed - table.num_freed_blocks[slots], self._most, out=needed)
        return needed

    def chunks(
        self, table: SlotTable, slots: NDArray[np.int64], wanted: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """As many of the wanted tokens as running sequences may compute in one step."""
        if self.size == 0:
            return wanted
        freed_len = table.num_freed_blocks[slots] * self._manager.block_size
        room = self._pool_len - (table.num_computed[slots] - freed_len)
        chunks: NDArray[np.int64] = np.minimum(wanted, np.minimum(room, self.max_chunk))
        return chunks

    def longest(self, max_model_len: int) -> int:
        """Tokens that a sequence alone in the pool can have."""
        if self.size and self._manager.max_window_blocks(self.size) <= self._manager.num_blocks:
            return max_model_len
        return self._pool_len

    def free_behind(self, table: SlotTable, slots: NDArray[np.int64]) -> None:
        """Give back what these running sequences need no more.

        REQUIRES that what they have computed is published: what was not then is never found.
        """
        if self.size == 0:
            return
        first_needed = np.maximum(table.num_computed[slots] - self._kept, 0)
        num_freed = first_needed // self._manager.block_size
        is_due = num_freed > table.num_freed_blocks[slots]
        if is_due.any():
            slots = slots[is_due]
            self._manager.free_behind_batch(table.seq_ids[slots], first_needed[is_due])
            table.num_freed_blocks[slots] = num_freed[is_due]
