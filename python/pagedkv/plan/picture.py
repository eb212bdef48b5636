"""A plan drawn: where the memory goes, how many sequences fit, what a block's tail wastes, and the
floor of decodes. By matplotlib, of the extra plot.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from pagedkv.plan.planning import Plan

FORMATS = (".svg", ".png", ".pdf")


def check_target(path: Path) -> None:
    """Raise before there is anything to draw.

    Raises:
        ValueError: no format of that name. FileNotFoundError: no such folder. RuntimeError: there
        is no matplotlib.
    """
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"a plot is one of {', '.join(FORMATS)}, got {str(path)!r}")
    if not path.absolute().parent.is_dir():
        raise FileNotFoundError(f"no folder {path.absolute().parent}")
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise RuntimeError(
            f"a plot needs {error.name}, of the extra plot: pip install 'pagedkv[plot]'"
        ) from None


def draw_plan(plan: Plan, path: Path) -> None:
    """Write the picture, in the format of the path's ending."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 8), layout="constrained")
    memory, sequences, waste, floors = figure.subplots(2, 2).flat
    _draw_memory(memory, plan)
    _draw_sequences(sequences, plan)
    _draw_waste(waste, plan)
    _draw_floors(floors, plan)
    figure.suptitle(f"{Path(plan.model).name}, {plan.dtype}, on {plan.gpu.name}")
    figure.savefig(path)


def _draw_memory(axes: Axes, plan: Plan) -> None:
    names = ("weights", "step", "graphs", "libraries", "pool")
    fits = (plan.fit, *plan.variants)
    left = [0.0] * len(fits)
    places = list(range(len(fits)))[::-1]
    for name in names:
        sizes = [getattr(one.memory, f"{name}_bytes") / 2**30 for one in fits]
        axes.barh(places, sizes, left=left, label=name)
        left = [before + size for before, size in zip(left, sizes, strict=True)]
    if plan.gpu.memory_bytes is not None:
        axes.axvline(plan.gpu.memory_bytes / 2**30, color="black", linestyle=":", label="the GPU")
    axes.set_yticks(places, [one.name for one in fits])
    axes.set_xlabel("GiB of each GPU")
    axes.set_title("Memory")
    axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))


def _draw_sequences(axes: Axes, plan: Plan) -> None:
    for one in (plan.fit, *plan.variants):
        held = [pair for pair in zip(plan.lengths, one.concurrency, strict=True) if pair[1]]
        if held:  # a logarithm has no zero
            lengths, numbers = zip(*held, strict=True)
            axes.plot(lengths, numbers, marker="o", label=one.name)
    axes.axhline(plan.max_num_seqs, color="black", linestyle=":", label="max_num_seqs")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("tokens of a sequence")
    axes.set_title("Sequences that fit at once")
    axes.legend(fontsize="small")


def _draw_waste(axes: Axes, plan: Plan) -> None:
    for one in plan.block_sizes:
        shares = [100 * share for share in one.waste_shares]
        axes.plot(plan.lengths, shares, marker="o", label=f"block_size {one.block_size}")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("tokens of a sequence")
    axes.set_ylabel("% of what it holds")
    axes.set_title("Expected waste in the last block")
    axes.legend(fontsize="small")


def _draw_floors(axes: Axes, plan: Plan) -> None:
    if not plan.decode:
        axes.set_axis_off()
        axes.set_title("No floors: the rates are not known, or nothing fits")
        return
    for length in plan.lengths:
        rows = [one for one in plan.decode if one.context_len == length]
        if rows:
            batches = [one.num_seqs for one in rows]
            rates = [one.tokens_per_s for one in rows]
            axes.plot(batches, rates, marker="o", label=f"context {length:,}")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("sequences in a step")
    axes.set_title("Decode: tokens/s at most")
    axes.legend(fontsize="small")
