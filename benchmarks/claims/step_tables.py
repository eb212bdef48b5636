"""Step tables of a contiguous cache: the buffers that pagedkv.StepTables fills, from regions
instead of block tables, so that what runs behind them is the same.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from claims.contiguous import ContiguousManager


class ContiguousTables:
    """As pagedkv.StepTables, with the arguments of its write()."""

    def __init__(self, manager: ContiguousManager, max_num_slots: int, max_num_blocks: int) -> None:
        self._manager = manager
        self._max_num_blocks = max_num_blocks
        self._max_num_slots = max_num_slots
        # By buffer, what a slot's row says: whose it is, from which block on, how many.
        self._written: dict[int, NDArray[np.int64]] = {}

    def write(
        self,
        seq_ids: ArrayLike,
        query_lens: ArrayLike,
        slots: ArrayLike,
        *,
        block_tables: Any,
        slot_mapping: Any,
        positions: Any,
        seq_lens: Any,
        query_start_loc: Any,
        only_changed: bool = False,
        first_written: Any = None,
    ) -> int:
        """Returns the number of tokens. only_changed: rows of the table that this buffer holds
        already are not written again. first_written: the entry of each row from which on it was.
        """
        manager, size = self._manager, self._manager.block_size
        ids: list[int] = np.asarray(seq_ids).tolist()
        lens = np.asarray(query_lens, dtype=np.int64)
        places = [manager.place(seq_id) for seq_id in ids]
        first, ends = np.array(places, dtype=np.int64).reshape(-1, 2).T
        num_tokens = int(lens.sum())
        begins = np.cumsum(lens) - lens
        query_start_loc[0] = 0
        query_start_loc[1 : len(ids) + 1] = begins + lens
        seq_lens[: len(ids)] = ends
        within = np.arange(num_tokens) - np.repeat(begins, lens)
        positions[:num_tokens] = np.repeat(ends - lens, lens) + within
        slot_mapping[:num_tokens] = np.repeat(first * size, lens) + positions[:num_tokens]
        num_blocks = -(-ends // size)
        changed = self._write_rows(
            block_tables, np.asarray(slots), ids, first, num_blocks, only_changed
        )
        if first_written is not None:
            first_written[: len(ids)] = num_blocks
            first_written[changed] = 0
        return num_tokens

    def forget(self, block_tables: Any) -> None:
        """This buffer's content is not known any more."""
        self._written.pop(_address(block_tables), None)

    def _write_rows(
        self,
        block_tables: Any,
        slots: NDArray[np.int64],
        ids: list[int],
        first: NDArray[np.int64],
        num_blocks: NDArray[np.int64],
        only_changed: bool,
    ) -> NDArray[np.int64]:
        """Which of them were written."""
        rows = np.stack([np.array(ids, dtype=np.int64), first, num_blocks], axis=1)
        written = self._written.setdefault(
            _address(block_tables), np.full((self._max_num_slots, 3), -1, dtype=np.int64)
        )
        if only_changed:
            changed = np.flatnonzero((written[slots] != rows).any(axis=1))
        else:
            changed = np.arange(len(ids))
        for i in changed.tolist():
            count = int(num_blocks[i])
            block_tables[slots[i], :count] = np.arange(first[i], first[i] + count)
        written[slots] = rows
        return changed


def _address(buffer: Any) -> int:
    address: int = np.asarray(buffer).__array_interface__["data"][0]
    return address
