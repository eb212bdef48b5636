"""What a plan says: its memory is the engine's own prediction and, on a CPU, what the engine then
allocates to the block; what fits, how long it may be, and what other choices would change."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from planned_models import BYTES_PER_TOKEN, LLAMA, plan_of

from pagedkv.config import EngineConfig
from pagedkv.engine import Engine
from pagedkv.engine.memory_plan import predict
from pagedkv.models import ModelConfig
from pagedkv.plan import Gpu, find_gpu
from pagedkv.plan.planning import Plan

BLOCK = 16 * BYTES_PER_TOKEN


def small_gpu(pool_bytes: int) -> Gpu:
    """A GPU of which a pool of about so many bytes is left."""
    fixed = plan_of(num_gpu_blocks_override=1).fit.memory
    kept = 256 * 2**20 + 8 * 4 * 16 * 1000
    needed = fixed.weights_bytes + fixed.step_bytes + fixed.libraries_bytes + kept + pool_bytes
    return find_gpu("l4", memory_bytes=int((needed - 103 * 2**20) / 0.9))


def variant(plan: Plan, name: str) -> Any:
    (found,) = [one for one in plan.variants if one.name.startswith(name)]
    return found


OPTIONS: list[dict[str, Any]] = [
    {},
    {"block_size": 32, "max_model_len": 1000},
    {"num_gpu_blocks_override": 77, "block_size": 8},
    {"kv_cache_memory_bytes": 10 * BLOCK + 1},
    {"kv_cache_dtype": "fp8", "kv_cache_memory_bytes": 10 * BLOCK + 1},
    {"swap_space": 0.01, "max_num_seqs": 3},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_on_a_cpu_the_engine_allocates_what_is_planned_to_the_block(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    asked = {"max_num_seqs": 16, **options}
    plan = plan_of(gpu="cpu", **asked)
    config = EngineConfig.from_options(str(tmp_path), load_format="dummy", device="cpu", **asked)
    blocks = Engine.from_config(config).statistics()
    assert plan.fit.reason is None
    assert (blocks.num_blocks, blocks.num_cpu_blocks) == (
        plan.fit.memory.num_blocks,
        plan.fit.memory.num_cpu_blocks,
    )
    (own,) = [one for one in plan.block_sizes if one.block_size == plan.block_size]
    assert own.num_blocks == blocks.num_blocks
    assert plan.fit.num_tokens == blocks.num_blocks * plan.block_size
    assert (plan.fit.memory.libraries_bytes, plan.fit.memory.graphs_bytes) == (0, 0)


def test_on_a_gpu_memory_is_what_the_engine_predicts_of_itself() -> None:
    config = EngineConfig.from_options("m", max_num_seqs=16)
    gpu = find_gpu("h200")
    expected = predict(config, LLAMA, torch.bfloat16, gpu_bytes=gpu.memory_bytes)
    plan = plan_of()
    assert plan.fit.memory == expected
    assert plan.fit.bytes_per_token == BYTES_PER_TOKEN
    assert plan.fit.memory.pool_bytes == expected.num_blocks * BLOCK


def test_concurrency_is_whole_sequences_of_whole_blocks() -> None:
    plan = plan_of(num_gpu_blocks_override=100, lengths=(1, 16, 17, 1000))
    assert plan.fit.concurrency == (100, 100, 50, 1)
    assert plan.lengths == (1, 16, 17, 1000)
    assert plan_of().lengths == (512, 2048, 4096)
    assert plan_of(max_model_len=100).lengths == (100,)


def test_a_window_bounds_what_a_long_sequence_holds() -> None:
    shape = {**LLAMA, "architectures": ["MistralForCausalLM"], "sliding_window": 64}
    options = {"num_gpu_blocks_override": 100, "max_num_batched_tokens": 64}
    plan = plan_of(shape, lengths=(16, 1024, 4096), **options)
    assert plan.fit.concurrency[1] == plan.fit.concurrency[2]
    assert 100 // 10 <= plan.fit.concurrency[2] < 100 // 4  # 64 tokens, and a chunk beside them
    assert (plan.longest_model_len, plan.longest_bound) == (4096, "model")


def test_waste_is_half_a_block_less_half_a_token() -> None:
    plan = plan_of(lengths=(100, 1000))
    assert [one.block_size for one in plan.block_sizes] == [8, 16, 32, 64]
    for one in plan.block_sizes:
        lacking = [-length % one.block_size for length in range(1, one.block_size + 1)]
        assert one.waste_tokens == sum(lacking) / len(lacking)
        assert one.waste_bytes == one.waste_tokens * BYTES_PER_TOKEN
        assert one.waste_shares[0] == pytest.approx(one.waste_tokens / (100 + one.waste_tokens))
        assert one.num_blocks == plan.fit.memory.pool_bytes // (one.block_size * BYTES_PER_TOKEN)
        assert one.concurrency[1] == one.num_blocks // -(-1000 // one.block_size)
    other = plan_of(block_size=24)
    assert [one.block_size for one in other.block_sizes] == [8, 16, 24, 32, 64]


@pytest.mark.parametrize("pool_tokens", [160, 1000, 3000])
def test_the_longest_model_len_fits_and_one_more_does_not(pool_tokens: int) -> None:
    gpu = small_gpu(pool_tokens * BYTES_PER_TOKEN)
    longest = plan_of(gpu=gpu).longest_model_len

    def fits(max_model_len: int) -> bool:
        plan = plan_of(gpu=gpu, max_model_len=max_model_len, lengths=(max_model_len,))
        return plan.fit.concurrency[0] >= 1

    assert plan_of(gpu=gpu).longest_bound == "memory"
    assert 0 < longest < 4096
    assert fits(longest)
    assert not fits(longest + 1)


def test_the_model_bounds_its_context_where_memory_does_not() -> None:
    assert (plan_of().longest_model_len, plan_of().longest_bound) == (4096, "model")
    scaled = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    reaching = {**scaled, "original_max_position_embeddings": 4096, "rope_theta": 1e4}
    shape = {**LLAMA, "rope_parameters": reaching}
    assert plan_of(shape).longest_model_len == ModelConfig.from_dict(shape).longest_context


def test_an_fp8_cache_holds_twice_as_much() -> None:
    plan = plan_of()
    fp8 = variant(plan, "kv_cache_dtype fp8")
    assert fp8.bytes_per_token == BYTES_PER_TOKEN // 2
    assert fp8.num_tokens == pytest.approx(2 * plan.fit.num_tokens, rel=0.001)
    assert fp8.memory == plan_of(kv_cache_dtype="fp8").fit.memory
    back = variant(plan_of(kv_cache_dtype="fp8"), "kv_cache_dtype auto")
    assert back.memory == plan.fit.memory


def test_grouped_heads_are_held_against_a_head_each() -> None:
    plan = plan_of()
    whole = variant(plan, "MHA: 8 KV heads, not 2")
    assert whole.bytes_per_token == 4 * BYTES_PER_TOKEN
    assert whole.num_tokens == pytest.approx(plan.fit.num_tokens / 4, rel=0.001)
    more = 2 * 3 * 2 * 6 * 32 * 256  # bytes of the further keys' and values' projections
    assert whole.memory.weights_bytes == plan.fit.memory.weights_bytes + more
    each = plan_of({**LLAMA, "num_key_value_heads": 8})
    assert each.fit.memory == whole.memory
    assert not [one for one in each.variants if one.name.startswith("MHA")]


def test_each_of_several_gpus_holds_its_part() -> None:
    plan = plan_of()
    names = [one.name for one in plan.variants if "GPU" in one.name]
    assert names == ["each of 2 GPUs", "each of 4 GPUs", "each of 8 GPUs"]
    two, eight = variant(plan, "each of 2"), variant(plan, "each of 8")
    assert two.bytes_per_token == BYTES_PER_TOKEN // 2
    assert eight.bytes_per_token == BYTES_PER_TOKEN // 2  # 2 KV heads: 8 ranks share them
    assert two.memory.weights_bytes < 0.6 * plan.fit.memory.weights_bytes
    asked = plan_of(tensor_parallel_size=2)
    assert asked.fit.memory == two.memory
    assert variant(asked, "one GPU").memory == plan.fit.memory
    assert asked.decode[0].seconds < plan.decode[0].seconds
    # What is put together of all ranks' logits is left free.
    share = ModelConfig.from_dict(LLAMA).share(2)
    config = EngineConfig.from_options("m", max_num_seqs=16)
    alone = predict(config, share, torch.bfloat16, gpu_bytes=plan.gpu.memory_bytes)
    logits = 16 * 1000 * 2
    assert abs(alone.pool_bytes - two.memory.pool_bytes - logits) < BLOCK
    odd = plan_of({**LLAMA, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32})
    assert [one.name for one in odd.variants if "GPU" in one.name] == ["each of 2 GPUs"]
    with pytest.raises(ValueError, match="cannot be divided among 3 ranks"):
        plan_of(tensor_parallel_size=3)


def test_what_does_not_fit_is_said_and_still_planned() -> None:
    tiny = find_gpu(None, memory_bytes=2**29, bandwidth=1e12, flops=1e14)
    plan = plan_of(gpu=tiny)
    assert plan.fit.reason == (
        f"{plan.fit.memory.used_bytes / 2**30:.2f} GiB are needed before there is a pool, and "
        "gpu_memory_utilization allows 0.45"
    )
    tight = plan_of(gpu=small_gpu(100))
    assert "gpu_memory_utilization is 0.9, which leaves " in str(tight.fit.reason)
    assert (plan.fit.memory.num_blocks, plan.fit.num_tokens) == (0, 0)
    assert plan.fit.memory.weights_bytes == plan_of().fit.memory.weights_bytes
    assert set(plan.fit.concurrency) == {0}
    assert (plan.longest_model_len, plan.longest_bound) == (0, "memory")
    assert plan.decode == ()
    assert len(plan.prefill) == len(plan.lengths)
    much = plan_of(num_gpu_blocks_override=10**7, gpu="l4")
    assert "GiB do not fit in 22.00" in str(much.fit.reason)
    swap = plan_of(swap_space=1e-9, enable_kv_offloading=True)
    assert "swap_space is 1e-09 GiB, but one block" in str(swap.fit.reason)


def test_decodes_are_floored_at_batches_that_fit() -> None:
    plan = plan_of(num_gpu_blocks_override=100, lengths=(16, 1024), max_num_seqs=40)
    rows = [(one.num_seqs, one.context_len) for one in plan.decode]
    assert rows == [(1, 16), (32, 16), (40, 16), (1, 1024)]
    assert [one.context_len for one in plan.prefill] == [16, 1024]
    unknown = find_gpu(None, memory_bytes=2**35, bandwidth=1e12)
    assert (plan_of(gpu=unknown).decode, plan_of(gpu=unknown).prefill) == ((), ())
    fast = dataclasses.replace(find_gpu("h200"), bandwidth=9.6e12)
    assert plan_of(gpu=fast).decode[0].seconds == pytest.approx(plan_of().decode[0].seconds / 2)


@pytest.mark.parametrize("length", [0, -1, 4097])
def test_a_length_that_cannot_be_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match=f"a length is {length}; max_model_len allows 1 to 4096"):
        plan_of(lengths=(length,))
