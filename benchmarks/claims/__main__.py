"""python -m claims [names] [--quick] [--save] [--figures]: measures the claims, prints their tables
and keeps them in benchmarks/results; draws the figures from the newest tables kept there.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import rows
from claims import (
    figures,
    gpu_figures,
    measure_block_size,
    measure_capacity,
    measure_prefix,
    measure_sharing,
    measure_throughput,
    measure_waste,
    pictures,
    tables,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Claims are measured by the module measure_NAME. Here is what draws them, in this order.
ON_CPU: dict[str, Callable[[list[rows.Row]], Figure]] = {
    "capacity": measure_capacity.draw,
    "waste": measure_waste.draw,
    "throughput": measure_throughput.draw,
    "block_size": measure_block_size.draw,
    "sharing": measure_sharing.draw,
    "prefix": measure_prefix.draw,
}
ON_GPU: dict[str, Callable[[list[rows.Row]], Figure] | None] = {
    "gpu": gpu_figures.draw_gpu,
    "kernels": None,  # drawn with block_size
    "indirection": gpu_figures.draw_indirection,
    "swap": gpu_figures.draw_swap,
}


def main(given: list[str] | None = None) -> int:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    which = f"of {', '.join(ON_CPU)} (none: all of these); on a GPU {', '.join(ON_GPU)}"
    arguments.add_argument("names", nargs="*", help=which)
    arguments.add_argument("--quick", action="store_true", help="small, for a look")
    arguments.add_argument("--save", action="store_true", help="keep the tables in results/")
    arguments.add_argument("--figures", action="store_true", help="only draw, from kept tables")
    options = arguments.parse_args(given)
    drawn_by = {**ON_CPU, **ON_GPU}
    names = options.names or list(drawn_by if options.figures else ON_CPU)
    unknown = [name for name in names if name not in drawn_by]
    if unknown:
        arguments.error(f"unknown claims {unknown}: there are {', '.join(drawn_by)}")
    missed = 0 if options.figures else sum(measure(name, options) for name in names)
    can_draw = importlib.util.find_spec("matplotlib") is not None
    if options.save and not can_draw:
        print("matplotlib is not installed: python -m claims --figures draws the tables elsewhere")
    if options.figures or (options.save and can_draw):
        for name in names:
            if draw := drawn_by[name]:
                table = tables.read(tables.newest(f"claims-{name}"))
                print(f"drawn {figures.save(draw(table), name)}")
        for path in pictures.save_all():
            print(f"drawn {path}")
    if missed:
        print(f"{missed} expectations do not hold: docs/paged-attention.md says which, and why")
    return 0


def measure(name: str, options: argparse.Namespace) -> int:
    """How many expectations do not hold."""
    claim = importlib.import_module(f"claims.measure_{name}")
    begin = time.perf_counter()
    made = claim.measure(quick=options.quick)
    notes = [*claim.__doc__.strip().splitlines(), ""]
    notes.append(f"`python -m claims {name}`, {time.perf_counter() - begin:.0f} s.")
    return rows.report(f"claims-{name}", made, save=options.save, notes=notes)


if __name__ == "__main__":
    sys.exit(main())
