"""RunState: what is known of a run by the frames of its live view that came so far, as far as a
terminal shows it: no block tables, no pool block by block.
"""

from __future__ import annotations

import base64
import struct
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

WINDOW_S = 10.0  # that rates are means over
_NUM_STEPS = 4096  # remembered
_STATES = ("running", "waiting", "swapped", "pinned")


class Step(NamedTuple):
    """A row of a frame's steps: tokens, rows, sequences preempted and blocks moved, of one step."""

    step_id: int
    begin_s: float
    end_s: float
    prefill_tokens: int
    decode_tokens: int
    num_rows: int
    num_preempted: int
    num_copies: int
    num_swapped_out: int
    num_swapped_in: int
    num_evicted: int


class _Looked(NamedTuple):
    """The prefix cache's counters at a time."""

    time_s: float
    queries: int
    hits: int


@dataclass(slots=True)
class RunState:
    """start: the stream's first line. requests: lane -> its fields, num_tokens and num_blocks among
    them. num_preempted: since the first frame.
    """

    start: Mapping[str, Any]
    requests: dict[int, dict[str, Any]] = field(default_factory=dict)
    statistics: dict[str, float] = field(default_factory=dict)
    queues: dict[str, int] = field(default_factory=dict)
    steps: deque[Step] = field(default_factory=lambda: deque(maxlen=_NUM_STEPS))
    num_preempted: int = 0
    time_s: float | None = None
    _looked: deque[_Looked] = field(default_factory=deque)

    def apply(self, frame: Mapping[str, Any]) -> None:
        """Raises ValueError: it is not a frame, or not one of this version."""
        try:
            self._apply(frame)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"a frame that cannot be read: {error!r:.200}") from error

    def _apply(self, frame: Mapping[str, Any]) -> None:
        if frame["kind"] != "frame":
            raise ValueError(f"a line of kind {frame['kind']!r:.99}, not a frame")
        self.time_s = float(frame["time_s"])
        if frame.get("full"):
            self.requests.clear()
        for lane in frame.get("gone", ()):
            self.requests.pop(lane, None)
        for one in frame.get("requests", ()):
            known = self.requests.setdefault(one["lane"], {"num_tokens": 0, "num_blocks": 0})
            known.update(one)
        for lane, num_tokens, num_blocks in _rows(frame.get("sequences", "")):
            self.requests[lane].update(num_tokens=num_tokens, num_blocks=num_blocks)
        new = [Step(*row) for row in frame.get("steps", ())]
        self.steps.extend(new)
        self.num_preempted += sum(one.num_preempted for one in new)
        self.statistics.update(frame.get("statistics", {}))
        self.queues.update(frame.get("queues", {}))
        self._note_hits()

    def _note_hits(self) -> None:
        assert self.time_s is not None
        queries, hits = (
            int(self.statistics.get(f"prefix_cache_{name}", 0)) for name in ("queries", "hits")
        )
        self._looked.append(_Looked(self.time_s, queries, hits))
        # The last one before the window stays: what happened in it counts from there.
        while len(self._looked) > 1 and self._looked[1].time_s <= self.time_s - WINDOW_S:
            self._looked.popleft()

    @property
    def hit_rate(self) -> float | None:
        """Part of the tokens looked up in the prefix cache that were found, since the start."""
        last = self._looked[-1] if self._looked else None
        return last.hits / last.queries if last and last.queries else None

    @property
    def recent_hit_rate(self) -> float | None:
        """The same of the last WINDOW_S seconds; None where nothing was looked up."""
        if not self._looked:
            return None
        first, last = self._looked[0], self._looked[-1]
        queries = last.queries - first.queries
        return (last.hits - first.hits) / queries if queries > 0 else None

    def rates(self, watched_s: float, quiet_s: float = 0.0) -> dict[str, float]:
        """Means over the last WINDOW_S seconds, or as long as there were frames. quiet_s: how long
        ago the last one came, since none comes while nothing happens.
        """
        seconds = max(min(WINDOW_S, watched_s), 1e-3)
        recent = list(self.steps)
        if watched_s > WINDOW_S:
            begin_s = (self.time_s or 0.0) + quiet_s - WINDOW_S
            recent = [one for one in recent if one.end_s > begin_s]
        took_s = sum(one.end_s - one.begin_s for one in recent)
        return {
            "prefill_tokens_per_s": sum(one.prefill_tokens for one in recent) / seconds,
            "decode_tokens_per_s": sum(one.decode_tokens for one in recent) / seconds,
            "steps_per_s": len(recent) / seconds,
            "step_s": took_s / len(recent) if recent else 0.0,
        }

    def in_order(self) -> list[dict[str, Any]]:
        """The requests: those that run, wait, are swapped out, are kept; each in order of turn."""
        return sorted(
            self.requests.values(),
            key=lambda one: (
                _STATES.index(one["state"]) if one.get("state") in _STATES else len(_STATES),
                one.get("rank", 0),
                one.get("seq", 0),
            ),
        )


def _rows(text: str) -> list[tuple[int, int, int]]:
    """Base64 of int32 [n, 3], little-endian."""
    return list(struct.iter_unpack("<3i", base64.b64decode(text)))
