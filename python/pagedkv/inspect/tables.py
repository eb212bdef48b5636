"""What has changed in the block tables between two snapshots, in arrays over all their entries."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedkv._core import Snapshot

Ints = NDArray[Any]


def old_places(old: Snapshot | None, new: Snapshot) -> Ints:
    """Of each sequence of new its index in old, -1 where it was not there: int64 [num_sequences]"""
    if old is None or old.seq_ids.size == 0:
        return np.full(new.seq_ids.size, -1, dtype=np.int64)
    if np.array_equal(old.seq_ids, new.seq_ids):
        return np.arange(new.seq_ids.size)
    order = np.argsort(old.seq_ids)
    at = np.searchsorted(old.seq_ids, new.seq_ids, sorter=order)
    found: Ints = order[np.minimum(at, order.size - 1)]
    return np.where(old.seq_ids[found] == new.seq_ids, found, -1)


def changed_entries(old: Snapshot | None, new: Snapshot, places: Ints) -> tuple[Ints, Ints, Ints]:
    """(sequence, logical index, block id) of every entry that is new or another, in their order.

    Args:
        places: old_places(old, new).

    Entry j of sequence i stands at new.seq_start_loc[i] + j, and stood at
    old.seq_start_loc[places[i]] + j if j was below the length of its table.
    """
    starts = new.seq_start_loc[:-1]
    num_entries = new.block_ids.size
    if old is None or old.block_ids.size == 0:
        at = np.arange(num_entries)
    else:
        lens = np.diff(new.seq_start_loc)
        there = np.maximum(places, 0)
        old_lens = np.where(places < 0, 0, np.diff(old.seq_start_loc)[there])
        shifts = (old.seq_start_loc[there] - starts).astype(np.int32)
        stood = np.repeat(shifts, lens)
        stood += np.arange(num_entries, dtype=np.int32)
        # Beyond the old table is what was appended, which is marked below.
        differs = old.block_ids.take(stood, mode="clip") != new.block_ids
        num_same = np.minimum(lens, old_lens)
        appended = lens - num_same
        offsets = np.cumsum(appended) - appended
        ends = np.repeat(starts + num_same - offsets, appended)
        differs[ends + np.arange(ends.size)] = True
        at = np.flatnonzero(differs)
    sequence = np.searchsorted(new.seq_start_loc, at, side="right") - 1
    return sequence, at - starts[sequence], new.block_ids[at]
