"""Which cached blocks were given up, when and for whom: the last MAX_EVICTIONS, as arrays, so that
a step which evicts for a thousand rows makes no object for any of them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pagedkv.records import Decision, counted

MAX_EVICTIONS = 8192


class EvictionLog:
    """A ring of rows (step, block_id, seq_id, idle_steps, cpu_block)."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._rows = np.empty((MAX_EVICTIONS, 5), dtype=np.int64)
        self._num_added = 0

    def add(self, step: int, evicted: NDArray[np.int64]) -> None:
        """evicted: int64 [n, 4], the manager's (block_id, seq_id, idle_steps, cpu_block)."""
        evicted = evicted[-MAX_EVICTIONS:]
        places = (self._num_added + np.arange(len(evicted))) % MAX_EVICTIONS
        self._rows[places, 0] = step
        self._rows[places, 1:] = evicted
        self._num_added += len(evicted)

    def decisions(self, seq_id: int) -> list[Decision]:
        """What was evicted for a sequence, for each step one decision about the pool and one about
        the CPU, oldest first.
        """
        size = min(self._num_added, MAX_EVICTIONS)
        oldest_first = (self._num_added - size + np.arange(size)) % MAX_EVICTIONS
        rows = self._rows[oldest_first]
        rows = rows[rows[:, 2] == seq_id]
        decisions = []
        for step in np.unique(rows[:, 0]).tolist():
            of_step = rows[rows[:, 0] == step]
            in_pool = of_step[:, 1] >= 0
            if in_pool.any():
                decisions.append(self._evicted(step, of_step[in_pool]))
            if not in_pool.all():
                decisions.append(self._dropped(step, of_step[~in_pool]))
        return decisions

    def _evicted(self, step: int, rows: NDArray[np.int64]) -> Decision:
        block_ids, num_moved = tuple(rows[:, 1].tolist()), int((rows[:, 4] >= 0).sum())
        num_tokens, idle_steps, idle = self._numbers(rows)
        fates = ("token is given up", "tokens are given up")
        if num_moved:
            fates = ("token moves to the CPU", "tokens move to the CPU")
        fate = counted(num_tokens, *fates)
        if 0 < num_moved < len(rows):
            fate += f" but for {num_tokens - num_moved * self._block_size}"
        text = (
            f"takes {counted(len(rows), 'block')} out of the prefix cache, whose {fate}, idle for "
            f"{idle}: {', '.join(map(str, block_ids))}"
        )
        return Decision(
            "evicted",
            step,
            step,
            {
                "num_tokens": num_tokens,
                "block_ids": block_ids,
                "idle_steps": idle_steps,
                "num_offloaded": num_moved,
            },
            text,
        )

    def _dropped(self, step: int, rows: NDArray[np.int64]) -> Decision:
        num_tokens, idle_steps, idle = self._numbers(rows)
        lost = counted(num_tokens, "cached token on the CPU is", "cached tokens on the CPU are")
        text = f"for it {lost} given up, idle for {idle}"
        return Decision(
            "dropped", step, step, {"num_tokens": num_tokens, "idle_steps": idle_steps}, text
        )

    def _numbers(self, rows: NDArray[np.int64]) -> tuple[int, tuple[int, ...], str]:
        idle_steps = tuple(rows[:, 3].tolist())
        low, high = min(idle_steps), max(idle_steps)
        idle = f"{low} to {high} steps" if low < high else counted(low, "step")
        return len(rows) * self._block_size, idle_steps, idle
