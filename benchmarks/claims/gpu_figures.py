"""Figures of the tables that need a GPU to be measured, but none to be drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from claims.figures import COLORS, axes
from claims.tables import select, value
from rows import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_gpu(table: list[Row]) -> Figure:
    """Throughput as measured, and as the simulator says."""
    figure, (panel,) = axes(1, 1, size=(5.5, 3))
    for i, row in enumerate(table):
        panel.bar(i, value(row, "tok/s out"), 0.38, color=COLORS[row.name])
        panel.bar(i + 0.4, value(row, "simulated"), 0.38, color=COLORS[row.name], alpha=0.45)
        factor = f"{row.baseline:.2f} x slower" if i and row.baseline else ""
        panel.text(i + 0.2, value(row, "tok/s out") + 300, factor, ha="center", fontsize=7)
    names = [row.name.replace("contiguous, ", "contiguous,\n") for row in table]
    panel.set_xticks([i + 0.2 for i in range(len(table))], names, fontsize=7)
    panel.set_ylabel("tokens out per second (pale: simulated)")
    return figure


def draw_indirection(table: list[Row]) -> Figure:
    """Times against those of a contiguous cache."""
    figure, (panel,) = axes(1, 1, size=(6.5, 3))
    kinds = ("contiguous", "blocks in order", "blocks shuffled")
    for k, (kind, color) in enumerate(zip(kinds, ("#888888", "#4a7fb5", "#0b6e4f"), strict=True)):
        mine = [row for row in table if row.name.endswith(kind)]
        times = [100 + value(row, "% of contiguous") for row in mine]
        panel.bar([i + 0.27 * k for i in range(len(mine))], times, 0.25, color=color, label=kind)
    mine = [row for row in table if row.name.endswith("contiguous")]
    labels = [f"{row.name.split(',')[0]}\n{row.shape}" for row in mine]
    panel.set_xticks([i + 0.27 for i in range(len(mine))], labels, fontsize=7)
    panel.set_ylim(80, 120)
    panel.set_ylabel("% of contiguous time")
    panel.legend(fontsize=7, ncols=3)
    return figure


def draw_swap(table: list[Row]) -> Figure:
    """Both ways by length, at block sizes 16 and 256."""
    figure, panels = axes(1, 2, size=(8.5, 3.2))
    for panel, name in zip(panels, ("Llama-3.1-8B", "Qwen3-0.6B"), strict=True):
        for size, line in ((16, "-"), (256, "--")):
            mine = [row for row in select(table, name=name) if row.name.endswith(f"block {size}")]
            mine = [row for row in mine if row.us]
            lengths = [int(row.shape.split()[0]) for row in mine]
            values = [value(row, "swap") / 1e3 for row in mine]
            label = f"swap out and in, block {size}"
            panel.plot(lengths, values, line, color="#0b6e4f", label=label)
        values = [value(row, "recompute") / 1e3 for row in mine]
        panel.plot(lengths, values, color="#c8553d", label="compute again")
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_title(name, fontsize=9)
        panel.set_xlabel("tokens")
        panel.set_ylabel("ms")
        panel.legend(fontsize=7)
    return figure
