"""What a run was like, in numbers: of a recorded one and of a replayed one alike."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from pagedkv.replay.recording import Arrival, Event, Step


@dataclass(frozen=True, slots=True)
class Spread:
    """Percentiles in seconds; num: of how many. All 0 of none."""

    p50: float
    p90: float
    p99: float
    num: int


@dataclass(frozen=True, slots=True)
class Metrics:
    """One run.

    num_generated: tokens; of a beam search those of its answers. duration_s: from the first arrival
    to the end of the last step. ttft: from a request's arrival to the step that gave its first
    token; itl: between two tokens of one sequence; e2e: from arrival to the end of its last answer,
    requests that were cut short or failed left out. hit_rate: share of the tokens looked up in the
    prefix cache. waste: share of token slots in blocks that sequences hold, but no token fills, its
    mean over time; occupancy: share of blocks that are held. peak_blocks: most held after a step.
    """

    num_steps: int
    num_requests: int
    num_generated: int
    duration_s: float
    busy_s: float
    ttft: Spread
    itl: Spread
    e2e: Spread
    num_swapped_out: int
    num_recomputed: int
    num_displaced: int
    hit_rate: float
    num_evictions: int
    num_copies: int
    waste: float
    occupancy: float
    peak_blocks: int

    @property
    def tokens_per_s(self) -> float:
        return self.num_generated / self.duration_s if self.duration_s > 0 else 0.0


def measure(events: Sequence[Event], steps: Iterable[Step], block_size: int) -> Metrics:
    """events: of the recording; block_size: of the run that steps are of."""
    measuring = _Measuring(events, block_size)
    for step in steps:
        measuring.take(step)
    return measuring.result()


class _Measuring:
    def __init__(self, events: Sequence[Event], block_size: int) -> None:
        self._block_size = block_size
        self._arrived: dict[str, float] = {}
        self._request_of: dict[str, str] = {}  # key of an answer -> of its request
        self._beams: set[str] = set()
        self._num_left: dict[str, int] = {}  # answers to come, by request
        for event in events:
            if isinstance(event, Arrival):
                request = event.request
                self._arrived[event.key] = event.time_s
                self._num_left[event.key] = request.num_answers
                for k in range(request.num_forks if request.is_group else 0):
                    self._request_of[f"{event.key}-{k}"] = event.key
                    if request.num_candidates:
                        self._beams.add(f"{event.key}-{k}")
        self._ttft: dict[str, float] = {}
        self._e2e: list[float] = []
        self._gaps: list[float] = []
        self._last_token: dict[str, float] = {}
        self._is_cut: set[str] = set()
        self._counts: dict[str, int] = defaultdict(int)
        self._num_steps = self._num_generated = self._peak = 0
        self._busy = self._end = self._waste = self._occupancy = 0.0
        self._statistics: dict[str, int | float] = {}

    def take(self, step: Step) -> None:
        self._num_steps += 1
        self._busy += step.seconds
        self._end = step.end_s
        failed = set(step.failed)
        for i in range(len(step.token_ids)):
            if i not in failed:
                self._take_token(step.samples[i], step.end_s)
        for key, reason, num_generated in step.ends:
            if key in self._beams:
                self._num_generated += num_generated
            self._take_end(self._request_of.get(key, key), reason, step.end_s)
        for preempted in step.line["step"]["preempted"]:
            way = "swapped" if preempted["choice"]["swaps"] else "recomputed"
            self._counts[way] += 1
            self._counts["displaced"] += preempted["displaced_by"] is not None
        self._take_pool(step)

    def _take_token(self, key: str, time_s: float) -> None:
        request = self._request_of.get(key, key)
        if request in self._arrived:
            self._ttft.setdefault(request, time_s - self._arrived[request])
        if key in self._beams:
            return
        self._num_generated += 1
        if key in self._last_token:
            self._gaps.append(time_s - self._last_token[key])
        self._last_token[key] = time_s

    def _take_end(self, request: str, reason: str, time_s: float) -> None:
        if request not in self._arrived:  # a fork
            return
        if reason not in ("stop", "length"):
            self._is_cut.add(request)
        self._num_left[request] -= 1
        if self._num_left[request] == 0 and request not in self._is_cut:
            self._e2e.append(time_s - self._arrived[request])

    def _take_pool(self, step: Step) -> None:
        now = step.statistics
        held = now["num_referenced"]
        self._statistics = now
        self._peak = max(self._peak, held)
        self._occupancy += step.seconds * held / now["num_blocks"]
        if held:
            unused = 1 - now["num_tokens"] / (held * self._block_size)
            self._waste += step.seconds * unused

    def result(self) -> Metrics:
        now, busy = defaultdict(int, self._statistics), self._busy or 1.0
        queries = now["prefix_cache_queries"]
        return Metrics(
            num_steps=self._num_steps,
            num_requests=len(self._arrived),
            num_generated=self._num_generated,
            duration_s=max(0.0, self._end - min(self._arrived.values(), default=0.0)),
            busy_s=self._busy,
            ttft=_spread(list(self._ttft.values())),
            itl=_spread(self._gaps),
            e2e=_spread(self._e2e),
            num_swapped_out=self._counts["swapped"],
            num_recomputed=self._counts["recomputed"],
            num_displaced=self._counts["displaced"],
            hit_rate=now["prefix_cache_hits"] / queries if queries else 0.0,
            num_evictions=int(now["num_evictions"]),
            num_copies=int(now["num_copies"]),
            waste=self._waste / busy,
            occupancy=self._occupancy / busy,
            peak_blocks=self._peak,
        )


def _spread(seconds: list[float]) -> Spread:
    if not seconds:
        return Spread(0.0, 0.0, 0.0, 0)
    p50, p90, p99 = np.percentile(seconds, [50, 90, 99]).tolist()
    return Spread(p50, p90, p99, len(seconds))
