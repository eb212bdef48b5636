"""Plots as SVG files that come out the same each time: text stays text, ids are hashed with a fixed
salt, no date. Each is drawn from the rows of a saved table.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "figures"
COLORS = {
    "paged": "#0b6e4f",
    "contiguous, oracle": "#4a7fb5",
    "contiguous, pow2": "#8e6bb0",
    "contiguous, max": "#c8553d",
    "contiguous, max, static": "#7a4a36",
}
_STYLE = {
    "svg.hashsalt": "pagedkv",
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "legend.frameon": False,
}


def axes(
    num_rows: int, num_columns: int, *, size: tuple[float, float]
) -> tuple[Figure, list[Axes]]:
    """An empty figure of size inches."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.use("svg")
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=size, layout="constrained")
        made = figure.subplots(num_rows, num_columns, squeeze=False)
    return figure, list(made.ravel())


def save(figure: Figure, name: str, folder: Path = FOLDER) -> Path:
    import matplotlib as mpl

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.svg"
    with mpl.rc_context(_STYLE):
        figure.savefig(path, metadata={"Date": None, "Creator": None})
    # A trailing space at the end of a line is all that git would complain about.
    lines = [line.rstrip() for line in path.read_text().splitlines()]
    path.write_text("\n".join(lines) + "\n")
    return path
