"""The screen of `pagedkv top`, from what is known of a run; and the same as plain values.

What a server sends is text of others (ids, labels, reasons): only what is printable is shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pagedkv.cli.live.run_state import RunState, Step

_BARS = "▁▂▃▄▅▆▇█"
# What blocks are in use for, as a bar shows it: (statistic, mark, style, words).
_KINDS = (
    ("num_referenced", "█", "cyan", "referenced"),
    ("num_draining", "▓", "yellow", "draining"),
    ("num_in_transit", "▒", "magenta", "in transit"),
    ("num_cached_idle", "░", "green", "cached"),
    ("num_free", "·", "dim", "free"),
)
_STATE_STYLES = {"running": "green", "waiting": "yellow", "swapped": "magenta", "pinned": "cyan"}


class Moment(NamedTuple):
    """When a screen is made: how long frames have been coming, and how long ago the last one did.
    latencies: as of then.
    """

    watched_s: float
    quiet_s: float
    latencies: Mapping[str, Mapping[str, float]]


def as_dict(run: RunState, now: Moment) -> dict[str, Any]:
    """For programs. Counters are since the server's start, rates of the last seconds."""
    return {
        "model": run.start.get("model"),
        "pagedkv": run.start.get("pagedkv"),
        "block_size": run.start.get("block_size"),
        "max_num_seqs": run.start.get("max_num_seqs"),
        "time_s": run.time_s,
        "statistics": run.statistics,
        "queues": run.queues,
        "rates": run.rates(now.watched_s, now.quiet_s),
        "prefix_cache_hit_rate": run.hit_rate,
        "recent_prefix_cache_hit_rate": run.recent_hit_rate,
        "num_preempted": run.num_preempted,
        "latencies": now.latencies,
        "requests": run.in_order(),
    }


def screen(run: RunState, now: Moment, base: str, width: int, height: int) -> RenderableType:
    """What fits in width x height characters. Requests that do not are counted."""
    above: list[RenderableType] = [
        _head(run, base),
        *_pool(run, width),
        *_queues(run),
        *_rates(run, now),
        *_latencies(now.latencies),
        *_timeline(list(run.steps), width),
    ]
    # A line for the table's head, one for those that do not fit, one for the cursor.
    return Group(*above, _requests(run.in_order(), max(3, height - len(above) - 3)))


def _head(run: RunState, base: str) -> Text:
    start = run.start
    return _line(
        (f"pagedkv {_plain(start.get('pagedkv'))}", "bold"),
        (f"  {_plain(start.get('model'))}", "bold cyan"),
        (f"  {_plain(base)}", "dim"),
    )


def _pool(run: RunState, width: int) -> list[Text]:
    one, size = run.statistics, int(run.start.get("block_size", 0))
    num_blocks = int(one.get("num_blocks", 0))
    cells = max(10, width - 34)
    bar = Text("blocks ")
    used = 0
    for name, mark, style, _ in _KINDS:
        # Where the numbers so far end on the bar: parts add up, and none goes lost by rounding.
        before = round(cells * used / max(num_blocks, 1))
        used += int(one.get(name, 0))
        bar.append(mark * (round(cells * used / max(num_blocks, 1)) - before), style)
    bar.append(f" {100 * one.get('block_occupancy', 0):5.1f} % of {num_blocks:,} x {size}")
    words = Text("       ")
    for name, mark, style, told in _KINDS:
        number = int(one.get(name, 0))
        if number or told in ("referenced", "free"):
            shared = f" ({int(one.get('num_shared', 0)):,} shared)" if mark == "█" else ""
            words.append(f"{mark} ", style)
            words.append(f"{number:,} {told}{shared}  ")
    lines = [
        bar,
        words,
        _gauge(
            "tokens ", one.get("token_occupancy", 0.0), cells, f"{int(one.get('num_tokens', 0)):,}"
        ),
    ]
    num_cpu = int(one.get("num_cpu_blocks", 0))
    if num_cpu:
        num_used = num_cpu - int(one.get("num_cpu_free", 0))
        lines.append(_gauge("cpu    ", num_used / num_cpu, cells, f"{num_used:,} of {num_cpu:,}"))
    return lines


def _gauge(name: str, part: float, cells: int, words: str) -> Text:
    filled = round(cells * part)
    return _line(
        (name, ""),
        ("█" * filled, "blue"),
        ("·" * (cells - filled), "dim"),
        (f" {100 * part:5.1f} % {words}", ""),
    )


def _queues(run: RunState) -> list[Text]:
    text, one = Text("queues "), run.statistics
    for name in ("running", "waiting", "swapped", "pinned"):
        number = run.queues.get(name, 0)
        most = f" of {_plain(run.start.get('max_num_seqs'))}" if name == "running" else ""
        text.append(f"{name} ", _STATE_STYLES[name])
        text.append(f"{number:,}{most}  ")
    counts = (
        int(one.get(name, 0))
        for name in ("num_evictions", "num_copies", "num_swapped_out", "num_swapped_in")
    )
    moved = "evicted {:,}  copied {:,}  swapped out {:,}, in {:,}".format(*counts)
    return [text, Text(f"blocks {moved}  sequences preempted {run.num_preempted:,}")]


