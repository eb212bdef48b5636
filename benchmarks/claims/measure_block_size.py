"""Block sizes from 1 to 256: waste, length of the tables, what the prefix cache finds, and tokens
out per second in the replay simulator (ShareGPT-like, a full queue, a pool of 40,000 tokens). The
prefixes: each request begins with one of eight system prompts of 20 to 600 tokens. What the size
does to kernels and to the whole engine on a GPU is measured by kernels (`python -m claims
kernels`); the simulator's step times know nothing of it.
"""

from __future__ import annotations

import dataclasses
import random
from typing import TYPE_CHECKING

import numpy as np

from claims import tables
from claims.figures import axes
from claims.simulated import Setting, simulate, simulate_window
from claims.systems import PAGED
from claims.tables import select, value
from claims.waste import tail_tokens
from claims.workloads import VOCAB, Job, jobs_of
from rows import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
POOL_TOKENS = 40_000
NUM_PREFIXES = 8


def measure(*, quick: bool) -> list[Row]:
    made = []
    count, seconds = (60, 1.0) if quick else (250, 6.0)
    jobs = jobs_of("ShareGPT-like", count)
    for size in (8, 64) if quick else BLOCK_SIZES:
        setting = Setting(POOL_TOKENS // (4 if quick else 1) // 256 * 256, block_size=size)
        waste = simulate(PAGED, jobs, setting).waste
        entries = waste.taken / size / waste.num_seqs
        unused = (waste.taken - waste.used) / waste.num_seqs
        cached = dataclasses.replace(setting, enable_prefix_caching=True)
        hits = simulate(PAGED, with_prefixes(jobs), cached, watches=False).metrics.hit_rate
        window = simulate_window(PAGED, jobs_of("ShareGPT-like", 400), setting, seconds)
        made.append(
            Row(
                f"block {size}",
                f"ShareGPT-like, {setting.pool_tokens:,} tokens",
                0.0,
                f"wasted {100 * waste.wasted:.1f} %, {unused:.1f} tokens unused "
                f"(formula: {tail_tokens(size)}), {entries:.1f} entries a table, "
                f"hit rate {100 * hits:.1f} %, {window.tokens_per_s:,.0f} tok/s out (simulated)",
            )
        )
    return made


def with_prefixes(jobs: list[Job]) -> list[Job]:
    """Each behind one of eight prefixes, the same each time; arrivals 50 ms apart."""
    source, tokens = random.Random(8), np.random.default_rng(8)
    prefixes = [
        tokens.integers(0, VOCAB, source.randint(20, 600), dtype=np.int32)
        for _ in range(NUM_PREFIXES)
    ]
    made = []
    for i, job in enumerate(jobs):
        prompt = np.concatenate([source.choice(prefixes), job.prompt[:500]])
        made.append(Job(0.05 * i, prompt, min(job.output_len, 900)))
    return made


def draw(table: list[Row]) -> Figure:
    figure, panels = axes(2, 3, size=(9.5, 5))
    sizes = [int(row.name.split()[1]) for row in table]
    for panel, word, label in (
        (panels[0], "wasted", "% wasted"),
        (panels[1], "entries a table", "entries of a sequence's table"),
        (panels[2], "hit rate", "% of tokens found (prefixes)"),
    ):
        _curve(panel, sizes, [value(row, word) for row in table], label, "#0b6e4f")
    kernels = tables.read(tables.newest("claims-kernels"))
    for panel, kind, label, color in (
        (panels[3], "decode", "us, decode of 64 x 1,024", "#4a7fb5"),
        (panels[4], "prefill", "us, prefill of 4 x 2,048", "#4a7fb5"),
    ):
        mine = [row for row in select(kernels, name=kind) if row.name == kind]
        found = [int(row.shape.split("block ")[1]) for row in mine]
        _curve(panel, found, [row.us for row in mine], label, color)
        panel.set_ylim(auto=True)
        panel.set_yscale("log")
    engine = select(kernels, name="whole engine")
    found = [int(row.shape.split("block ")[1]) for row in engine]
    _curve(panels[5], found, [value(row, "tok/s out") for row in engine], "tok/s out", "#c8553d")
    simulated = [value(row, "tok/s out") for row in table]
    panels[5].plot(sizes, simulated, color="#aaaaaa", label="simulated, 40,000 tokens")
    panels[5].legend(fontsize=7)
    for panel in panels[3:]:
        panel.set_xlabel("tokens in a block")
    return figure


def _curve(panel: Axes, sizes: list[int], values: list[float], label: str, color: str) -> None:
    panel.plot(sizes, values, marker="o", markersize=3, color=color)
    panel.set_xscale("log", base=2)
    panel.set_xticks(sizes, [str(size) for size in sizes])
    panel.set_ylim(bottom=0)
    panel.set_title(label, fontsize=9)
    panel.axvline(16, color="grey", linewidth=0.7, linestyle=":")
