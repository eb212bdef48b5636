"""What the page says that it knows, beside what is so."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from pagedkv.block_manager import BlockState, Snapshot
from pagedkv.records import QueueLook


def check_page(state: dict[str, Any], snapshot: Snapshot, queues: QueueLook) -> None:
    """state: of pagedkv.state() in the page. Blocks, ref counts, tables, counters and queues."""
    assert state["states"] == snapshot.states.tolist()
    assert state["refs"] == snapshot.ref_counts.tolist()
    for name, value in state["statistics"].items():
        assert value == getattr(snapshot.statistics, name), name
    tables = sorted(
        (int(snapshot.seq_num_tokens[i]), snapshot.block_ids[begin:end].tolist())
        for i, (begin, end) in enumerate(pairwise(snapshot.seq_start_loc.tolist()))
    )
    assert tables == sorted(
        (one["tokens"], one["table"]) for one in state["requests"] if one["table"]
    )
    for one in state["requests"]:
        if one["table"] and one["table"][-1] >= 0:
            fill = one["tokens"] - (len(one["table"]) - 1) * snapshot.block_size
            assert state["fills"][one["table"][-1]] == fill
    held = np.array(state["states"]) == BlockState.REFERENCED.value
    assert np.array(state["holders"])[held].tolist() == np.array(state["refs"])[held].tolist()
    assert state["queues"] == {
        "running": queues.running.size,
        "waiting": int((~queues.is_swapped).sum()),
        "swapped": int(queues.is_swapped.sum()),
        "pinned": queues.pinned.size,
    }
