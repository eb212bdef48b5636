"""The engine on a GPU answers as the engine on the CPU does, in fp32 token for token: the same
model, batches, chunks, prefixes, swaps and draws."""

from __future__ import annotations

import logging
import random

import numpy as np
import pytest
import torch
from small_llama import CONFIG, answers, engine_on

from pagedkv.engine.device import resolve_device
from pagedkv.models import random_model
from pagedkv.sampling import RowTensors, SlotParams, choose, uniform
from pagedkv.sampling_params import SamplingParams
from pagedkv.scheduler import Rates

GREEDY = SamplingParams(temperature=0, max_tokens=24)
POOL = {"num_gpu_blocks_override": 200}
# Options under which no answer may change.
PRESSURES = {
    "one batch": POOL,
    "chunks": {**POOL, "max_num_batched_tokens": 16, "max_num_seqs": 12},
    "one at a time": {**POOL, "max_num_seqs": 1},
    "swapped": {
        "num_gpu_blocks_override": 18,
        "watermark": 0.0,
        "swap_space": 0.02,
        "preemption_mode": "swap",
    },
    "computed again": {"num_gpu_blocks_override": 18, "watermark": 0.0},
    "block of 128": {"num_gpu_blocks_override": 40, "block_size": 128},
}


def made_prompts() -> list[list[int]]:
    source = random.Random(3)
    shared = [source.randrange(1500) for _ in range(40)]
    prompts = [[source.randrange(1500) for _ in range(length)] for length in (1, 2, 15, 16, 17, 90)]
    return [*prompts, shared, [*shared, 5, 6], [*shared, 7], shared[:33]]


@pytest.fixture(scope="module")
def on_cpu() -> list[list[list[int]]]:
    return answers(engine_on("cpu", **POOL), made_prompts(), GREEDY)


@pytest.mark.parametrize("name", PRESSURES)
def test_greedy_answers_are_those_of_the_cpu(device, on_cpu, name: str) -> None:
    engine = engine_on(device, **PRESSURES[name])
    assert answers(engine, made_prompts(), GREEDY) == on_cpu
    again = answers(engine, made_prompts(), GREEDY)  # from the prefix cache
    assert again == on_cpu
    assert len({tuple(one[0]) for one in on_cpu}) == len(on_cpu)
    was_swapped = engine._runner.meter.rates.link_bytes_per_s != Rates().link_bytes_per_s
    assert was_swapped == (name == "swapped")


def test_seeded_answers_are_those_of_the_cpu(device) -> None:
    params = [
        SamplingParams(
            temperature=0.4 + 0.2 * i, top_k=(0, 20)[i % 2], top_p=(1.0, 0.9)[i % 3 > 1], seed=i,
            max_tokens=20,
        )
        for i in range(10)
    ]  # fmt: skip
    right = answers(engine_on("cpu", **POOL), made_prompts(), params)
    assert answers(engine_on(device, **POOL), made_prompts(), params) == right


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(n=2, best_of=3, seed=4, max_tokens=8),
        SamplingParams(temperature=0, beam_width=3, n=3, max_tokens=8),
    ],
    ids=["best_of", "beams"],
)
def test_several_answers_are_those_of_the_cpu(device, params: SamplingParams) -> None:
    prompts = made_prompts()[3:7]
    right = answers(engine_on("cpu", **POOL), prompts, params)
    assert answers(engine_on(device, **POOL), prompts, params) == right


def test_choosing_on_the_gpu_is_choosing_on_the_cpu(device) -> None:
    rows = 64
    params = SlotParams(rows)
    for i in range(rows):
        one = SamplingParams(
            temperature=(0.0, 0.7, 1.3)[i % 3], top_k=(0, 40, 7)[i % 5 % 3], top_p=1 - i % 4 / 5
        )
        params.set(i, one, seed=i)
    logits = torch.from_numpy(np.random.default_rng(0).normal(size=(rows, 32_000)) * 4).float()
    logits[5, 7], logits[6] = torch.nan, -torch.inf
    temperature = params.temperature
    inverse = np.divide(1.0, temperature, out=np.zeros(rows), where=temperature > 0)
    numbers = uniform(params.seeds, np.arange(rows))
    tensors = [
        torch.from_numpy(one)
        for one in (inverse.astype(np.float32), params.top_k, params.top_p, numbers)
    ]
    right = choose(logits, RowTensors(*tensors), params)
    there = RowTensors(*(one.to(device) for one in tensors))
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = choose(logits.to(device, non_blocking=True), there, params)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert got.cpu().tolist() == right.tolist()
    assert right[5] == right[6] == -1


def test_the_pool_takes_what_utilization_leaves(device, caplog) -> None:
    _, total = torch.cuda.mem_get_info(device)
    before = total - torch.cuda.mem_get_info(device)[0]
    utilization = before / total + 0.05
    with caplog.at_level(logging.INFO):
        engine = engine_on(device, "bfloat16", gpu_memory_utilization=utilization)
    assert "Maximum concurrency for 512 tokens per request: " in caplog.text
    answers(engine, made_prompts(), GREEDY)
    free, _ = torch.cuda.mem_get_info(device)
    assert utilization - 0.01 <= (total - free) / total <= utilization


def test_no_room_for_a_pool_is_refused_in_words(device) -> None:
    with pytest.raises(ValueError, match="gpu_memory_utilization is 1e-06, which leaves 0 bytes"):
        engine_on(device, gpu_memory_utilization=1e-6)


def test_a_pool_that_is_sized_needs_no_profile(device) -> None:
    engine = engine_on(device, kv_cache_memory_bytes=2**24)
    assert engine.statistics().num_blocks == 2**24 // (3 * 2 * 2 * 64 * 4 * 16)


def test_the_device_is_the_gpu_where_there_is_one(device) -> None:
    assert resolve_device("auto") == resolve_device("cuda") == device
    count = torch.cuda.device_count()
    with pytest.raises(ValueError, match=f"device is 'cuda:{count}', but torch .* finds {count}"):
        resolve_device(f"cuda:{count}")


def test_random_weights_are_the_same_each_time(device) -> None:
    def logits() -> torch.Tensor:
        model = random_model(CONFIG, dtype=torch.bfloat16, device=device)
        return model.compute_logits(torch.ones(1, 256, dtype=torch.bfloat16, device=device))

    first = logits()
    assert first.std() > 0
    assert torch.equal(first, logits())
