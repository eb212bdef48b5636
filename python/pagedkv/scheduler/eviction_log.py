"""Which cached blocks were given up, when and for whom: the last MAX_EVICTIONS, as arrays, so that
a step which evicts for a thousand rows makes no object for any of them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pagedkv.records import Decision

MAX_EVICTIONS = 8192


class EvictionLog:
    """A ring of rows (step, block_id, seq_id, idle_steps)."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._rows = np.empty((MAX_EVICTIONS, 4), dtype=np.int64)
        self._num_added = 0

    def add(self, step: int, evicted: NDArray[np.int64]) -> None:
        """evicted: int64 [n, 3], the manager's (block_id, seq_id, idle_steps)."""
        evicted = evicted[-MAX_EVICTIONS:]
        places = (self._num_added + np.arange(len(evicted))) % MAX_EVICTIONS
        self._rows[places, 0] = step
        self._rows[places, 1:] = evicted
        self._num_added += len(evicted)

    def decisions(self, seq_id: int) -> list[Decision]:
        """What was evicted for a sequence, a decision for each step, oldest first."""
        size = min(self._num_added, MAX_EVICTIONS)
        oldest_first = (self._num_added - size + np.arange(size)) % MAX_EVICTIONS
        rows = self._rows[oldest_first]
        rows = rows[rows[:, 2] == seq_id]
        return [
            self._decision(int(step), rows[rows[:, 0] == step]) for step in np.unique(rows[:, 0])
        ]

    def _decision(self, step: int, rows: NDArray[np.int64]) -> Decision:
        block_ids, idle_steps = tuple(rows[:, 1].tolist()), tuple(rows[:, 3].tolist())
        num_tokens = len(rows) * self._block_size
        low, high = min(idle_steps), max(idle_steps)
        idle = f"{low} to {high} steps" if low < high else f"{low} steps"
        text = (
            f"takes blocks out of the prefix cache, which gives up their {num_tokens} tokens, idle "
            f"for {idle}: {', '.join(map(str, block_ids))}"
        )
        return Decision(
            "evicted",
            step,
            step,
            {"num_tokens": num_tokens, "block_ids": block_ids, "idle_steps": idle_steps},
            text,
        )
