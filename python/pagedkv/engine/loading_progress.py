"""How far the loading of weights is: a bar on a terminal, and a line in the log at its end."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

logger = logging.getLogger(__name__)


def shown(
    tensors: Iterable[tuple[str, torch.Tensor]],
    num_tensors: int,
    *,
    console: Console | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[tuple[str, torch.Tensor]]:
    """The same tensors, counted as they pass. console: None: standard error, so that standard
    output stays the caller's; where it is no terminal there is no bar.
    """
    screen = Console(stderr=True) if console is None else console
    begin_s, num_bytes = clock(), 0
    with Progress(
        TextColumn("Loading weights: {task.percentage:3.0f}%"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[rate]:.2f} GB/s"),
        console=screen,
        disable=not screen.is_terminal,
    ) as bar:
        task = bar.add_task("weights", total=num_tensors, rate=0.0)
        for name, tensor in tensors:
            yield name, tensor
            num_bytes += tensor.nbytes
            bar.update(task, advance=1, rate=_rate(num_bytes, clock() - begin_s))
    took_s = clock() - begin_s
    logger.info(
        "%d tensors of %.2f GB in %.2f s: %.2f GB/s",
        num_tensors,
        num_bytes / 1e9,
        took_s,
        _rate(num_bytes, took_s),
    )


def _rate(num_bytes: int, seconds: float) -> float:
    """GB/s."""
    return num_bytes / 1e9 / seconds if seconds > 0 else 0.0
