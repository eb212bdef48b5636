"""Prefixes that the step being built computes but cannot offer yet: a request that would compute
most of them again waits for the next step, which is planned when this one is on its way, and then
finds them in the prefix cache.

Lives for one schedule(). Decides nothing about blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pagedkv.block_manager import BlockManager
from pagedkv.scheduler.entry import Entry
from pagedkv.scheduler.slots import SlotTable

Key = tuple[bytes, bytes]


class PendingPrefixes:
    """The first block that each prefill row of this step will publish, by its whole prefix.

    Two requests that share more than the cache holds now miss it at the same block, so one lookup
    finds the twin; the length of what they share is then compared token by token.
    """

    def __init__(self, manager: BlockManager, *, enabled: bool) -> None:
        self._manager = manager
        self.enabled = enabled
        self._rows: dict[Key, NDArray[np.int32]] = {}
        # Asking the cache costs a hash of the prompt; most prompts are told apart without asking.
        self._first_blocks: set[Key] = set()

    def add(self, token_ids: NDArray[np.int32], begin: int, end: int, extra_key: bytes) -> None:
        """A row computes tokens [begin, end) of token_ids in this step."""
        size = self._manager.block_size
        first = begin // size
        if not self.enabled or end // size == first:
            return
        key = (extra_key, token_ids[: (first + 1) * size].tobytes())
        self._rows.setdefault(key, token_ids)
        self._first_blocks.add((extra_key, token_ids[:size].tobytes()))

    def add_chunks(
        self,
        table: SlotTable,
        by_slot: Sequence[Entry | None],
        rows: NDArray[np.int64],
        query_lens: NDArray[np.int64],
        ends: NDArray[np.int64],
    ) -> None:
        """The chunks of prompts among the rows of running sequences: query_lens tokens each, up to
        ends.
        """
        for i in np.flatnonzero(query_lens > 1).tolist():
            slot = int(rows[i])
            entry = by_slot[slot]
            assert entry is not None
            end = int(ends[i])
            token_ids = table.token_ids[slot, : table.num_tokens[slot]]
            self.add(token_ids, end - int(query_lens[i]), end, entry.request.extra_key)

    def is_worth_waiting(self, token_ids: NDArray[np.int32], extra_key: bytes) -> bool:
        """Whether a row of this step computes at least half of what this prompt lacks."""
        size = self._manager.block_size
        if (extra_key, token_ids[:size].tobytes()) not in self._first_blocks:
            return False
        cached = self._manager.match(token_ids, extra_key=extra_key)
        other = self._rows.get((extra_key, token_ids[: cached + size].tobytes()))
        if other is None:
            return False
        length = min(token_ids.size, other.size)
        differs = token_ids[cached:length] != other[cached:length]
        shared = int(differs.argmax()) if differs.any() else length - cached
        shared -= shared % size
        return 2 * shared >= token_ids.size - cached
