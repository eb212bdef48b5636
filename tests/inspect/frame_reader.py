"""What a client knows of a run by the frames that it got: the page's run.js once more, to test what
is sent without a browser.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pagedkv._core import BlockState, Snapshot
from pagedkv.records import QueueLook

# How the words begin that say why a running request has no row in a step.
WHY_A_STEP_IS_WITHOUT = (
    "waits for a more urgent request's prompt",
    "sits out",
    "has computed what it knows",
)


def unpacked(text: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), dtype="<i4").reshape(-1, 3)


@dataclass
class FrameReader:
    """requests: by lane."""

    num_blocks: int
    requests: dict[int, dict[str, Any]] = field(default_factory=dict)
    statistics: dict[str, float] = field(default_factory=dict)
    queues: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.states = np.zeros(self.num_blocks, dtype=np.int64)
        self.refs = np.zeros(self.num_blocks, dtype=np.int64)

    def apply(self, frame: dict[str, Any]) -> None:
        assert frame["kind"] == "frame"
        if frame.get("full"):
            self.requests = {}
            self.__post_init__()
        for lane in frame.get("gone", []):
            del self.requests[lane]
        for parts in frame.get("requests", []):
            known = self.requests.setdefault(parts["lane"], {"tokens": 0, "table": []})
            assert known.get("id", parts.get("id")) is not None
            known.update(parts)
        if "sequences" in frame:
            for lane, num_tokens, num_blocks in unpacked(frame["sequences"]).tolist():
                known = self.requests[lane]
                known["tokens"] = num_tokens
                del known["table"][num_blocks:]
                known["table"] += [None] * (num_blocks - len(known["table"]))
        if "entries" in frame:
            for lane, logical, block_id in unpacked(frame["entries"]).tolist():
                self.requests[lane]["table"][logical] = block_id
        if "blocks" in frame:
            rows = unpacked(frame["blocks"])
            assert np.unique(rows[:, 0]).size == len(rows)
            self.states[rows[:, 0]], self.refs[rows[:, 0]] = rows[:, 1], rows[:, 2]
        self.statistics = frame.get("statistics", self.statistics)
        self.queues = frame["queues"]

    def check(self, snapshot: Snapshot, queues: QueueLook, names: dict[int, str]) -> None:
        """Everything that the manager and the queues have, and nothing else."""
        assert self.states.tolist() == snapshot.states.tolist()
        assert self.refs.tolist() == snapshot.ref_counts.tolist()
        for name, value in self.statistics.items():
            assert value == getattr(snapshot.statistics, name), name
        holders = np.zeros(self.num_blocks, dtype=np.int64)
        by_seq_id = {one["seq"]: one for one in self.requests.values()}
        bounds = snapshot.seq_start_loc.tolist()
        held = set()
        for i, seq_id in enumerate(snapshot.seq_ids.tolist()):
            one = by_seq_id[seq_id]
            table = snapshot.block_ids[bounds[i] : bounds[i + 1]]
            assert (one["tokens"], one["table"]) == (snapshot.seq_num_tokens[i], table.tolist())
            np.add.at(holders, table[table >= 0], 1)
            held.add(seq_id)
        referenced = self.states == BlockState.REFERENCED.value
        assert holders[referenced].tolist() == self.refs[referenced].tolist()
        for seq_id, one in by_seq_id.items():
            assert seq_id in held or not one["table"]
        states = dict.fromkeys(queues.running.tolist(), "running")
        states |= dict.fromkeys(queues.pinned.tolist(), "pinned")
        for seq_id, is_swapped in zip(
            queues.queued.tolist(), queues.is_swapped.tolist(), strict=True
        ):
            states[seq_id] = "swapped" if is_swapped else "waiting"
        assert {seq_id: one["state"] for seq_id, one in by_seq_id.items()} == states
        assert {one: list(states.values()).count(one) for one in self.queues} == self.queues
        for seq_id, one in by_seq_id.items():
            assert names.get(seq_id, one["id"]) == one["id"]
            if one["state"] == "running":
                assert one["why"] is None or one["why"].startswith(WHY_A_STEP_IS_WITHOUT), one
            else:
                assert (one["why"] is not None) == (one["state"] != "pinned"), one
