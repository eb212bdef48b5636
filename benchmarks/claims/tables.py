"""Saved tables read back, so that figures and the page are made of rows and of nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import rows

_NUMBER = r"-?[\d,]+(?:\.\d+)?"


def read(path: Path) -> list[rows.Row]:
    """The rows of a saved table."""
    found = []
    for line in path.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.startswith("| ") or len(cells) != 8 or cells[0] in ("name", "---"):
            continue
        name, shape, us, rate, ceiling, baseline, limit, holds = cells
        found.append(
            rows.Row(
                name,
                shape,
                float(us or 0),
                rate,
                float(ceiling) if ceiling else None,
                float(baseline) if baseline else None,
                limit,
                holds != "NO",
            )
        )
    return found


def newest(name: str, folder: Path = rows.RESULTS) -> Path:
    """The newest table that was saved under this name.

    Raises FileNotFoundError: none was.
    """
    paths = sorted(folder.glob(f"????-??-??-{name}.md"))
    if not paths:
        short = name.removeprefix("claims-")
        raise FileNotFoundError(f"no table {name} in {folder}: run python -m claims {short} --save")
    return paths[-1]


def value(row: rows.Row, word: str) -> float:
    """The number before or behind a word in the row's rate.

    Example: rate "wasted 78.8 %, 32.0 sequences": value(row, "wasted") is 78.8, "sequences" 32.
    """
    found = re.search(rf"\b{re.escape(word)} ({_NUMBER})", row.rate)
    found = found or re.search(rf"({_NUMBER}) (?:% |us |ms |s )?{re.escape(word)}", row.rate)
    if found is None:
        raise ValueError(f"{row.name}, {row.shape}: no {word!r} in {row.rate!r}")
    return float(found[1].replace(",", ""))


def series(row: rows.Row) -> list[float]:
    """The numbers behind the colon of a row that has a series."""
    return [float(one) for one in row.rate.split(":", 1)[1].split()]


def select(table: list[rows.Row], *, name: str = "", shape: str = "") -> list[rows.Row]:
    """Rows whose name and shape begin like this, in order."""
    return [row for row in table if row.name.startswith(name) and row.shape.startswith(shape)]
