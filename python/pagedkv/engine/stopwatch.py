"""Times between points of a step on the device that runs it, without waiting for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

Mark = float | torch.cuda.Event


class Stopwatch:
    """Marks points in the order in which the device reaches them; on a CPU that is now."""

    def __init__(self, device: torch.device, clock: Callable[[], float]) -> None:
        self._on_gpu = device.type == "cuda"
        self._clock = clock

    def mark(self) -> Mark:
        if not self._on_gpu:
            return self._clock()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


class Span(NamedTuple):
    """From one mark to another."""

    begin: Mark
    end: Mark

    def has_ended(self) -> bool:
        """Whether the device has passed the end."""
        return isinstance(self.end, float) or bool(self.end.query())  # type: ignore[no-untyped-call]

    def seconds(self) -> float:
        """REQUIRES has_ended()."""
        if isinstance(self.begin, float) and isinstance(self.end, float):
            return self.end - self.begin
        assert isinstance(self.begin, torch.cuda.Event)
        assert isinstance(self.end, torch.cuda.Event)
        return float(self.begin.elapsed_time(self.end)) / 1e3
