"""`pagedkv bench` on the fake model: what it counts, prints and refuses."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from pagedkv.cli.bench import print_gpu
from pagedkv.engine.gpu_timeline import GpuSplit, SwapSplit

SMALL = [
    "--num-prompts",
    "3",
    "--input-len",
    "10",
    "--output-len",
    "6",
    "--num-gpu-blocks-override",
]


def test_tokens_and_rates_are_printed(run: Any, fakes: Any) -> None:
    result = run("bench", "fake", *SMALL, "20")
    assert result.code == 0, result.err
    assert "3 requests, 30 tokens of prompts and 18 of answers in " in result.out
    assert re.search(r"[\d.]+ tok/s out, [\d.]+ tok/s in all, [\d.]+ requests/s", result.out)
    assert "schedule" not in result.out
    # The first run, of 4 tokens each, is not counted: 4 steps, then 6.
    assert fakes[0].num_steps == 10


def test_a_profile_says_where_the_time_of_steps_goes(run: Any) -> None:
    result = run("bench", "fake", *SMALL, "20", "--profile", "4")
    found = re.search(
        r"6 steps of ([\d.]+) ms: schedule ([\d.]+), launch ([\d.]+), wait ([\d.]+), "
        r"update ([\d.]+), else ([\d.]+) ms",
        result.out,
    )
    assert found is not None, result.out
    whole, *parts = map(float, found.groups())
    assert sum(parts) == pytest.approx(whole, abs=0.01)
    assert "GPU" not in result.out


def test_what_a_gpu_did_is_told_for_each_step(capsys: pytest.CaptureFixture[str]) -> None:
    swaps = (SwapSplit("out", 4, 0.004, 0.003),)
    print_gpu(GpuSplit(2, 0.01, 0.002, (("a", 0.006, 4), ("b", 0.004, 2)), swaps))
    assert capsys.readouterr().out.splitlines() == [
        "GPU, 2 steps: busy 5000 us, gaps 1000 us a step",
        "swaps out: 2000 us a step in 4 copies, 75 % of it beside kernels",
        "   3000.0 us    2.0 x a",
        "   2000.0 us    1.0 x b",
    ]


def test_json_has_the_same_for_programs(run: Any) -> None:
    found = json.loads(run("bench", "fake", *SMALL, "20", "--json").out)
    assert (found["num_requests"], found["num_prompt_tokens"]) == (3, 30)
    assert found["num_answer_tokens"] == 18
    assert found["output_tokens_per_s"] == pytest.approx(18 / found["seconds"])
    assert found["split"]["num_steps"] == 6
    assert found["gpu"] is None


def test_preemptions_are_counted(run: Any) -> None:
    found = json.loads(
        run("bench", "fake", *SMALL, "7", "--block-size", "4", "--num-prompts", "2", "--json").out
    )
    assert found["num_preemptions"] > 0
    assert found["num_answer_tokens"] == 12


def test_what_can_never_run_is_refused_in_words(run: Any) -> None:
    result = run("bench", "fake", *SMALL, "1", "--block-size", "4")
    assert result.code == 1
    assert "can never run" in result.err
    assert run("bench", "fake", "--num-prompts", "0").code == 2
