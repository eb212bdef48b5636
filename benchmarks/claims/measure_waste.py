"""How much of the KV cache holds no token: paged, and contiguous in Orca's three variants, at equal
memory under the same scheduler, all requests there from the beginning; means are over the time in
which some wait. Step times are those of h200.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from claims.figures import COLORS, axes
from claims.simulated import Outcome, Setting, simulate
from claims.systems import MAX, PAGED, SYSTEMS, System
from claims.tables import select, series, value
from claims.waste import tail_tokens
from claims.workloads import WORKLOADS, jobs_of
from rows import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

POOL_TOKENS = {"ShareGPT-like": 80_000, "Alpaca-like": 16_000, "mixed256": 80_000}
COUNTS = {"ShareGPT-like": 600, "Alpaca-like": 600, "mixed256": 256}
BLOCK_SIZE = 16
PAGED_AT_MOST = 4.0  # percent
CONTIGUOUS = (60.0, 80.0)
KINDS = ("reserved", "internal", "external")


def measure(*, quick: bool) -> list[Row]:
    made: list[Row] = []
    over_time: list[Row] = []
    for workload in WORKLOADS:
        jobs = jobs_of(workload, 120 if quick else COUNTS[workload])
        setting = Setting(POOL_TOKENS[workload] // (5 if quick else 1), BLOCK_SIZE)
        for system in SYSTEMS:
            outcome = simulate(system, jobs, setting)
            made.append(_row(system, workload, setting, outcome))
            if system is PAGED:
                made.append(_formula_row(workload, outcome))
            if workload == "ShareGPT-like":
                over_time.append(_series_row(system, outcome))
    return made + over_time


def _row(system: System, workload: str, setting: Setting, outcome: Outcome) -> Row:
    waste = outcome.waste
    percent = round(100 * waste.wasted, 1)
    parts = ", ".join(f"{kind} {100 * waste.part(kind):.1f} %" for kind in KINDS)
    limit, holds = "", True
    if system is PAGED and workload != "Alpaca-like":
        limit, holds = f"< {PAGED_AT_MOST:g} %", percent < PAGED_AT_MOST
    elif system is MAX:
        low, high = CONTIGUOUS
        limit, holds = f"{low:g} to {high:g} %", low <= percent <= high
    return Row(
        system.name,
        f"{workload}, {setting.pool_tokens:,} tokens",
        0.0,
        f"wasted {percent} %: {parts}; {waste.num_seqs:.1f} sequences at once",
        limit=limit,
        holds=holds,
    )


def _formula_row(workload: str, outcome: Outcome) -> Row:
    waste = outcome.waste
    measured = (waste.taken - waste.used) / waste.num_seqs
    formula = tail_tokens(BLOCK_SIZE)
    return Row(
        "paged, unused tokens of a sequence",
        workload,
        0.0,
        f"measured {measured:.2f}, (block_size - 1) / 2 = {formula}; of "
        f"{waste.used / waste.num_seqs:.1f} tokens that it has, "
        f"{100 * formula / (formula + waste.used / waste.num_seqs):.1f} % by the formula",
    )


def _series_row(system: System, outcome: Outcome) -> Row:
    values = " ".join(f"{100 * wasted.wasted:.1f}" for _, wasted in outcome.over_time)
    seconds = outcome.metrics.duration_s
    name = f"ShareGPT-like over time, {seconds:.1f} s"
    return Row(system.name, name, 0.0, f"wasted % in each twentieth of the run: {values}")


def draw(table: list[Row]) -> Figure:
    figure, (left, right) = axes(1, 2, size=(9, 3.4))
    shades = {"reserved": "#e0a458", "internal": "#c8553d", "external": "#5b5f97"}
    names = [system.name for system in SYSTEMS]
    place = 0.0
    ticks: list[tuple[float, str]] = []
    for workload in WORKLOADS:
        for name in names:
            (row,) = [r for r in select(table, shape=f"{workload}, ") if r.name == name]
            bottom = 0.0
            for kind in KINDS:
                height = value(row, kind)
                label = kind if place == 0 else None
                left.bar(place, height, bottom=bottom, color=shades[kind], label=label)
                bottom += height
            left.text(place, bottom + 1, f"{bottom:.0f}", ha="center", fontsize=7)
            ticks.append((place, name.replace("contiguous, ", "")))
            place += 1
        left.text(place - 2.5, -36, workload, ha="center")
        place += 0.7
    left.set_xticks([x for x, _ in ticks], [name for _, name in ticks], rotation=60)
    left.set_ylabel("% of taken memory")
    left.set_ylim(0, 105)
    left.legend(loc="upper left", fontsize=7)
    for row in select(table, shape="ShareGPT-like over time"):
        values = series(row)
        seconds = float(row.shape.rsplit(", ", 1)[1].removesuffix(" s"))
        times = [seconds * (i + 0.5) / len(values) for i in range(len(values))]
        right.plot(times, values, color=COLORS[row.name], label=row.name)
    right.set_xlabel("seconds (modelled), ShareGPT-like")
    right.set_ylabel("% wasted")
    right.set_ylim(0, 105)
    right.legend(fontsize=7)
    return figure
