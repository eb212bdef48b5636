"""Where the time of steps goes: laps of a clock, and intervals of a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from fake_model import make_engine
from harness import GREEDY, run

from pagedkv.engine import benchmarking
from pagedkv.engine.benchmarking import random_prompts, run_offline
from pagedkv.engine.gpu_timeline import (
    Activity,
    SwapSplit,
    busy_and_gaps,
    common_us,
    merged,
    split_of,
)
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


@pytest.mark.parametrize(("num_blocks", "swapped"), [(40, False), (12, True)])
def test_it_is_looked_from_the_first_swap_on_if_there_will_be_one(
    tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch, num_blocks: int, swapped: bool
) -> None:
    engine = make_engine(
        tokenizer_folder,
        block_size=4,
        num_gpu_blocks_override=num_blocks,
        watermark=0.0,
        swap_space=1e-4,
        preemption_mode="swap",
    )
    seen = []

    def recorded(run: Callable[[], object]) -> list[Activity]:
        seen.append((engine.step_split.num_steps, engine.statistics().num_swapped_out > 0))
        run()
        seen.append((engine.step_split.num_steps, engine.statistics().num_swapped_out > 0))
        return [Activity("kernel", 7, 0, 3)]

    monkeypatch.setattr(benchmarking, "record", recorded)
    split = benchmarking.watch_gpu(engine, [[1] * 8, [2] * 8], 5, output_lens=[30, 20])
    assert split.num_steps == 5
    (begin, was_swapped), (end, _) = seen
    assert end - begin == 5
    assert was_swapped == swapped
    # Both prompts in one step and 8 more; or both, and tokens until 13 blocks are wanted.
    assert begin == (18 if swapped else 9)
    assert not engine.has_work


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


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ([], [(0, 1)], 0),
        ([(0, 3), (5, 9)], [(2, 6)], 2),
        ([(0, 10)], [(1, 2), (3, 4), (9, 12)], 3),
        ([(0, 1)], [(1, 2)], 0),
    ],
)
def test_common_time_is_that_of_both(
    one: list[tuple[float, float]], other: list[tuple[float, float]], expected: float
) -> None:
    assert common_us(one, other) == common_us(other, one) == expected


def test_times_that_touch_are_one() -> None:
    assert merged([(5, 6), (1, 3), (0, 2), (3, 4)]) == [(0, 4), (5, 6)]


def test_swaps_are_copies_on_streams_without_kernels() -> None:
    timeline = [
        Activity("kernel a", 7, 0, 10),
        Activity("kernel b", 7, 12, 20),
        Activity("kernel a", 7, 20, 24),
        Activity("Memcpy HtoD (Pinned -> Device)", 7, 10, 11),  # a step's inputs
        Activity("Memcpy DtoH (Device -> Pinned)", 9, 8, 11),
        Activity("Memcpy DtoH (Device -> Pinned)", 9, 10, 14),
        Activity("Memcpy HtoD (Pinned -> Device)", 8, 30, 31),
        Activity("Memcpy DtoD (Device -> Device)", 9, 30, 31),
        Activity("Memset (Device)", 9, 14, 15),
    ]
    split = split_of(timeline, 2)
    assert (split.num_steps, split.busy_s, split.gap_s) == (2, pytest.approx(25e-6), 6e-6)
    assert split.kernels[0] == ("kernel a", pytest.approx(14e-6), 2)
    assert split.swaps == (SwapSplit("out", 2, 6e-6, 4e-6), SwapSplit("in", 1, 1e-6, 0.0))
    assert split_of(timeline[:4], 2).swaps == ()
