"""Blocks that come back from the CPU move on a stream of their own: whatever is late, no answer
changes."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from small_llama import answers, engine_on

from pagedkv.engine import Engine
from pagedkv.sampling_params import SamplingParams

PARAMS = [SamplingParams(temperature=0, max_tokens=20 + 3 * i, ignore_eos=True) for i in range(10)]
LATE = 20_000_000  # cycles, about 10 ms: many steps of this model


def made_prompts() -> list[list[int]]:
    source = random.Random(9)
    return [[source.randrange(1500) for _ in range(20 + i)] for i in range(10)]


def pressed(device: torch.device, **options: Any) -> Engine:
    return engine_on(
        device,
        num_gpu_blocks_override=20,
        watermark=0.0,
        swap_space=0.02,
        preemption_mode="swap",
        **options,
    )


@pytest.fixture(scope="module")
def right() -> list[list[list[int]]]:
    return answers(engine_on("cpu", num_gpu_blocks_override=200), made_prompts(), PARAMS)


@pytest.mark.parametrize("late", ["nothing", "in", "out", "steps"])
def test_no_answer_changes_whatever_is_late(device, right, monkeypatch, late: str) -> None:
    engine = pressed(device)
    runner = engine._runner
    cache, streams = runner._kv_cache, set()
    swap_in, swap_out, compute = cache.swap_in, cache.swap_out, runner._compute

    def delayed_in(pairs: torch.Tensor) -> None:
        streams.add(torch.cuda.current_stream().cuda_stream)
        if late == "in":
            torch.cuda._sleep(LATE)
        swap_in(pairs)

    def delayed_out(pairs: torch.Tensor) -> None:
        if late == "out":
            torch.cuda._sleep(LATE)
        swap_out(pairs)

    def delayed_compute(*args: Any) -> Any:
        if late == "steps":
            torch.cuda._sleep(LATE // 10)
        return compute(*args)

    monkeypatch.setattr(cache, "swap_in", delayed_in)
    monkeypatch.setattr(cache, "swap_out", delayed_out)
    monkeypatch.setattr(runner, "_compute", delayed_compute)
    assert answers(engine, made_prompts(), PARAMS) == right
    assert streams == {runner._swaps._inward.cuda_stream}
    assert runner._stream.cuda_stream not in streams


def test_without_space_to_swap_there_is_no_stream_for_it(device, right) -> None:
    engine = engine_on(device, num_gpu_blocks_override=20, watermark=0.0)
    assert answers(engine, made_prompts(), PARAMS) == right
    assert engine._runner._swaps._inward is None
