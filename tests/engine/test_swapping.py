"""Swapping through the engine: real tensors move, answers stay, rates are measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_model import make_engine
from harness import answer, run

from pagedkv.config import CacheConfig
from pagedkv.engine import Engine
from pagedkv.engine.rate_meter import RateMeter
from pagedkv.engine.swaps import split
from pagedkv.kv_cache import CacheShape, KVCache, num_cpu_blocks_for
from pagedkv.records import PreemptionChoice
from pagedkv.sampling_params import SamplingParams
from pagedkv.scheduler import Rates
from pagedkv.scheduler.cost_model import choose

PARAMS = SamplingParams(temperature=0.9, seed=3, max_tokens=40, ignore_eos=True)
SMALL = {"block_size": 4, "num_gpu_blocks_override": 16, "max_num_seqs": 3, "watermark": 0.0}
ONE_BLOCK = 4 * 2 * 4 / 2**30  # GiB: 4 tokens, K and V, float32


def crowded(folder: Path, **options: Any) -> Engine:
    engine = make_engine(folder, **SMALL, **options)
    for name in "abc":
        engine.add_request(name, name * 8, PARAMS)
    return engine


@pytest.mark.parametrize("num_cpu_blocks", [0, 3, 64])
@pytest.mark.parametrize("mode", ["swap", "recompute", "auto"])
def test_no_way_of_preempting_changes_an_answer(
    tokenizer_folder: Path, mode: str, num_cpu_blocks: int
) -> None:
    engine = crowded(
        tokenizer_folder, preemption_mode=mode, swap_space=num_cpu_blocks * ONE_BLOCK * 1.001
    )
    outputs, _ = run(engine)
    assert sum(one.num_preemptions for one in outputs.values()) > 0
    for name, output in outputs.items():
        alone = answer(tokenizer_folder, name * 8, PARAMS)
        assert output.outputs == alone.outputs
    statistics = engine.statistics()
    assert statistics.num_cpu_blocks == statistics.num_cpu_free == num_cpu_blocks
    assert statistics.num_swapped_out == statistics.num_swapped_in
    if mode == "swap" and num_cpu_blocks == 64:
        assert statistics.num_swapped_out > 0
    if mode == "recompute" or num_cpu_blocks == 0:
        assert statistics.num_swapped_out == 0


def test_a_step_that_fails_before_its_swaps_ran_spoils_no_answer(tokenizer_folder: Path) -> None:
    engine = crowded(tokenizer_folder, preemption_mode="swap", swap_space=1e-3)
    failed = False

    def swap_out(pairs: torch.Tensor) -> None:
        nonlocal failed
        if not failed:
            failed = True
            raise RuntimeError("the link is down")
        KVCache.swap_out(cache, pairs)

    cache = engine._runner._kv_cache
    cache.swap_out = swap_out  # type: ignore[method-assign]
    outputs, _ = run(engine)
    assert failed
    errors = [name for name, one in outputs.items() if one.error]
    assert errors == ["a", "b"]
    assert "the link is down" in str(outputs["a"].error)
    assert outputs["c"].outputs == answer(tokenizer_folder, "c" * 8, PARAMS).outputs


def test_the_rates_are_measured_as_the_engine_runs(tokenizer_folder: Path) -> None:
    engine = crowded(tokenizer_folder, preemption_mode="swap", swap_space=1e-3)
    engine.add_request("long", "x" * 40, SamplingParams(max_tokens=1))
    assert engine._scheduler.rates == Rates()
    run(engine)
    measured, start = engine._scheduler.rates, Rates()
    assert measured.link_bytes_per_s != start.link_bytes_per_s
    assert measured.prefill_tokens_per_s != start.prefill_tokens_per_s


def test_a_first_measurement_replaces_the_starting_value_and_later_ones_weigh_in() -> None:
    meter = RateMeter()
    meter.swapped(0, 1.0)
    meter.prefilled(0, 1.0)
    assert meter.rates == Rates()
    meter.swapped(1000, 0.5)
    meter.prefilled(1000, 1.0)
    assert meter.rates == Rates(link_bytes_per_s=2000.0, prefill_tokens_per_s=1000.0)
    meter.swapped(4000, 0.5)
    assert meter.rates.link_bytes_per_s == 0.75 * 2000 + 0.25 * 8000
    meter.prefilled(2000, 1.0)
    assert meter.rates.prefill_tokens_per_s == 0.75 * 1000 + 0.25 * 2000


def test_steps_of_few_tokens_tell_what_a_step_costs_and_long_ones_the_rate_of_prompts() -> None:
    meter = RateMeter()
    meter.prefilled(31, 0.006)
    assert meter.rates == Rates(step_s=0.006)
    meter.prefilled(64, 0.005)
    assert meter.rates == Rates(step_s=0.005, prefill_tokens_per_s=64 / 0.005)
    meter.prefilled(640, 0.005)  # no longer than with few tokens: the rate is at least this
    fast = 640 / 0.005
    assert meter.rates == Rates(step_s=0.005, prefill_tokens_per_s=fast)
    meter.prefilled(32, 0.007)  # says nothing new
    assert meter.rates == Rates(step_s=0.005, prefill_tokens_per_s=fast)
    meter.prefilled(2000, 0.01)  # as long as two of the shortest: this is the rate
    assert meter.rates == Rates(step_s=0.005, prefill_tokens_per_s=200_000)
    meter.prefilled(1000, 0.01)
    assert meter.rates.prefill_tokens_per_s == 0.75 * 200_000 + 0.25 * 100_000


# Llama-3.1-8B and Qwen3-0.6B on one H200, from benchmarks/results/2026-11-30-claims-swap.md:
# tokens, us to move them out and back in blocks of 16, us to compute them again.
LENGTHS = (16, 64, 256, 512, 1024, 2048, 4096, 8192)
MEASURED = {
    131072: (
        (102, 342, 1323, 2625, 5223, 10440, 20726, 41563),
        (6176, 6683, 8853, 12602, 24736, 48670, 98756, 208644),
    ),
    114688: (
        (90, 301, 1146, 2274, 4536, 9072, 18184, 36311),
        (5575, 5930, 5693, 5713, 5712, 6295, 11518, 27383),
    ),
}


def chosen(length: int, bytes_per_token: int, meter: RateMeter) -> PreemptionChoice:
    """Of "auto", for a victim of this many tokens."""
    return choose(
        "auto",
        num_blocks=length // 16,
        num_cpu_free=length // 16,
        num_tokens=length,
        bytes_per_block=16 * bytes_per_token,
        rates=meter.rates,
    )


@pytest.mark.parametrize("order", [(2, 7, 4, 0), (0, 1, 2, 3, 4, 5, 6, 7), (7, 6, 3), (5, 1)])
@pytest.mark.parametrize("bytes_per_token", MEASURED)
def test_the_automatic_choice_is_the_faster_way(
    bytes_per_token: int, order: tuple[int, ...]
) -> None:
    """order: the steps that the engine has seen, as indices of LENGTHS."""
    swap, recompute = MEASURED[bytes_per_token]
    meter = RateMeter()
    for k in order:
        meter.prefilled(LENGTHS[k], recompute[k] / 1e6)
        meter.swapped(2 * LENGTHS[k] * bytes_per_token, swap[k] / 1e6)
    wrong = []
    for length, swap_us, recompute_us in zip(LENGTHS, swap, recompute, strict=True):
        choice = chosen(length, bytes_per_token, meter)
        if choice.swaps != (swap_us < recompute_us):
            wrong.append(length)
    assert wrong == []


@pytest.mark.parametrize("slower", [1.5, 3.0])
@pytest.mark.parametrize("bytes_per_token", MEASURED)
def test_on_a_machine_that_became_slower_a_choice_costs_less_than_that_factor(
    bytes_per_token: int, slower: float
) -> None:
    swap, recompute = MEASURED[bytes_per_token]
    meter = RateMeter()
    for factor in (1.0, *[slower] * 20):
        for k, length in enumerate(LENGTHS):
            meter.prefilled(length, factor * recompute[k] / 1e6)
            meter.swapped(2 * length * bytes_per_token, swap[k] / 1e6)
    shown = max(LENGTHS[k] / recompute[k] * 1e6 for k in range(len(LENGTHS)))
    assert shown / slower < meter.rates.prefill_tokens_per_s <= shown
    for length, swap_us, fast_us in zip(LENGTHS, swap, recompute, strict=True):
        choice = chosen(length, bytes_per_token, meter)
        costs = (slower * fast_us, swap_us)
        assert costs[choice.swaps] < slower * min(costs)


def test_swap_space_is_counted_in_whole_blocks() -> None:
    shape = CacheShape(num_layers=2, num_kv_heads=4, head_dim=8, dtype=torch.float32)
    block_bytes = 2 * 2 * 4 * 8 * 4 * 16
    config = CacheConfig(swap_space=(3 * block_bytes + 5) / 2**30)
    assert num_cpu_blocks_for(config, shape) == 3
    assert num_cpu_blocks_for(CacheConfig(), shape) == 0
    with pytest.raises(ValueError, match=f"one block of 16 tokens takes {block_bytes} bytes"):
        num_cpu_blocks_for(CacheConfig(swap_space=1e-7), shape)


def test_blocks_go_out_and_come_back_in_every_layer() -> None:
    shape = CacheShape(num_layers=3, num_kv_heads=2, head_dim=4, dtype=torch.float32)
    cache = KVCache(shape, 6, 4, num_cpu_blocks=5)
    cache.tensor.copy_(torch.rand_like(cache.tensor))
    before = cache.tensor.clone()
    cache.cpu_tensor.fill_(torch.nan)
    cache.swap_out(torch.tensor([[4, 0], [1, 3]]))
    cache.tensor[:, :, [1, 4]] = torch.nan
    cache.swap_in(torch.tensor([[0, 1], [3, 4]]))
    assert torch.equal(cache.tensor[:, :, 1], before[:, :, 4])
    assert torch.equal(cache.tensor[:, :, 4], before[:, :, 1])
    assert torch.equal(cache.tensor[:, :, [0, 2, 3, 5]], before[:, :, [0, 2, 3, 5]])
    assert cache.cpu_tensor[:, :, [1, 2, 4]].isnan().all()


def test_explain_gives_records_and_plain_words(tokenizer_folder: Path) -> None:
    engine = crowded(tokenizer_folder, preemption_mode="swap", swap_space=1e-3)
    engine.add_request("two", "x", SamplingParams(n=2, max_tokens=2))
    run(engine)
    (one,) = engine.explain("c")
    kinds = [decision.kind for decision in one.decisions]
    assert kinds[0] == "queued"
    assert {"preempted", "resumed"} <= set(kinds)
    assert kinds[-1] == "finished"
    assert "its blocks move to the CPU (preemption_mode is swap)" in one.text
    assert [answer.request_id for answer in engine.explain("two")] == ["two-0", "two-1"]
    with pytest.raises(KeyError, match="'nobody' is not known"):
        engine.explain("nobody")


def test_what_moves_out_of_touched_blocks_is_told_apart_unless_order_counts() -> None:
    pairs = np.array([[4, 0], [7, 1], [2, 5]])
    first, rest = split(pairs, np.array([2, 4, 9]))
    assert (first.tolist(), rest.tolist()) == ([[4, 0], [2, 5]], [[7, 1]])
    first, rest = split(pairs, np.empty(0, dtype=np.int64))
    assert (len(first), rest.tolist()) == (0, pairs.tolist())
    pairs[1, 1] = 0  # fills what the first pair fills
    first, rest = split(pairs, np.array([2]))
    assert (first.tolist(), len(rest)) == (pairs.tolist(), 0)
