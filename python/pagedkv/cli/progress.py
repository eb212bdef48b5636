"""The bar of a command that runs many requests and prints nothing until they have ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(words: str, total: int) -> Iterator[Callable[[], None]]:
    """On standard error, where that is a terminal, so that standard output stays the caller's.
    Within it, each call of what it gives counts one. It is drawn twice a second only: what runs
    meanwhile may be a measurement.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    screen = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=screen,
        disable=not screen.is_terminal,
        refresh_per_second=2,
    ) as bar:
        task = bar.add_task(words, total=total)
        yield lambda: bar.advance(task)
