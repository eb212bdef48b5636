"""python -m claims [names] [--quick] [--save] [--figures]: measures the claims, prints their tables
and keeps them in benchmarks/results; draws the figures from the newest tables kept there.
"""

from __future__ import annotations

import argparse
import sys
import time

import rows
from claims import figures, measure_waste, tables

CLAIMS = {"waste": measure_waste}


def main(given: list[str] | None = None) -> int:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("names", nargs="*", help=f"of {', '.join(CLAIMS)}; none: all")
    arguments.add_argument("--quick", action="store_true", help="small, for a look")
    arguments.add_argument("--save", action="store_true", help="keep the tables in results/")
    arguments.add_argument("--figures", action="store_true", help="only draw, from kept tables")
    options = arguments.parse_args(given)
    names = options.names or list(CLAIMS)
    unknown = [name for name in names if name not in CLAIMS]
    if unknown:
        arguments.error(f"unknown claims {unknown}: there are {', '.join(CLAIMS)}")
    missed = 0
    for name in names:
        claim = CLAIMS[name]
        if not options.figures:
            begin = time.perf_counter()
            made = claim.measure(quick=options.quick)
            notes = [*claim.__doc__.strip().splitlines(), ""] if claim.__doc__ else []
            notes.append(f"`python -m claims {name}`, {time.perf_counter() - begin:.0f} s.")
            missed += rows.report(f"claims-{name}", made, save=options.save, notes=notes)
        if options.save or options.figures:
            table = tables.read(tables.newest(f"claims-{name}"))
            print(f"drawn {figures.save(claim.draw(table), name)}")
    print(f"{missed} expectations do not hold: docs/paged-attention.md says which, and why")
    return 0


if __name__ == "__main__":
    sys.exit(main())
