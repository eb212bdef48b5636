"""A recorded run's requests under other settings and a clock of its own."""

from __future__ import annotations

import bisect
import dataclasses
from collections import defaultdict, deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pagedkv.records import Candidates, FinishReason, ScheduledStep
from pagedkv.replay.recording import Abort, Arrival, Event, Fork, Recording
from pagedkv.replay.scripts import Scripts
from pagedkv.replay.sources import Answers
from pagedkv.replay.step_times import StepTimes
from pagedkv.replay.token_names import mark_of
from pagedkv.replay.work import StepWork
from pagedkv.request import Request
from pagedkv.scheduler import Rates, Scheduler

_TICK_S = 1e-6  # recorded times are rounded


class AsModelled:
    """For any settings. Arrivals, aborts and resets happen at their recorded times; a fork happens
    when its parent has as many tokens as it had; an aborted sequence ends at the latest when it has
    all the tokens that were recorded of it. Priorities count only under "priority". The rates that
    swapping is weighed by are those that had been measured by that time.
    """

    def __init__(self, recording: Recording, times: StepTimes, *, has_priorities: bool) -> None:
        self.events: Sequence[Event] = [
            event for event in recording.events if not isinstance(event, Fork)
        ]
        self._scripts = Scripts(recording)
        self._is_plain = recording.is_plain
        self._times = times
        self._has_priorities = has_priorities
        self._counts: dict[str, int] = defaultdict(int)  # tokens generated, by key
        self._forks: dict[str, deque[Fork]] = defaultdict(deque)  # to come, by parent's key
        for event in recording.events:
            if isinstance(event, Fork):
                self._forks[event.key].append(event)
        self._starts = [step.start_s for step in recording.steps]
        self._rates = [step.rates for step in recording.steps] or [Rates()]

    def request(self, arrival: Arrival) -> Request:
        priority = arrival.request.priority if self._has_priorities else 0
        return dataclasses.replace(arrival.request, request_id=arrival.key, priority=priority)

    def aborted_id(self, abort: Abort) -> str:
        return abort.key

    def begin(self, now_s: float) -> float:
        return now_s + self._times.gap_s

    def wakes(self, event: Event) -> float:
        """Not before the caller went on from it, who may have had more to add first."""
        if event.num_steps >= len(self._starts):
            return event.time_s
        return max(event.time_s, self._starts[event.num_steps] - self._times.gap_s)

    def is_due(self, event: Event, begin_s: float) -> bool:
        return event.time_s <= begin_s + _TICK_S

    def forks_due(self, key: str) -> list[Fork]:
        due: list[Fork] = []
        waiting = self._forks.get(key)
        while waiting and self._counts[key] >= waiting[0].num_generated:
            due.append(waiting.popleft())
            for one in due[-1].fork_keys:
                self._counts[one] = self._counts[key]
        return due

    def rates(self, begin_s: float) -> Rates:
        return self._rates[max(0, bisect.bisect_right(self._starts, begin_s) - 1)]

    def answers(self, scheduler: Scheduler, step: ScheduledStep, keys: list[str]) -> Answers:
        table, slots = scheduler.slots, step.slots[step.sample_rows]
        failed = np.zeros(slots.size, dtype=np.bool_)
        token_ids = np.zeros(slots.size, dtype=np.int64)
        beams: list[int] = []
        found: list[tuple[NDArray[np.int64], NDArray[np.float64]]] = []
        for i, (slot, key) in enumerate(zip(slots.tolist(), keys, strict=True)):
            if not table.is_beam[slot]:
                token_ids[i] = self._scripts.token(key, self._counts[key])
                self._counts[key] += 1
                continue
            request = scheduler.request_at(slot)
            assert request is not None
            assert request.parent_id is not None
            known = table.token_ids[slot, : table.num_tokens[slot]]
            pair = self._scripts.beam(request.parent_id, mark_of(known, is_plain=self._is_plain))
            if pair is None:  # the recorded search was cut short before this
                failed[i] = True
            else:
                beams.append(i)
                found.append(pair)
        return Answers(token_ids, failed, _candidates(beams, found))

    def cuts(self, keys: list[str]) -> list[tuple[str, FinishReason]]:
        cut: list[tuple[str, FinishReason]] = []
        for key in keys:
            script = self._scripts.of(key)
            if script.cut is not None and 0 < self._counts[key] >= len(script.token_ids):
                cut.append((key, script.cut))
        return cut

    def end(self, begin_s: float, work: StepWork) -> float:
        return begin_s + self._times.seconds(work)


def _candidates(
    samples: list[int], found: list[tuple[NDArray[np.int64], NDArray[np.float64]]]
) -> Candidates | None:
    """Rows of different widths padded with what no search goes on with."""
    if not samples:
        return None
    width = max(ids.size for ids, _ in found)
    token_ids = np.zeros((len(found), width), dtype=np.int64)
    logprobs = np.full((len(found), width), -np.inf)
    for row, (ids, values) in enumerate(found):
        token_ids[row, : ids.size] = ids
        logprobs[row, : values.size] = values
    return Candidates(np.array(samples, dtype=np.int64), token_ids, logprobs)
