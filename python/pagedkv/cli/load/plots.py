"""A run as pictures: how latencies are distributed, and how the run went over time."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pagedkv.cli.load.chart import Panel, Series, render
from pagedkv.cli.load.client import Outcome
from pagedkv.cli.load.summary import LoadSummary, in_flight, latencies_s

_NUM_BINS = 60


def load_svg(title: str, outcomes: Sequence[Outcome], summary: LoadSummary) -> str:
    """An SVG document of six panels."""
    begin_s = min(one.scheduled_s for one in outcomes)
    values = latencies_s(outcomes)
    done = [one for one in outcomes if one.error is None]
    panels = [
        _distribution("Time to first token", values["ttft"], values["scheduled_ttft"]),
        _distribution("Between two pieces", values["itl"]),
        _distribution("Whole answer", values["e2el"], values["scheduled_e2el"]),
        Panel("Requests at once", "seconds", "requests", [_levels(outcomes, begin_s)]),
        Panel("Pieces of answers", "seconds", "per second", [_rate(done, begin_s)]),
        Panel(
            "Whole answer, by arrival",
            "seconds at which it arrived",
            "ms",
            [
                Series(
                    "from arrival",
                    [
                        (one.scheduled_s - begin_s, (one.end_s - one.scheduled_s) * 1e3)
                        for one in done
                    ],
                    is_dots=True,
                )
            ],
        ),
    ]
    subtitle = (
        f"{summary.completed} completed, {summary.failed} failed in {summary.duration_s:.1f} s; "
        f"{summary.per_second(summary.total_output_tokens):.1f} tok/s out"
    )
    return render(title, subtitle, panels)


def _distribution(title: str, values_s: list[float], arrival_s: list[float] | None = None) -> Panel:
    series = [Series("from sending", _cumulative(values_s))]
    if arrival_s is not None:
        series.append(Series("from arrival", _cumulative(arrival_s)))
    return Panel(title, "ms", "% at most", series)


def _cumulative(values_s: list[float]) -> list[tuple[float, float]]:
    """(value in ms, percentage of values that are at most it)."""
    ordered = sorted(values_s)
    return [(value * 1e3, (i + 1) / len(ordered) * 100) for i, value in enumerate(ordered)]


def _levels(outcomes: Sequence[Outcome], begin_s: float) -> Series:
    points = [(0.0, 0.0)]
    for time_s, level in in_flight(outcomes):
        points += [(time_s - begin_s, points[-1][1]), (time_s - begin_s, float(level))]
    return Series("requests", points)


def _rate(done: Sequence[Outcome], begin_s: float) -> Series:
    times = [at - begin_s for one in done for at in one.piece_s]
    bin_s = (max(times, default=0.0) or 1.0) / _NUM_BINS
    counts = [0] * _NUM_BINS
    for time_s in times:
        counts[min(math.floor(time_s / bin_s), _NUM_BINS - 1)] += 1
    return Series("pieces", [((i + 0.5) * bin_s, one / bin_s) for i, one in enumerate(counts)])
