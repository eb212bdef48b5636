"""Step times fitted to a recording, and their error on steps that the fit has not seen."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from recorded_runs import RecordedRun

from pagedkv.replay import Recording
from pagedkv.replay.least_squares import nonnegative_least_squares
from pagedkv.replay.step_times import MIN_STEPS, TERMS, fit, held_out
from pagedkv.replay.work import StepWork
from pagedkv.sampling_params import SamplingParams


@pytest.fixture(scope="module")
def recording(tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """Steps of 4 ms and 0.5 ms a token."""
    path = tmp_path_factory.mktemp("fit") / "run.jsonl"
    run = RecordedRun(tokenizer_folder, path, num_gpu_blocks_override=400, max_num_seqs=16)
    rng = np.random.default_rng(0)
    for i in range(24):
        params = SamplingParams(max_tokens=int(rng.integers(1, 30)), ignore_eos=True)
        run.engine.add_request(str(i), "x" * int(rng.integers(1, 60)), params)
        run.engine.step()
    return run.recording()


def test_a_linear_machine_is_found_exactly(recording: Recording) -> None:
    times = fit(recording, 8 * 4)
    assert max(times.error.median, times.error.mean, abs(times.error.total)) < 0.001
    assert 8 <= times.error.num_steps < len(recording.steps) / 3
    for step in recording.steps:
        assert times.seconds(step.work) == pytest.approx(step.seconds, rel=0.001)
    assert times.largest == 24
    assert times.gap_s == 0
    unlike = StepWork(10, 300, 1, 20, 210, 11, 0, 0)
    assert times.seconds(unlike) == pytest.approx(0.004 + 30 * 0.0005, rel=0.02)


def test_held_out_steps_are_not_fitted_but_tell_the_error(recording: Recording) -> None:
    is_held_out = held_out(len(recording.steps))
    twice = [
        dataclasses.replace(step, seconds=step.seconds * 2) if out else step
        for step, out in zip(recording.steps, is_held_out, strict=True)
    ]
    changed = fit(dataclasses.replace(recording, steps=twice), 32)
    assert changed.coefficients_s == fit(recording, 32).coefficients_s
    assert changed.error.mean == pytest.approx(0.5, rel=0.01)
    assert changed.error.total == pytest.approx(-0.5, rel=0.01)


def test_runs_of_steps_are_held_out_together() -> None:
    assert held_out(64).nonzero()[0].tolist() == [*range(24, 32), *range(56, 64)]
    assert held_out(9).nonzero()[0].tolist() == [3, 7]
    assert held_out(MIN_STEPS).any()


def test_what_no_step_did_is_said_and_swaps_take_the_link_rate(recording: Recording) -> None:
    times = fit(recording, 10**6)
    assert times.unseen == (TERMS[-1],)
    link = recording.steps[-1].rates.link_bytes_per_s
    work = StepWork(1, 10, 0, 0, 0, 1, 0, 0)
    swapping = dataclasses.replace(work, num_swapped=3, num_copies=2)
    extra_s = times.seconds(swapping) - times.seconds(work)
    assert extra_s == pytest.approx(5 * 10**6 / link)


def test_steps_that_failed_or_took_no_time_are_left_out(recording: Recording) -> None:
    few = [dataclasses.replace(step, seconds=0.0) for step in recording.steps[:-7]]
    few += recording.steps[-7:]
    with pytest.raises(ValueError, match="has 7 steps with a time, and step times are fitted to"):
        fit(dataclasses.replace(recording, steps=few), 32)
    failed = [dataclasses.replace(step, seconds=99.0, failure="x") for step in recording.steps[:9]]
    assert (
        fit(dataclasses.replace(recording, steps=failed + recording.steps[9:]), 32).error.mean < 0.1
    )


def test_the_gap_between_steps_is_the_callers_where_nothing_happened(recording: Recording) -> None:
    later = [
        dataclasses.replace(step, start_s=step.start_s + 0.25 * k)
        for k, step in enumerate(recording.steps)
    ]
    times = fit(dataclasses.replace(recording, steps=later), 32)
    assert times.gap_s == pytest.approx(0.25)


@pytest.mark.parametrize("seed", range(40))
def test_least_squares_meet_their_conditions(seed: int) -> None:
    """x >= 0, no gradient where x > 0, and none that falls where x = 0: these make it the best."""
    rng = np.random.default_rng(seed)
    matrix = rng.normal(size=(30, 6))
    matrix[:, 5] = matrix[:, 4] * (seed % 3)  # columns that depend on each other, or are 0
    target = rng.normal(size=30)
    solution = nonnegative_least_squares(matrix, target)
    gradient = matrix.T @ (matrix @ solution - target)
    assert (solution >= 0).all()
    assert np.abs(gradient[solution > 0]).max(initial=0) < 1e-8
    assert gradient[solution == 0].min(initial=0) > -1e-8


def test_least_squares_by_hand() -> None:
    columns = np.array([[1.0, 1.0], [1.0, -1.0]])
    assert nonnegative_least_squares(columns, np.array([3.0, 5.0])) == pytest.approx([4.0, 0.0])
    assert nonnegative_least_squares(columns, np.array([-1.0, -1.0])).tolist() == [0.0, 0.0]
    assert nonnegative_least_squares(np.zeros((2, 2)), np.ones(2)).tolist() == [0.0, 0.0]
