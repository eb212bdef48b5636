"""Capacity that can be counted on: fragmentation.json is a trace at whose end a request finds
enough memory free. Where it lies in pieces, a contiguous cache cannot give it, even one that knows
every length beforehand; pages can. Replayed on both by `python -m claims capacity`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from claims.contiguous import ContiguousManager
from claims.figures import axes
from claims.simulated import Setting, open_run
from claims.systems import ORACLE, PAGED, System
from claims.tables import series, value
from claims.workloads import Job
from rows import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TRACE = Path(__file__).with_name("fragmentation.json")


@dataclass(frozen=True, slots=True)
class Replay:
    """What the last request of the trace met: steps from its arrival to the one that it was first
    in, tokens free and largest hole when it came (a paged cache has no holes: all that is free),
    tokens that it needs. map: of each block, the request that has it reserved, -1 nobody.
    """

    num_steps_waited: int
    seconds_waited: float
    free: int
    largest_hole: int
    needed: int
    owners: list[int]


def trace() -> tuple[list[Job], Setting]:
    """The kept trace."""
    known = json.loads(TRACE.read_text())
    jobs = [
        Job(one["time_s"], np.full(one["prompt_len"], i, dtype=np.int32), one["output_len"])
        for i, one in enumerate(known["requests"])
    ]
    sizes = {name: known[name] for name in ("pool_tokens", "block_size", "max_model_len")}
    return jobs, Setting(**sizes)


def replay(system: System) -> Replay:
    jobs, setting = trace()
    last, size = jobs[-1], setting.block_size
    drive, _, manager, scheduler = open_run(system, jobs, setting)
    num_waited, met = 0, None
    for step in drive.steps():
        if str(len(jobs) - 1) in step.samples:
            assert met is not None
            waited = step.start_s - last.time_s
            return Replay(num_waited, max(0.0, waited), *met)
        if step.end_s >= last.time_s and met is None:
            met = _look(manager, scheduler, size, last)
        elif met is not None:
            num_waited += 1
    raise AssertionError("the last request never ran")


def _look(manager: Any, scheduler: Any, size: int, last: Job) -> tuple[int, int, int, list[int]]:
    owners = [-1] * manager.num_blocks
    free = manager.num_allocatable_blocks * size
    for name, seq_id in {n: s for s, n in scheduler.names_by_seq_id().items()}.items():
        if seq_id not in manager:
            continue
        blocks = manager.block_table(seq_id).tolist()
        if isinstance(manager, ContiguousManager):
            blocks = range(blocks[0], blocks[0] + manager.region_len(seq_id) // size)
        for block in blocks:
            owners[block] = int(name)
    largest = free
    if isinstance(manager, ContiguousManager):
        largest = max(hole for _, hole in manager.holes()) * size
    return free, largest, last.prompt.size + last.output_len - 1, owners


def measure(*, quick: bool) -> list[Row]:
    made = []
    for system in (PAGED, ORACLE):
        found = replay(system)
        holds = found.num_steps_waited == 0
        expected = "starts at once" if system is PAGED else "waits though enough is free"
        made.append(
            Row(
                system.name,
                "fragmentation.json, the last request",
                found.seconds_waited * 1e6,
                f"needs {found.needed} tokens, {found.free:,} free, {found.largest_hole:,} in one "
                f"piece: waits {found.num_steps_waited} steps, {found.seconds_waited:.3f} s",
                limit=expected,
                holds=holds if system is PAGED else not holds and found.free >= found.needed,
            )
        )
        owners = " ".join(map(str, found.owners))
        made.append(Row(system.name, "owner of each block then (-1: free)", 0.0, f"ids: {owners}"))
    return made


def draw(table: list[Row]) -> Figure:
    figure, panels = axes(2, 1, size=(9, 2.6))
    for panel, (row, owners) in zip(panels, (table[:2], table[2:]), strict=True):
        for block, owner in enumerate(map(int, series(owners))):
            color = "#eeeeee" if owner < 0 else ("#0b6e4f", "#c8553d")[owner % 2]
            panel.bar(block, 1, width=0.9, align="edge", color=color)
        piece = f"{value(row, 'free'):,.0f} tokens free, {value(row, 'in one piece'):,.0f} together"
        waits = f"{value(row, 'needs'):.0f} needed: waits {value(row, 'waits'):.0f} steps"
        panel.set_title(f"{row.name}: {piece}, {waits}", fontsize=9, loc="left")
        panel.set_yticks([])
        panel.grid(False)
        panel.set_xlim(0, len(series(owners)))
    panels[-1].set_xlabel("block of 16 tokens; green: held, grey: free")
    return cast("Figure", figure)
