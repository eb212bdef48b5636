"""What RunMetrics counts of a run, by an engine's clock that a test turns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_model import load_fake
from harness import fake_of

from pagedkv.config import EngineConfig
from pagedkv.engine import Engine, RunMetrics
from pagedkv.engine.histogram import Histogram
from pagedkv.sampling_params import SamplingParams

Made = tuple[Engine, RunMetrics]


@pytest.fixture
def make(tokenizer_folder: Path) -> Callable[..., Made]:
    """An engine whose steps take one second each: the clock goes on when the model runs."""

    def call(**options: Any) -> Made:
        now = [0.0]
        config = EngineConfig.from_options("fake", **options)
        engine = Engine(load_fake(tokenizer_folder, config), config, clock=lambda: now[0])

        def pass_time(input_ids: Any) -> None:
            now[0] += 1

        fake_of(engine).before_step = pass_time
        return engine, RunMetrics(engine)

    return call


def params(num_tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, ignore_eos=True, **options)


def run(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


def sums(metrics: RunMetrics) -> dict[str, tuple[int, float]]:
    """name -> (number, sum) of each histogram."""
    histograms = metrics.snapshot().histograms
    return {name: (one.num_values, one.sum) for name, one in histograms.items()}


def test_times_of_two_requests_one_behind_the_other(make: Any) -> None:
    engine, metrics = make(max_num_seqs=1)
    engine.add_request("a", "hello", params(4))
    engine.add_request("b", "hi", params(2))
    run(engine)
    found = sums(metrics)
    assert found["request_queue_time_seconds"] == (2, 0 + 4)
    assert found["time_to_first_token_seconds"] == (2, 1 + 5)
    assert found["inter_token_latency_seconds"] == (3 + 1, 3 + 1)
    assert found["e2e_request_latency_seconds"] == (2, 4 + 6)
    assert found["request_prompt_tokens"] == (2, 5 + 2)
    assert found["request_generation_tokens"] == (2, 4 + 2)
    assert found["iteration_tokens_total"] == (6, 5 + 3 + 2 + 1)
    snapshot = metrics.snapshot()
    assert snapshot.num_prompt_tokens == 7
    assert snapshot.num_generation_tokens == 6
    assert snapshot.num_finished == {"stop": 0, "length": 2, "abort": 0, "error": 0}
    assert not metrics._timings


def test_answers_of_a_group_have_one_first_token_and_an_end_each(make: Any) -> None:
    engine, metrics = make()
    engine.add_request("a", "hello", params(5, n=3))
    run(engine)
    found = sums(metrics)
    assert found["time_to_first_token_seconds"] == (1, 1)
    assert found["request_queue_time_seconds"] == (1, 0)
    assert found["inter_token_latency_seconds"] == (3 * 4, 12)
    assert found["e2e_request_latency_seconds"] == (3, 15)
    assert metrics.snapshot().num_generation_tokens == 15
    assert not metrics._timings


@pytest.mark.parametrize("pipelined", [True, False])
def test_preempted_requests_have_each_token_once(make: Any, pipelined: bool) -> None:
    engine, metrics = make(
        num_gpu_blocks_override=8, block_size=4, watermark=0.0, async_scheduling=pipelined
    )
    for name in ("hello", "world", "again"):
        engine.add_request(name, name, params(12))
    run(engine)
    found, snapshot = sums(metrics), metrics.snapshot()
    assert snapshot.num_preemptions > 0
    assert found["time_to_first_token_seconds"][0] == 3
    assert found["request_queue_time_seconds"][0] == 3
    assert snapshot.num_prompt_tokens == 15
    if not pipelined:  # a step ahead of an end has a row too many
        assert snapshot.num_generation_tokens == 36
        assert found["inter_token_latency_seconds"][0] == 33
    assert found["request_generation_tokens"] == (3, 36)
    assert not metrics._timings
    assert not metrics._kept_s


def test_aborts_failures_and_beams_leave_nothing_remembered(make: Any) -> None:
    engine, metrics = make()
    engine.add_request("aborted", "hello", params(50, n=2))
    engine.add_request("waits", "hello", params(50))
    engine.abort("waits")
    engine.step()
    engine.abort("aborted")
    engine.add_request("beams", "hello", params(5, beam_width=3, n=2, temperature=0))
    run(engine)
    engine.add_request("parent", "hello", params(9))
    engine.step()
    engine.fork("parent", 2)
    run(engine)
    fake_of(engine).is_bad = lambda context: True
    engine.add_request("fails", "hello", params(5))
    run(engine)

    def broken(input_ids: Any) -> None:
        raise RuntimeError("a fault")

    fake_of(engine).before_step = broken
    engine.add_request("fails too", "hello", params(5))
    run(engine)
    assert metrics.snapshot().num_finished == {"stop": 0, "length": 2 + 3, "abort": 3, "error": 2}
    assert not metrics._timings
    assert not metrics._kept_s


def test_a_snapshot_does_not_change(make: Any) -> None:
    engine, metrics = make()
    engine.add_request("a", "hello", params(4))
    engine.step()
    before = metrics.snapshot()
    assert before.num_running == 1
    run(engine)
    assert before.num_running == 1
    assert before.num_generation_tokens == 1
    assert before.histograms["iteration_tokens_total"].num_values == 1


def test_values_on_a_bound_belong_below_it() -> None:
    histogram = Histogram([1.0, 2.0])
    histogram.observe(np.array([0.5, 1.0, 1.5, 2.0, 99.0]))
    histogram.observe([])
    histogram.observe(2.5)
    counts = histogram.counts()
    assert counts.counts.tolist() == [2, 2, 2]
    assert counts.sum == pytest.approx(106.5)
