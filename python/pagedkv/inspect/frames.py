"""FrameEncoder: looks at a run, one after another, as frames that hold only what has changed.

A frame is a JSON object; docs/inspect.md has its fields. Large parts of it are int32 arrays, row by
row, as base64. Requests are named in these by lanes: small numbers that are used again.
"""

from __future__ import annotations

import base64
import heapq
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedkv import __version__
from pagedkv._core import BlockState, Snapshot, Statistics
from pagedkv.inspect.tables import changed_entries, old_places
from pagedkv.records import Activity, Landed, QueueLook, Seen
from pagedkv.request import Request

VERSION = 1
MAX_STEPS = 512  # in a frame; of each kind of event half as many
MAX_EVENTS = 256
MAX_TEXT_CHARS = 400

_COUNTERS = [name for name in dir(Statistics) if not name.startswith("_")]
_STATES = ("running", "waiting", "swapped", "pinned")

Frame = dict[str, Any]


def start_frame(
    *,
    model: str,
    block_size: int,
    num_blocks: int,
    num_cpu_blocks: int,
    max_num_seqs: int,
    shows_text: bool,
) -> Frame:
    """What stands before all frames."""
    return {
        "kind": "start",
        "version": VERSION,
        "pagedkv": __version__,
        "model": model,
        "block_size": block_size,
        "num_blocks": num_blocks,
        "num_cpu_blocks": num_cpu_blocks,
        "max_num_seqs": max_num_seqs,
        "shows_text": shows_text,
    }


class FrameEncoder:
    """Remembers the last look. text_of: of a prompt, where texts are to be shown."""

    def __init__(self, text_of: Callable[[Request], str] | None = None) -> None:
        self._text_of = text_of
        self._last: Snapshot | None = None
        self._statistics: dict[str, float] = {}
        self._time_s = 0.0
        self._requests: dict[int, Frame] = {}  # by seq_id, as told
        self._states: dict[int, str] = {}  # by seq_id, as told
        self._members: tuple[NDArray[Any], ...] = ()
        self._lanes: dict[int, int] = {}  # by seq_id
        self._free_lanes: list[int] = []  # a heap
        self._lane_seq_ids = self._lane_row = np.empty(0, dtype=np.int64)  # of the last look
        self._counts: Frame = {}

    def next(self, snapshot: Snapshot, queues: QueueLook, activity: Activity) -> Frame | None:
        """What has changed since the last look; None: nothing."""
        frame: Frame = {}
        gone, changed = self._take_queues(queues)
        _put(frame, "gone", gone)
        _put(frame, "requests", changed)
        self._put_memory(frame, self._last, snapshot)
        _put(frame, "steps", [_step_row(one) for one in activity.steps[-MAX_STEPS:]])
        _put_events(frame, activity)
        statistics = {name: getattr(snapshot.statistics, name) for name in _COUNTERS}
        if statistics != self._statistics:
            frame["statistics"] = statistics
        if not frame and self._last is not None:
            return None
        is_first = self._last is None
        self._last, self._statistics = snapshot, statistics
        if activity.steps:
            self._time_s = activity.steps[-1].end_s
        return self._frame(is_first, frame)

    def full(self) -> Frame:
        """The last look as a whole, for somebody who has no frame before. REQUIRES that there was
        one.
        """
        assert self._last is not None, "nothing has been looked at"
        frame: Frame = {}
        _put(frame, "requests", [*self._requests.values()])
        self._put_memory(frame, None, self._last)
        frame["statistics"] = self._statistics
        return self._frame(True, frame)

    def _frame(self, is_full: bool, parts: Frame) -> Frame:
        head: Frame = {"kind": "frame", "time_s": round(self._time_s, 6), "queues": self._counts}
        return {**head, **({"full": True} if is_full else {}), **parts}

    # -- requests ------------------------------------------------------------------------

    def _take_queues(self, queues: QueueLook) -> tuple[list[int], list[Frame]]:
        """(lanes that are free again, what is new about requests)"""
        changed: dict[int, Frame] = {}
        members = (queues.running, queues.queued, queues.is_swapped, queues.pinned)
        gone: list[int] = []
        if not self._members or not all(map(np.array_equal, members, self._members)):
            self._members = members
            seen = {one.seq_id: one for one in queues.first_seen}
            states = _states_of(queues)
            left = self._states.keys() - states.keys()
            gone = sorted(self._lanes.pop(seq_id) for seq_id in left)
            for seq_id in left:
                del self._requests[seq_id]
            for lane in gone:
                heapq.heappush(self._free_lanes, lane)
            for seq_id, state in states.items():
                if seq_id in seen:
                    one = self._new_request(seen[seq_id])
                    self._requests[seq_id] = one
                    changed[seq_id] = {**one, "state": state}
                elif self._states[seq_id] != state:
                    changed[seq_id] = {"lane": self._lanes[seq_id], "state": state}
                    if state == "running":
                        changed[seq_id]["why"] = None
            self._states = states
            counts = [*states.values()]
            self._counts = {name: counts.count(name) for name in _STATES}
        for seq_id, why in queues.reasons:
            changed.setdefault(seq_id, {"lane": self._lanes[seq_id]})["why"] = why or None
        for seq_id, parts in changed.items():
            self._requests[seq_id].update(parts)
        return gone, [*changed.values()]

    def _new_request(self, seen: Seen) -> Frame:
        free = self._free_lanes
        lane = heapq.heappop(free) if free else len(self._lanes)
        self._lanes[seen.seq_id] = lane
        request = seen.request
        parts: Frame = {
            "lane": lane,
            "id": seen.request_id,
            "seq": seen.seq_id,
            "rank": seen.rank,
            "forked_from": seen.forked_from,
            "why": None,
        }
        if request is not None:
            parts |= {
                "prompt_len": request.prompt_len,
                "max_tokens": request.max_tokens,
                "priority": request.priority,
                "user": request.user,
            }
            if self._text_of is not None:
                parts["prompt"] = self._text_of(request)[:MAX_TEXT_CHARS]
        return parts

    # -- memory --------------------------------------------------------------------------

    def _put_memory(self, frame: Frame, old: Snapshot | None, new: Snapshot) -> None:
        """Tables and blocks, beside those of an old look; None: an empty pool."""
        places = old_places(old, new)
        lanes = self._lanes_of(new)
        lens = np.diff(new.seq_start_loc)
        is_changed, vanished = places < 0, []
        if old is not None and old.seq_ids.size:
            there = np.maximum(places, 0)
            is_changed = is_changed | (old.seq_num_tokens[there] != new.seq_num_tokens)
            is_changed |= np.diff(old.seq_start_loc)[there] != lens
            if (places >= 0).sum() < old.seq_ids.size:
                left = set(old.seq_ids.tolist()) - set(new.seq_ids.tolist())
                vanished = [[self._lanes[one], 0, 0] for one in left if one in self._lanes]
        rows = [lanes[is_changed], new.seq_num_tokens[is_changed], lens[is_changed]]
        sequences = np.stack(rows, axis=1)
        if vanished:
            sequences = np.concatenate([sequences, np.array(vanished, dtype=np.int64)])
        _put_packed(frame, "sequences", sequences)
        sequence, logical, block_ids = changed_entries(old, new, places)
        _put_packed(frame, "entries", np.stack([lanes[sequence], logical, block_ids], axis=1))
        if old is None:
            blocks = np.flatnonzero(new.states != BlockState.FREE.value)
        else:
            differs = new.states != old.states
            differs |= new.ref_counts != old.ref_counts
            blocks = np.flatnonzero(differs)
        columns: list[NDArray[Any]] = [blocks, new.states[blocks], new.ref_counts[blocks]]
        _put_packed(frame, "blocks", np.stack(columns, axis=1))

    def _lanes_of(self, new: Snapshot) -> NDArray[Any]:
        """[num_sequences]"""
        if not np.array_equal(self._lane_seq_ids, new.seq_ids):
            lanes = self._lanes
            self._lane_row = np.array([lanes[one] for one in new.seq_ids.tolist()], np.int64)
            self._lane_seq_ids = new.seq_ids
        return self._lane_row


