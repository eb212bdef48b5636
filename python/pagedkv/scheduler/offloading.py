"""The CPU pool as the second level of the prefix cache: when a block is worth bringing back, and
what a step moves. Which blocks these are is the manager's business.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pagedkv.block_manager import BlockManager
from pagedkv.scheduler.cost_model import Rates, swap_in_cost

Pairs = NDArray[np.int64]


class Offloading:
    """Does nothing where the manager was made without enable_kv_offloading."""

    def __init__(self, manager: BlockManager, bytes_per_block: int) -> None:
        self._manager = manager
        self._bytes_per_block = bytes_per_block
        self.is_enabled = manager.has_offloading
        self.weigh(Rates())

    def weigh(self, rates: Rates) -> None:
        """Blocks move from now on as these rates say is cheaper."""
        if self.is_enabled:
            self._manager.swap_in_cost = swap_in_cost(
                rates, bytes_per_block=self._bytes_per_block, block_size=self._manager.block_size
            )

    def join(self, swap_out: Pairs, swap_in: Pairs) -> tuple[Pairs, Pairs]:
        """A step's pairs of swapped requests, and those of the prefix cache since the last step."""
        if not self.is_enabled:
            return swap_out, swap_in
        moved_out, moved_in = self._manager.take_moves()
        return np.concatenate([swap_out, moved_out]), np.concatenate([swap_in, moved_in])

    @property
    def num_cpu_hits(self) -> int:
        """Tokens that have come back so far."""
        return self._manager.statistics().prefix_cache_cpu_hits if self.is_enabled else 0
