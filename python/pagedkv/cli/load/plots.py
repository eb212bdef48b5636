"""A run as pictures: how latencies are distributed, and how the run went over time. By matplotlib,
of the extra plot.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from pagedkv.cli.load.client import Outcome
from pagedkv.cli.load.summary import LoadSummary, in_flight, latencies_s

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NUM_BINS = 60


def load_figure(title: str, outcomes: Sequence[Outcome], summary: LoadSummary) -> Figure:
    """Six panels, all axes from 0."""
    from matplotlib.figure import Figure

    begin_s = min(one.scheduled_s for one in outcomes)
    values = latencies_s(outcomes)
    done = [one for one in outcomes if one.error is None]
    figure = Figure(figsize=(15, 8), layout="constrained")
    first, between, whole, levels, pieces, arrivals = figure.subplots(2, 3).flat
    _distribution(first, "Time to first token", values["ttft"], values["scheduled_ttft"])
    _distribution(between, "Between two pieces", values["itl"])
    _distribution(whole, "Whole answer", values["e2el"], values["scheduled_e2el"])

    changes = [(begin_s, 0), *in_flight(outcomes)]
    levels.step([at - begin_s for at, _ in changes], [n for _, n in changes], where="post")
    levels.set(title="Requests at once", xlabel="seconds", ylabel="requests")

    times = [at - begin_s for one in done for at in one.piece_s]
    counts, edges = np.histogram(times, _NUM_BINS, (0, max(times, default=0.0) or 1.0))
    pieces.plot((edges[:-1] + edges[1:]) / 2, counts / np.diff(edges))
    pieces.set(title="Pieces of answers", xlabel="seconds", ylabel="per second")

    arrivals.plot(
        [one.scheduled_s - begin_s for one in done],
        [(one.end_s - one.scheduled_s) * 1e3 for one in done],
        ".",
    )
    arrivals.set(
        title="Whole answer, by arrival",
        xlabel="seconds at which it arrived",
        ylabel="ms from arrival",
    )
    for axes in figure.axes:
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    figure.suptitle(
        f"{title}\n{summary.completed} completed, {summary.failed} failed in "
        f"{summary.duration_s:.1f} s; {summary.per_second(summary.total_output_tokens):.1f} "
        "tok/s out"
    )
    return figure


def _distribution(
    axes: Axes, title: str, values_s: list[float], arrival_s: list[float] | None = None
) -> None:
    """For each latency the percentage of answers that took at most it."""
    for name, values in (("from sending", values_s), ("from arrival", arrival_s)):
        if values is not None:
            ordered = np.sort(np.array(values)) * 1e3
            axes.plot(ordered, np.arange(1, ordered.size + 1) / max(ordered.size, 1) * 100)
            axes.lines[-1].set_label(name)
    axes.set(title=title, xlabel="ms", ylabel="% at most")
    axes.legend()
