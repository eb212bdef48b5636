"""What a GPU does over some time, as CUPTI sees it through torch's profiler: when it is busy, with
which kernels, and how much of the time of swaps lies beside kernels. For measurements only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

Interval = tuple[float, float]


class Activity(NamedTuple):
    """A kernel or a copy on a stream; times in microseconds."""

    name: str
    stream: int
    begin_us: float
    end_us: float

    @property
    def interval(self) -> Interval:
        return self.begin_us, self.end_us

    @property
    def is_kernel(self) -> bool:
        return not self.name.startswith(("Memcpy", "Memset"))

    @property
    def way(self) -> str | None:
        """Of a copy between the GPU and the CPU: out or in; None: of anything else."""
        ways = {"Memcpy DtoH": "out", "Memcpy HtoD": "in"}
        return ways.get(self.name[: len("Memcpy DtoH")])


@dataclass(frozen=True, slots=True)
class SwapSplit:
    """Seconds that copies between GPU and CPU took on streams where no kernel runs; each way counts
    the time in which at least one copy runs. beside_s: part of it in which a kernel runs too.
    """

    way: str  # out, in
    num_copies: int
    busy_s: float
    beside_s: float


@dataclass(frozen=True, slots=True)
class GpuSplit:
    """Seconds of num_steps steps together. busy_s: some kernel or copy runs; gap_s: none does.
    kernels: (name, seconds, number of calls), the longest first. swaps: those ways that had any.
    """

    num_steps: int
    busy_s: float
    gap_s: float
    kernels: tuple[tuple[str, float, int], ...]
    swaps: tuple[SwapSplit, ...] = ()


def record(run: Callable[[], object]) -> list[Activity]:
    """All that GPUs do while run() runs, and what it has launched ends. Looking costs some time."""
    kinds = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds, acc_events=True) as watched:
        run()
        torch.cuda.synchronize()
    return [
        Activity(event.name, event.device_resource_id, event.time_range.start, event.time_range.end)
        for event in watched.events() or ()
        if event.device_type.name == "CUDA"
    ]


def split_of(activities: Sequence[Activity], num_steps: int) -> GpuSplit:
    busy_us, gap_us = busy_and_gaps([one.interval for one in activities])
    by_name = dict[str, list[float]]()
    for one in activities:
        by_name.setdefault(one.name, []).append(one.end_us - one.begin_us)
    kernels = sorted(
        ((name, sum(times) / 1e6, len(times)) for name, times in by_name.items()),
        key=lambda one: -one[1],
    )
    return GpuSplit(num_steps, busy_us / 1e6, gap_us / 1e6, tuple(kernels), _swaps(activities))


def _swaps(activities: Sequence[Activity]) -> tuple[SwapSplit, ...]:
    kernels = merged(one.interval for one in activities if one.is_kernel)
    computing = {one.stream for one in activities if one.is_kernel}
    found = []
    for way in ("out", "in"):
        copies = [
            one.interval for one in activities if one.way == way and one.stream not in computing
        ]
        if copies:
            times = merged(copies)
            busy_us = sum(end - begin for begin, end in times)
            beside_us = common_us(times, kernels)
            found.append(SwapSplit(way, len(copies), busy_us / 1e6, beside_us / 1e6))
    return tuple(found)


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The times in which at least one of the intervals lasts, in order, none touching another.

    Example: merged([(1, 3), (5, 6), (0, 2)]) -> [(0, 3), (5, 6)]
    """
    made: list[Interval] = []
    for begin, end in sorted(intervals):
        if made and begin <= made[-1][1]:
            made[-1] = made[-1][0], max(made[-1][1], end)
        else:
            made.append((begin, end))
    return made


def common_us(one: Sequence[Interval], other: Sequence[Interval]) -> float:
    """How long both last. REQUIRES both merged().

    Example: common_us([(0, 3), (5, 9)], [(2, 6)]) -> 2
    """
    total, i, j = 0.0, 0, 0
    while i < len(one) and j < len(other):
        total += max(0.0, min(one[i][1], other[j][1]) - max(one[i][0], other[j][0]))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return total


def busy_and_gaps(intervals: Sequence[Interval]) -> tuple[float, float]:
    """How long at least one of the intervals lasts, and how long, between the first's begin and the
    last's end, none does.

    Example: busy_and_gaps([(0, 2), (1, 3), (5, 6)]) -> (4, 2)
    """
    times = merged(intervals)
    busy = sum(end - begin for begin, end in times)
    return busy, times[-1][1] - times[0][0] - busy if times else 0.0
