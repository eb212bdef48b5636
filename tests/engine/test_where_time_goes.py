"""Where the time of steps goes: laps of a clock, and intervals of a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_model import make_engine
from harness import GREEDY, run

from pagedkv.engine.benchmarking import busy_and_gaps, random_prompts, run_offline
from pagedkv.engine.step_times import StepSplit, StepTimes


def test_laps_add_up_by_part() -> None:
    times = StepTimes(clock=iter([0.0, 1.0, 3.0, 10.0, 14.0, 22.0, 30.0, 30.5]).__next__)
    times.start()
    times.lap("schedule")
    times.lap("launch")
    times.start()
    times.lap("wait")
    times.lap("update")
    first = times.split
    assert first == StepSplit(1, schedule_s=1, launch_s=2, wait_s=4, update_s=8)
    assert first.total_s == 15
    times.start()
    times.lap("schedule")
    assert times.split.since(first) == StepSplit(0, schedule_s=0.5)
    with pytest.raises(KeyError):
        StepTimes().lap("other")


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_an_engine_counts_each_step_once(tokenizer_folder: Path, async_scheduling: bool) -> None:
    engine = make_engine(tokenizer_folder, async_scheduling=async_scheduling)
    assert engine.step_split == StepSplit()
    engine.add_request("a", "hello", GREEDY)
    output = run(engine)[0]["a"].outputs[0]
    split = engine.step_split
    assert len(output.token_ids) <= split.num_steps <= len(output.token_ids) + 1
    assert min(split.schedule_s, split.launch_s, split.wait_s, split.update_s) > 0


def test_a_failed_request_ends_the_measurement(tokenizer_folder: Path) -> None:
    engine = make_engine(tokenizer_folder)
    engine._runner._model.is_bad = lambda context: True  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="a request failed: the model produced NaN"):
        run_offline(engine, [[1, 2]], 4)


def test_prompts_are_the_same_each_time() -> None:
    prompts = random_prompts(3, 5, 7)
    assert prompts == random_prompts(3, 5, 7) != random_prompts(3, 5, 7, seed=1)
    assert [len(one) for one in prompts] == [5, 5, 5]
    assert {token for one in prompts for token in one} <= set(range(7))


@pytest.mark.parametrize(
    ("intervals", "expected"),
    [
        ([], (0, 0)),
        ([(3, 5)], (2, 0)),
        ([(0, 2), (1, 3), (5, 6)], (4, 2)),
        ([(5, 6), (0, 2), (1, 3)], (4, 2)),
        ([(0, 10), (2, 3), (4, 5), (12, 13)], (11, 2)),
        ([(0, 1), (1, 2)], (2, 0)),
    ],
)
def test_busy_time_is_that_of_at_least_one_interval(
    intervals: list[tuple[float, float]], expected: tuple[float, float]
) -> None:
    assert busy_and_gaps(intervals) == expected
