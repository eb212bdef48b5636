"""RunMetrics: what an engine has done and how long its requests waited, counted as steps land; and
its immutable snapshot, which any thread may read.

By request nothing happens in a step but where one is added, starts, gets its first token or ends;
the rest is arithmetic on arrays over slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pagedkv.block_manager import Statistics
from pagedkv.engine.engine import Engine
from pagedkv.engine.histogram import Histogram, HistogramCounts
from pagedkv.records import FinishedRequest, FinishReason, ScheduledStep
from pagedkv.request import Request

_SHORT_S = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3,
    0.5, 0.75, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
_LONG_S = (
    0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 5.0,
    7.5, 10.0, 15.0, 20.0, 30.0, 40.0, 60.0, 120.0, 240.0, 480.0, 960.0,
)  # fmt: skip
_TOKENS = tuple(float(2**k) for k in range(18))

# Name -> bounds.
HISTOGRAMS: dict[str, tuple[float, ...]] = {
    "time_to_first_token_seconds": _LONG_S,
    "inter_token_latency_seconds": _SHORT_S,
    "e2e_request_latency_seconds": _LONG_S,
    "request_queue_time_seconds": _LONG_S,
    "request_prompt_tokens": _TOKENS,
    "request_generation_tokens": _TOKENS,
    "iteration_tokens_total": _TOKENS,
}
FINISH_REASONS: tuple[FinishReason, ...] = ("stop", "length", "abort", "error")


@dataclass(frozen=True, slots=True, eq=False)
class MetricsSnapshot:
    """An engine's numbers behind a step. num_finished by reason, histograms by name."""

    num_running: int
    num_waiting: int
    num_swapped: int
    statistics: Statistics
    num_preemptions: int
    num_prompt_tokens: int
    num_generation_tokens: int
    num_finished: dict[FinishReason, int]
    histograms: dict[str, HistogramCounts]


class _Timing:
    """Of a request, its answers together."""

    __slots__ = ("added_s", "has_started", "num_left", "prompt_len")

    def __init__(self, request: Request, added_s: float) -> None:
        self.added_s = added_s
        self.prompt_len = request.prompt_len
        self.num_left = request.num_answers if request.is_group else 1
        self.has_started = False


class RunMetrics:
    """A StepWatcher. Of a request with several answers, the first token and the time in the queue
    count once, the end of each answer by itself. A fork counts as a request without a first token.
    """

    def __init__(self, engine: Engine) -> None:
        """Watch an engine, from before its first request."""
        self._engine = engine
        self._timings: dict[str, _Timing] = {}  # by the id that was asked for
        self._at: list[Request | None] = [None] * engine.max_num_seqs  # slot -> its last owner
        self._last_s = np.full(engine.max_num_seqs, np.nan)  # slot -> its last token; nan: none yet
        self._kept_s: dict[str, float] = {}  # the same, of preempted requests, by their own id
        self._histograms = {name: Histogram(bounds) for name, bounds in HISTOGRAMS.items()}
        self._num_finished = dict.fromkeys(FINISH_REASONS, 0)
        self._num_preemptions = self._num_prompt_tokens = self._num_generation_tokens = 0
        engine.watch(self)

    def snapshot(self) -> MetricsSnapshot:
        """On the engine's thread; what it returns never changes."""
        engine = self._engine
        return MetricsSnapshot(
            num_running=engine.num_running,
            num_waiting=engine.num_waiting,
            num_swapped=engine.num_swapped,
            statistics=engine.statistics(),
            num_preemptions=self._num_preemptions,
            num_prompt_tokens=self._num_prompt_tokens,
            num_generation_tokens=self._num_generation_tokens,
            num_finished=dict(self._num_finished),
            histograms={name: one.counts() for name, one in self._histograms.items()},
        )

    # -- what the engine tells -------------------------------------------------------------

    def added(self, request: Request, time_s: float) -> None:
        self._timings[request.request_id] = _Timing(request, time_s)

    def landed(
        self, step: ScheduledStep, ended: list[FinishedRequest], begin_s: float, end_s: float
    ) -> None:
        for one in step.preempted:
            self._num_preemptions += 1
            self._kept_s[one.request_id] = float(self._last_s[one.slot])
        for entered in step.admitted:
            self._at[entered.slot] = entered.request
            kept = self._kept_s.pop(entered.request.request_id, np.nan)
            self._last_s[entered.slot] = kept
            self._start(entered.request, begin_s)
        for entered in step.forked:  # its first token came with its parent's
            self._at[entered.slot] = entered.request
            self._last_s[entered.slot] = begin_s
        slots = step.slots[step.sample_rows]
        before_s = self._last_s[slots]
        is_first = np.isnan(before_s)
        self._histograms["inter_token_latency_seconds"].observe(end_s - before_s[~is_first])
        for slot in np.unique(slots[is_first]).tolist():
            self._first_token(self._at[slot], end_s)
        self._last_s[slots] = end_s
        self._num_generation_tokens += slots.size
        self._histograms["iteration_tokens_total"].observe(step.num_tokens)
        self._end(ended, end_s)

    def aborted(self, ended: list[FinishedRequest], time_s: float) -> None:
        self._end(ended, time_s)

    # -- of one request --------------------------------------------------------------------

    def _timing(self, request: Request) -> _Timing | None:
        return self._timings.get(request.parent_id or request.request_id)

    def _start(self, request: Request, time_s: float) -> None:
        timing = self._timing(request)
        if timing is not None and not timing.has_started:
            timing.has_started = True
            self._histograms["request_queue_time_seconds"].observe(time_s - timing.added_s)

    def _first_token(self, request: Request | None, time_s: float) -> None:
        timing = None if request is None else self._timing(request)
        if timing is None or request is None or (request.draw and request.parent_id):
            return  # an answer beside the first one, whose prompt was computed before
        self._histograms["time_to_first_token_seconds"].observe(time_s - timing.added_s)
        self._histograms["request_prompt_tokens"].observe(timing.prompt_len)
        self._num_prompt_tokens += timing.prompt_len

    def _end(self, ended: list[FinishedRequest], time_s: float) -> None:
        for finished in ended:
            self._num_finished[finished.reason] += 1
            self._kept_s.pop(finished.request.request_id, None)
            self._histograms["request_generation_tokens"].observe(finished.token_ids.size)
            timing = self._timing(finished.request)
            if timing is None:
                continue
            self._histograms["e2e_request_latency_seconds"].observe(time_s - timing.added_s)
            timing.num_left -= 1
            if timing.num_left == 0:
                del self._timings[finished.request.parent_id or finished.request.request_id]