def _states_of(queues: QueueLook) -> dict[int, str]:
    waiting, swapped = queues.queued[~queues.is_swapped], queues.queued[queues.is_swapped]
    groups = (queues.running, waiting, swapped, queues.pinned)
    return {
        seq_id: state
        for state, seq_ids in zip(_STATES, groups, strict=True)
        for seq_id in seq_ids.tolist()
    }


def _step_row(landed: Landed) -> list[float]:
    step = landed.step
    num_decodes = int((step.query_lens == 1).sum())
    return [
        step.step_id,
        round(landed.begin_s, 6),
        round(landed.end_s, 6),
        step.num_tokens - num_decodes,
        num_decodes,
        int(step.slots.size),
        len(step.preempted),
        len(step.copies),
        len(step.swap_out),
        len(step.swap_in),
        len(step.evicted),
    ]


def _put_events(frame: Frame, activity: Activity) -> None:
    steps = [landed.step for landed in activity.steps]
    for name in ("copies", "swap_out", "swap_in"):
        rows = [pair for step in steps for pair in getattr(step, name).tolist()]
        _put(frame, name, rows[-MAX_EVENTS:])
    evicted = [[row[0], row[3]] for step in steps for row in step.evicted.tolist() if row[0] >= 0]
    _put(frame, "evicted", evicted[-MAX_EVENTS:])
    preempted = [
        {"id": one.request_id, "swaps": one.choice.swaps, "why": one.choice.why}
        for step in steps
        for one in step.preempted
    ]
    _put(frame, "preempted", preempted[-MAX_EVENTS:])
    ended = [{"id": one.request.request_id, "reason": one.reason} for one in activity.ended]
    _put(frame, "ended", ended[-MAX_EVENTS:])


def _put(frame: Frame, name: str, rows: list[Any]) -> None:
    if rows:
        frame[name] = rows


def _put_packed(frame: Frame, name: str, rows: NDArray[Any]) -> None:
    if rows.size:
        frame[name] = base64.b64encode(rows.astype("<i4").tobytes()).decode()
