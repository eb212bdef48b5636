"""Blocks that move to the CPU and back do so on streams of their own, beside steps: whatever is
late, no answer changes."""

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
    cache, streams_in, streams_out = runner._kv_cache, set(), set()
    swap_in, swap_out, compute = cache.swap_in, cache.swap_out, runner._compute

    def delayed_in(pairs: torch.Tensor) -> None:
        streams_in.add(torch.cuda.current_stream().cuda_stream)
        if late == "in":
            torch.cuda._sleep(LATE)
        swap_in(pairs)

    def delayed_out(pairs: torch.Tensor) -> None:
        streams_out.add(torch.cuda.current_stream().cuda_stream)
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
    assert streams_in == {runner._swaps._inward.cuda_stream}
    assert streams_out == {runner._swaps._outward.cuda_stream}
    assert runner._stream.cuda_stream not in streams_in | streams_out


def test_without_space_to_swap_there_is_no_stream_for_it(device, right) -> None:
    engine = engine_on(device, num_gpu_blocks_override=20, watermark=0.0)
    assert answers(engine, made_prompts(), PARAMS) == right
    assert engine._runner._swaps._inward is engine._runner._swaps._outward is None


def test_a_step_waits_only_for_those_that_move_out_of_blocks_it_writes(device, monkeypatch) -> None:
    """What moves is held for many times as long as a step takes, but for blocks that it writes."""
    engine = engine_on(
        device,
        num_gpu_blocks_override=24,
        max_num_seqs=4,
        watermark=0.0,
        swap_space=0.02,
        preemption_mode="swap",
    )
    runner = engine._runner
    cache, moved = runner._kv_cache, []
    swap_out, launch = cache.swap_out, runner.launch

    def held_out(pairs: torch.Tensor) -> None:
        written = set(runner._inputs.written_blocks(running[-1]).tolist())
        is_written = [block in written for block in pairs[:, 0].tolist()]
        moved.append((len(running), is_written))
        if not any(is_written):
            torch.cuda._sleep(LATE * 10)
        swap_out(pairs)

    def launched(step: Any, token_ids: Any) -> Any:
        running.append(step)
        return launch(step, token_ids)

    running: list[Any] = []
    monkeypatch.setattr(cache, "swap_out", held_out)
    monkeypatch.setattr(runner, "launch", launched)
    params = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
    for i, prompt in enumerate(made_prompts()[:4]):
        engine.add_request(str(i), prompt, params)
    while not any(not any(is_written) for _, is_written in moved):
        engine.step()
    assert not runner._swaps._last_out.query()  # yet the step has told its tokens
    assert engine._loop.times.split.num_steps >= len(running) - 1
    assert all(all(is_written) or not any(is_written) for _, is_written in moved)
    while engine.has_work:
        assert all(one.error is None for one in engine.step().finished)
