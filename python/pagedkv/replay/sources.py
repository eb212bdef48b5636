"""What a replayed run takes from outside the scheduler: requests, when steps begin and end, and
what the model answers. `AsRecorded` repeats the recording step for step; modelled.py has the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pagedkv.records import Candidates, FinishReason, ScheduledStep
from pagedkv.replay.lines import plain
from pagedkv.replay.recording import Abort, Arrival, Event, Fork, Recording
from pagedkv.replay.work import StepWork
from pagedkv.request import Request
from pagedkv.scheduler import Rates, Scheduler


class DivergedError(RuntimeError):
    """A replayed decision is not the recorded one."""


@dataclass(frozen=True, slots=True, eq=False)
class Answers:
    """Results of a step as Scheduler.update takes them; failure: the step failed, with this
    error.
    """

    token_ids: NDArray[np.int64]
    failed: NDArray[np.bool_]
    candidates: Candidates | None
    failure: str | None = None


class Source(Protocol):
    """Times are seconds of the replayed run; keys those of the recording."""

    events: Sequence[Event]

    def request(self, arrival: Arrival) -> Request: ...

    def aborted_id(self, abort: Abort) -> str: ...

    def begin(self, now_s: float) -> float:
        """When a step begins that could begin at now_s."""

    def wakes(self, event: Event) -> float:
        """From when on a step could begin, if there was nothing to do before this event."""

    def is_due(self, event: Event, begin_s: float) -> bool:
        """Whether an event comes before a step that begins at begin_s."""

    def forks_due(self, key: str) -> list[Fork]:
        """Forks to make of this sequence as it now stands, beside those among events."""

    def rates(self, begin_s: float) -> Rates: ...

    def answers(self, scheduler: Scheduler, step: ScheduledStep, keys: list[str]) -> Answers:
        """keys: of the sequences that step.sample_rows stand for."""

    def cuts(self, keys: list[str]) -> list[tuple[str, FinishReason]]:
        """Sequences, by key, that end now for a reason that the scheduler cannot see."""

    def end(self, begin_s: float, work: StepWork) -> float: ...


class AsRecorded:
    """For the recording's own settings: step k is step k.

    Raises DivergedError at the first step that is not.
    """

    def __init__(self, recording: Recording) -> None:
        self.events: Sequence[Event] = recording.events
        self._steps = recording.steps
        self._k = 0

    def request(self, arrival: Arrival) -> Request:
        return arrival.request

    def aborted_id(self, abort: Abort) -> str:
        return abort.request_id

    def begin(self, now_s: float) -> float:
        return self._steps[self._k].start_s if self._k < len(self._steps) else now_s

    def wakes(self, event: Event) -> float:
        return event.time_s

    def is_due(self, event: Event, begin_s: float) -> bool:
        return event.num_steps <= self._k

    def forks_due(self, key: str) -> list[Fork]:
        return []

    def rates(self, begin_s: float) -> Rates:
        return self._steps[self._k].rates

    def answers(self, scheduler: Scheduler, step: ScheduledStep, keys: list[str]) -> Answers:
        recorded = self._steps[self._k]
        line, expected = plain(step), recorded.line["step"]
        for name in line.keys() | expected.keys():
            if line.get(name) != expected.get(name):
                raise DivergedError(
                    f"step {self._k + 1} differs in {name}: recorded {expected.get(name)!r:.200}, "
                    f"replayed {line.get(name)!r:.200}"
                )
        failed = np.zeros(step.sample_rows.size, dtype=np.bool_)
        failed[recorded.failed] = True
        token_ids = np.array(recorded.token_ids, dtype=np.int64)
        return Answers(token_ids, failed, recorded.candidates, recorded.failure)

    def cuts(self, keys: list[str]) -> list[tuple[str, FinishReason]]:
        return [(name, "stop") for name in self._steps[self._k].stopped]

    def end(self, begin_s: float, work: StepWork) -> float:
        self._k += 1
        return self._steps[self._k - 1].end_s
