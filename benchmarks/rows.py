"""One row format for every benchmark, and where rows are kept.

A benchmark makes `Row`s, prints them with `report`, and exits with the number of missed thresholds.
With `--save` the table goes to
benchmarks/results/<date>-<name>.md, headed by machine, versions and git revision: the only source
of numbers in README and docs.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement.

    Args:
        name: what was run.
        shape: sizes, in words.
        us: median time in microseconds; 0 where nothing is timed.
        rate: work over time, with its unit ("12.3 GB/s", "450 tok/s"); empty if there is none.
        ceiling_percent: part of the measured ceiling; None if there is none.
        baseline: what the baseline took over what this took (above 1: faster than the baseline).
        limit: threshold in words; empty if none is set.
        holds: whether the threshold holds.
    """

    name: str
    shape: str
    us: float
    rate: str = ""
    ceiling_percent: float | None = None
    baseline: float | None = None
    limit: str = ""
    holds: bool = True


def parser(description: str) -> argparse.ArgumentParser:
    """Argument parser that every benchmark shares."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--save", action="store_true", help="also write the table to results/")
    return made


def median_us(run: Callable[[], object], *, repeats: int = 5, warmup: int = 1) -> float:
    """Median wall time of run() in microseconds."""
    for _ in range(warmup):
        run()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e6


def machine() -> list[str]:
    """Date, processor, versions and revision, a line each."""
    lines = [f"date: {datetime.date.today().isoformat()}", f"cpu: {_cpu()}"]
    lines += [f"python: {platform.python_version()}", *_torch(), f"revision: {_revision()}"]
    return lines


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    names = [
        line.split(":", 1)[1].strip()
        for line in info.read_text().splitlines()
        if "model name" in line
    ]
    return f"{names[0]}, {len(names)} cores" if names else platform.processor()


def _torch() -> list[str]:
    import torch

    lines = [f"torch: {torch.__version__}, {torch.get_num_threads()} threads"]
    if torch.cuda.is_available():
        lines.append(f"gpu: {torch.cuda.get_device_name()}")
    return lines


def _revision() -> str:
    root = Path(__file__).parent
    run = subprocess.run(
        ["git", "-C", str(root), "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode:
        return "no git checkout"
    changed = subprocess.run(
        ["git", "-C", str(root), "status", "--porcelain", "--untracked-files=no"],
        capture_output=True,
        text=True,
        check=False,
    )
    return run.stdout.strip() + (" with local changes" if changed.stdout.strip() else "")


def table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table."""
    lines = [
        "| name | shape | us | rate | % of ceiling | x baseline | limit | holds |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        ceiling = "" if row.ceiling_percent is None else f"{row.ceiling_percent:.0f}"
        baseline = "" if row.baseline is None else f"{row.baseline:.2f}"
        holds = ("yes" if row.holds else "NO") if row.limit else ""
        us = f"{row.us:.4g}" if row.us else ""
        lines.append(
            f"| {row.name} | {row.shape} | {us} | {row.rate} | {ceiling} | {baseline} "
            f"| {row.limit} | {holds} |"
        )
    return "\n".join(lines)


def report(name: str, rows: Sequence[Row], *, save: bool, notes: Sequence[str] = ()) -> int:
    """Print the table (and keep it), and return how many thresholds were missed: the exit code."""
    text = "\n".join([f"# {name}", "", *(f"* {line}" for line in machine()), "", table(rows), ""])
    if notes:
        text += "\n" + "\n".join(notes) + "\n"
    print(text)
    if save:
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"{datetime.date.today().isoformat()}-{name}.md"
        path.write_text(text)
        print(f"saved {path}")
    return sum(1 for row in rows if row.limit and not row.holds)
