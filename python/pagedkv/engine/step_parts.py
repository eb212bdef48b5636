"""A step in parts, for when the memory of a device does not suffice for all its rows at once: parts
of its rows as steps of their own, and their results as those of the whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from pagedkv.records import ScheduledStep, no_pairs
from pagedkv.sampling import TokenScores

T = TypeVar("T")


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether it tells that the device's memory does not suffice. Not all of torch's errors that do
    are an OutOfMemoryError: those of the CUDA runtime, as when a kernel is loaded for its first
    launch, of cuBLAS and of ops that take a workspace say it in words.
    """
    words = str(error).lower()
    return (
        isinstance(error, torch.OutOfMemoryError)
        or "out of memory" in words
        or "alloc_failed" in words
    )


class Part(NamedTuple):
    """Rows [begin, end) of a step."""

    begin: int
    end: int


def part_of(step: ScheduledStep, part: Part) -> ScheduledStep:
    """These rows as a step. It moves no blocks and admits nobody: that was done for the whole."""
    rows = slice(part.begin, part.end)
    samples = samples_of(step, part)
    return dataclasses.replace(
        step,
        slots=step.slots[rows],
        seq_ids=step.seq_ids[rows],
        query_lens=step.query_lens[rows],
        sample_rows=step.sample_rows[samples] - part.begin,
        sample_draws=step.sample_draws[samples],
        num_tokens=int(step.query_lens[rows].sum()),
        copies=no_pairs(),
        swap_out=no_pairs(),
        swap_in=no_pairs(),
        admitted=(),
        forked=(),
        preempted=(),
    )


def run_in_parts(
    step: ScheduledStep, run: Callable[[ScheduledStep], T | None]
) -> tuple[list[tuple[Part, T]], list[int]]:
    """Run all rows, of what does not fit one half after the other, down to single rows.

    Args:
        run: None where memory does not suffice.

    Returns:
        the parts that ran with their results, in the order of rows, and the rows that do not fit
        even alone.
    """
    waiting, done, unfit = [Part(0, step.slots.size)], [], []
    while waiting:
        part = waiting.pop()
        result = run(part_of(step, part))
        if result is not None:
            done.append((part, result))
        elif part.end - part.begin == 1:
            unfit.append(part.begin)
        else:
            middle = _middle(step, part)
            waiting += [Part(middle, part.end), Part(part.begin, middle)]
    return done, unfit


def _middle(step: ScheduledStep, part: Part) -> int:
    """Where about as many tokens lie before as behind, and a row at least on each side."""
    ends = np.cumsum(step.query_lens[part.begin : part.end])
    at = int(np.searchsorted(ends, ends[-1] / 2)) + 1
    return part.begin + min(max(at, 1), part.end - part.begin - 1)


def samples_of(step: ScheduledStep, part: Part) -> NDArray[np.int64]:
    """Indices of the step's samples that belong to these rows."""
    return np.flatnonzero((step.sample_rows >= part.begin) & (step.sample_rows < part.end))


def join_samples(
    step: ScheduledStep, parts: Sequence[tuple[Part, torch.Tensor]], *, nothing: float = 0
) -> torch.Tensor:
    """[num_samples, ...] of the whole, from those of its parts; of no part: int64 [num_samples].
    nothing: what stands for samples of rows that did not run.
    """
    like = parts[0][1] if parts else torch.empty(0, dtype=torch.int64)
    joined = like.new_full((step.sample_rows.size, *like.shape[1:]), nothing)
    for part, one in parts:
        joined[torch.from_numpy(samples_of(step, part))] = one
    return joined


def join_scores(
    parts: Sequence[tuple[Part, Sequence[tuple[TokenScores, int]]]],
) -> list[tuple[TokenScores, int]]:
    """Scores of tokens of prompts, by rows of the whole."""
    return [
        (scores._replace(rows=scores.rows + part.begin), first)
        for part, found in parts
        for scores, first in found
    ]
