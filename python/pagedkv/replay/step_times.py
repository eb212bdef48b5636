"""How long a step takes, as a sum of what it does: fitted to the steps of a recording, checked on
steps that the fit has not seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagedkv.records import counted
from pagedkv.replay.least_squares import nonnegative_least_squares
from pagedkv.replay.recording import Recording, Step
from pagedkv.replay.work import StepWork

MIN_STEPS = 8
_RUN = 8  # consecutive steps are alike: they are held out together
TERMS = (
    "step",
    "decode row",
    "K/V token read by a decode row",
    "prefill token",
    "prefill (query, key) pair",
    "sampled row",
    "byte copied or swapped",
)


@dataclass(frozen=True, slots=True)
class FitError:
    """Of the predicted times of held-out steps: |predicted / measured - 1| of a step, its median
    and mean over num_steps; and predicted / measured - 1 of their sums.
    """

    median: float
    mean: float
    total: float
    num_steps: int


@dataclass(frozen=True, slots=True)
class StepTimes:
    """seconds of a step: the sum of coefficients_s * counts, over TERMS. gap_s: between one step
    and the next. unseen: terms that no recorded step has, so that their coefficient is no
    measurement. largest: tokens of the largest recorded step.
    """

    coefficients_s: tuple[float, ...]
    gap_s: float
    error: FitError
    unseen: tuple[str, ...]
    largest: int
    bytes_per_block: int

    def seconds(self, work: StepWork) -> float:
        counts = _counts(work, self.bytes_per_block)
        return float(sum(s * n for s, n in zip(self.coefficients_s, counts, strict=True)))


def fit(recording: Recording, bytes_per_block: int) -> StepTimes:
    """Fit the recording's steps, in order: of every four runs of 8 steps the last is held out. What
    is minimised is the sum of squared relative errors, with no coefficient below 0.

    Args:
        bytes_per_block: of the run that is to be timed.

    Raises:
        ValueError: fewer than MIN_STEPS steps took any time.
    """
    steps = [one for one in recording.steps if one.failure is None and one.seconds > 0]
    if len(steps) < MIN_STEPS:
        raise ValueError(
            f"{recording.path} has {counted(len(steps), 'step')} with a time, and step times are "
            f"fitted to at least {MIN_STEPS}: record a longer run"
        )
    recorded_bytes = recording.facts.bytes_per_token * recording.cache.block_size
    counts = np.array([_counts(one.work, recorded_bytes) for one in steps], dtype=np.float64)
    seconds = np.array([one.seconds for one in steps])
    is_held_out = held_out(len(steps))
    coefficients = _fit(counts[~is_held_out], seconds[~is_held_out])
    sums = counts.sum(axis=0).tolist()
    unseen = tuple(name for name, total in zip(TERMS, sums, strict=True) if total == 0)
    if TERMS[-1] in unseen:
        coefficients[-1] = 1 / steps[-1].rates.link_bytes_per_s
    return StepTimes(
        coefficients_s=tuple(coefficients.tolist()),
        gap_s=_gap(recording.steps, {event.num_steps for event in recording.events}),
        error=_error(counts[is_held_out] @ coefficients, seconds[is_held_out]),
        unseen=unseen,
        largest=max(one.work.num_decode_rows + one.work.num_prefill_tokens for one in steps),
        bytes_per_block=bytes_per_block,
    )


def held_out(num_steps: int) -> NDArray[np.bool_]:
    """Which of the steps the fit does not see: about a quarter, at least one."""
    run = _RUN if num_steps >= 8 * _RUN else 1
    is_held_out: NDArray[np.bool_] = np.arange(num_steps) // run % 4 == 3
    return is_held_out


def _fit(counts: NDArray[np.float64], seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    scale = np.maximum(counts.max(axis=0), 1e-12)
    solution = nonnegative_least_squares(counts / scale / seconds[:, None], np.ones_like(seconds))
    coefficients: NDArray[np.float64] = solution / scale
    return coefficients


def _error(predicted: NDArray[np.float64], seconds: NDArray[np.float64]) -> FitError:
    errors = np.abs(predicted / seconds - 1)
    return FitError(
        median=float(np.median(errors)),
        mean=float(errors.mean()),
        total=float(predicted.sum() / seconds.sum() - 1),
        num_steps=errors.size,
    )


def _counts(work: StepWork, bytes_per_block: int) -> tuple[float, ...]:
    """One for each of TERMS."""
    return (
        1,
        work.num_decode_rows,
        work.num_context_tokens,
        work.num_prefill_tokens,
        work.num_prefill_pairs,
        work.num_samples,
        (work.num_copies + work.num_swapped) * bytes_per_block,
    )


def _gap(steps: Sequence[Step], event_places: set[int]) -> float:
    """The median time between two steps with nothing in between; it may be the callers'."""
    gaps = [
        steps[k].start_s - steps[k - 1].end_s for k in range(1, len(steps)) if k not in event_places
    ]
    return max(0.0, float(np.median(gaps))) if gaps else 0.0