def _rates(run: RunState, now: Moment) -> list[Text]:
    rates = run.rates(now.watched_s, now.quiet_s)

    def percent(part: float | None) -> str:
        return "-" if part is None else f"{100 * part:.1f} %"

    return [
        Text(
            f"rates  prefill {rates['prefill_tokens_per_s']:,.0f} tokens/s  "
            f"decode {rates['decode_tokens_per_s']:,.0f} tokens/s  "
            f"{rates['steps_per_s']:,.1f} steps/s of {1e3 * rates['step_s']:.2f} ms"
        ),
        Text(f"prefix hits {percent(run.hit_rate)}, lately {percent(run.recent_hit_rate)}"),
    ]


_LATENCIES = {
    "time_to_first_token_seconds": "first token",
    "inter_token_latency_seconds": "next token",
    "request_queue_time_seconds": "in the queue",
    "e2e_request_latency_seconds": "whole answer",
}


def _latencies(found: Mapping[str, Mapping[str, float]]) -> list[Text]:
    """p50, p90 and p99 since the start, two kinds a line."""
    parts = [
        f"{words} {' '.join(_duration(one) for one in found[name].values())}"
        for name, words in _LATENCIES.items()
        if name in found
    ]
    lines = ["   ".join(parts[i : i + 2]) for i in range(0, len(parts), 2)]
    return [Text(f"p50 p90 p99  {line}") for line in lines]


def _duration(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _timeline(steps: Sequence[Step], width: int) -> list[Text]:
    """The last steps, newest to the right: tokens as heights, and below what happened."""
    shown = steps[-max(10, width - 24) :]
    rows = [
        _heights("prefill", [one.prefill_tokens for one in shown], "cyan"),
        _heights("decode ", [one.decode_tokens for one in shown], "green"),
    ]
    marks = [_mark(one) for one in shown]
    told = [
        f"{mark} {words}" for mark, words in _EVENTS.items() if mark in {one for one, _ in marks}
    ]
    return [*rows, _line(("       ", ""), *marks, ("  " + ", ".join(told), "dim"))]


_EVENTS = {"P": "preempted", "S": "swapped", "E": "evicted", "C": "copied"}


def _mark(one: Step) -> tuple[str, str]:
    if one.num_preempted:
        return "P", "bold red"
    if one.num_swapped_out or one.num_swapped_in:
        return "S", "magenta"
    if one.num_evicted:
        return "E", "yellow"
    return ("C", "cyan") if one.num_copies else (" ", "")


def _heights(name: str, values: Sequence[int], style: str) -> Text:
    most = max(values, default=0)
    bars = "".join(_BARS[-(-(len(_BARS) - 1) * one // most)] if one else " " for one in values)
    return _line((name, ""), (bars, style), (f" at most {most:,} a step", "dim"))


def _requests(requests: Sequence[Mapping[str, Any]], num_rows: int) -> RenderableType:
    table = Table(box=None, pad_edge=False, expand=True)
    table.add_column("request", max_width=16, min_width=10, no_wrap=True)
    table.add_column("state", min_width=7, no_wrap=True)
    table.add_column("tokens", min_width=10, justify="right", no_wrap=True)
    table.add_column("blocks", min_width=6, justify="right", no_wrap=True)
    table.add_column("user", max_width=12, no_wrap=True)
    table.add_column("why it waits", ratio=1, no_wrap=True)
    shown = _fitting(requests, num_rows)
    for one in shown:
        state, most = str(one.get("state")), one.get("max_tokens")
        goal = "" if most is None else f" of {one.get('prompt_len', 0) + most:,}"
        table.add_row(
            _plain(one.get("id")),
            Text(_plain(state), _STATE_STYLES.get(state, "")),
            f"{one['num_tokens']:,}{goal}",
            f"{one['num_blocks']:,}",
            _plain(one.get("user") or ""),
            Text(_plain(one.get("why") or ""), overflow="ellipsis"),
        )
    left = len(requests) - len(shown)
    if not left:
        return table
    return Group(table, Text(f"... and {left:,} more", "dim"))


def _fitting(requests: Sequence[Mapping[str, Any]], num_rows: int) -> list[Mapping[str, Any]]:
    """As many as fit: where those that run would leave no room, half is for those that wait."""
    if len(requests) <= num_rows:
        return list(requests)
    running = [one for one in requests if one.get("state") == "running"]
    others = [one for one in requests if one.get("state") != "running"]
    num_others = min(len(others), max(num_rows // 2, num_rows - len(running)))
    return [*running[: num_rows - num_others], *others[:num_others]]


def _line(*parts: tuple[str, str]) -> Text:
    text = Text(no_wrap=True, overflow="crop")
    for words, style in parts:
        text.append(words, style)
    return text


def _plain(value: object) -> str:
    """Without anything that a terminal obeys."""
    text = "" if value is None else str(value)
    return "".join(one if one.isprintable() else "?" for one in text)
