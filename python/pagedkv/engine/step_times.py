"""Where the time of steps goes, as the processor sees it: always counted, at four looks at a clock
a step. What a GPU does meanwhile is seen by benchmarking.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepSplit:
    """Seconds of num_steps steps together. schedule_s: choosing rows and blocks. launch_s: inputs
    and the model, on a CPU all it computes, on a GPU only the launching. wait_s: for the tokens of
    a GPU. update_s: books and text.
    """

    num_steps: int = 0
    schedule_s: float = 0.0
    launch_s: float = 0.0
    wait_s: float = 0.0
    update_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.schedule_s + self.launch_s + self.wait_s + self.update_s

    def since(self, before: StepSplit) -> StepSplit:
        """What has come since then."""
        return StepSplit(
            self.num_steps - before.num_steps,
            self.schedule_s - before.schedule_s,
            self.launch_s - before.launch_s,
            self.wait_s - before.wait_s,
            self.update_s - before.update_s,
        )


class StepTimes:
    """Adds up the parts of steps: lap(part) ends a part that began at the last lap or start()."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds = {"schedule": 0.0, "launch": 0.0, "wait": 0.0, "update": 0.0}
        self._num_steps = 0
        self._last_s = 0.0

    def start(self) -> None:
        self._last_s = self._clock()

    def lap(self, part: str) -> None:
        """part: schedule, launch, wait or update, which is a step's last."""
        now_s = self._clock()
        self._seconds[part] += now_s - self._last_s
        self._last_s = now_s
        self._num_steps += part == "update"

    @property
    def split(self) -> StepSplit:
        parts = self._seconds
        return StepSplit(
            self._num_steps, parts["schedule"], parts["launch"], parts["wait"], parts["update"]
        )
