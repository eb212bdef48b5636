"""A comparison in plain words and one table, or as one JSON object."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pagedkv.records import counted
from pagedkv.replay.comparing import Comparison, Played
from pagedkv.replay.lines import plain
from pagedkv.replay.metrics import Metrics
from pagedkv.replay.step_times import TERMS, StepTimes

MAX_ERROR = 0.10  # of held-out steps; above it the report says so


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.1f} ms"


def _percent(value: float) -> str:
    return f"{value:.1%}"


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _rate(value: float) -> str:
    return f"{value:,.1f}"


ROWS: tuple[tuple[str, Callable[[Metrics], float], Callable[[float], str]], ...] = (
    ("throughput, tokens/s", lambda m: m.tokens_per_s, _rate),
    ("generated tokens", lambda m: m.num_generated, _count),
    ("duration", lambda m: m.duration_s, _seconds),
    ("steps", lambda m: m.num_steps, _count),
    ("first token, p50", lambda m: m.ttft.p50, _seconds),
    ("first token, p90", lambda m: m.ttft.p90, _seconds),
    ("first token, p99", lambda m: m.ttft.p99, _seconds),
    ("between tokens, p50", lambda m: m.itl.p50, _seconds),
    ("between tokens, p90", lambda m: m.itl.p90, _seconds),
    ("between tokens, p99", lambda m: m.itl.p99, _seconds),
    ("whole request, p50", lambda m: m.e2e.p50, _seconds),
    ("whole request, p90", lambda m: m.e2e.p90, _seconds),
    ("whole request, p99", lambda m: m.e2e.p99, _seconds),
    ("requests completed", lambda m: m.e2e.num, _count),
    ("preempted, swapped", lambda m: m.num_swapped_out, _count),
    ("preempted, recomputed", lambda m: m.num_recomputed, _count),
    ("of these displaced", lambda m: m.num_displaced, _count),
    ("prefix cache hit rate", lambda m: m.hit_rate, _percent),
    ("evicted blocks", lambda m: m.num_evictions, _count),
    ("blocks copied on write", lambda m: m.num_copies, _count),
    ("waste in held blocks", lambda m: m.waste, _percent),
    ("pool held, mean", lambda m: m.occupancy, _percent),
    ("pool held, peak blocks", lambda m: m.peak_blocks, _count),
)


def text_report(comparison: Comparison) -> str:
    """For people."""
    recording, before = comparison.recording, comparison.before
    lines = [
        f"{recording.path}: {counted(comparison.recorded.num_requests, 'request')}, "
        f"{counted(len(recording.steps), 'step')}; {counted(before.facts.num_blocks, 'block')} of "
        f"{counted(before.cache.block_size, 'token')}, "
        f"{before.scheduler.scheduling_policy}"
        + (" (its end is missing)" if recording.is_cut else ""),
        _check(comparison),
        *_times(comparison.times),
    ]
    if comparison.changed is not None:
        lines.append(f"settings: {', '.join(before.differences(comparison.after))}")
    lines += ["", *_table(comparison)]
    for name, played in _columns(comparison):
        lines += _remarks(name, played, comparison.times)
    return "\n".join(lines)


def json_report(comparison: Comparison) -> dict[str, Any]:
    """For programs: seconds, shares from 0 to 1, counts."""
    changed = comparison.changed
    return {
        "recording": str(comparison.recording.path),
        "is_cut": comparison.recording.is_cut,
        "difference": comparison.difference,
        "step_times": {
            "coefficients_s": dict(zip(TERMS, comparison.times.coefficients_s, strict=True)),
            "gap_s": comparison.times.gap_s,
            "held_out_error": plain(comparison.times.error),
            "not_measured": list(comparison.times.unseen),
        },
        "settings": comparison.before.differences(comparison.after),
        "recorded": _metrics(comparison.recorded),
        "modelled": _metrics(comparison.modelled.metrics),
        "changed": None if changed is None else _metrics(changed.metrics),
        "refused": [] if changed is None else plain(changed.refused),
    }


def _metrics(metrics: Metrics) -> dict[str, Any]:
    values: dict[str, Any] = plain(metrics)
    return values | {"tokens_per_s": metrics.tokens_per_s}


def _check(comparison: Comparison) -> str:
    if comparison.difference is None:
        steps = counted(len(comparison.recording.steps), "step")
        return f"check: driven again under its own settings it decides the same in all {steps}"
    return (
        "check: driven again under its own settings it does not decide the same, so take the rest "
        f"with care: {comparison.difference}"
    )


def _times(times: StepTimes) -> list[str]:
    error = times.error
    lines = [
        f"step times: error on {counted(error.num_steps, 'held-out step')} {error.mean:.1%} in the "
        f"mean, "
        f"{error.median:.1%} in the median, {error.total:+.1%} in their sum"
    ]
    if error.mean > MAX_ERROR:
        lines.append(
            f"step times: that is above {MAX_ERROR:.0%}: take what depends on time with care"
        )
    if times.unseen:
        lines.append(
            f"step times: not in the recording, so not measured: {', '.join(times.unseen)}"
        )
    return lines


def _columns(comparison: Comparison) -> list[tuple[str, Played]]:
    columns = [("modelled", comparison.modelled)]
    if comparison.changed is not None:
        columns.append(("changed", comparison.changed))
    return columns


def _table(comparison: Comparison) -> list[str]:
    columns = _columns(comparison)
    heads = ["recorded", *(name for name, _ in columns)]
    all_metrics = [comparison.recorded, *(played.metrics for _, played in columns)]
    has_change = comparison.changed is not None
    rows = [["", *heads, *(["change"] if has_change else [])]]
    for name, value_of, shown in ROWS:
        values = [value_of(metrics) for metrics in all_metrics]
        row = [name, *map(shown, values)]
        if has_change:
            row.append(_change(values[1], values[2], shown))
        rows.append(row)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _change(old: float, new: float, shown: Callable[[float], str]) -> str:
    """Of modelled times, so that like is compared with like."""
    if shown is _percent:
        return f"{(new - old) * 100:+.1f} points"
    if old == 0:
        return "" if new == 0 else "new"
    return f"{round(new / old - 1, 3) + 0.0:+.1%}"


def _remarks(name: str, played: Played, times: StepTimes) -> list[str]:
    lines = []
    if played.largest > times.largest:
        lines.append(
            f"{name}: its largest step has {counted(played.largest, 'token')}, the largest "
            f"recorded one {times.largest}: times beyond that are not measured"
        )
    lines += (f"{name}: {key} is left out: {why}" for key, why in played.refused)
    return lines
