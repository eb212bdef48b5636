"""Options: sorted into their configs, refused by name when unknown or out of range."""

from __future__ import annotations

from typing import Any

import pytest

from pagedkv.config import CacheConfig, EngineConfig, SchedulerConfig


def test_flat_options_land_in_their_configs() -> None:
    config = EngineConfig.from_options(
        "some/model", dtype="float32", block_size=8, max_num_seqs=3, max_model_len=99, seed=4
    )
    assert config == EngineConfig(
        model="some/model",
        dtype="float32",
        max_model_len=99,
        seed=4,
        cache=CacheConfig(block_size=8),
        scheduler=SchedulerConfig(max_num_seqs=3),
    )


@pytest.mark.parametrize(
    ("name", "close"),
    [("max_model_length", "max_model_len"), ("block_sise", "block_size"), ("sed", "seed")],
)
def test_an_unknown_option_names_the_closest(name: str, close: str) -> None:
    with pytest.raises(ValueError, match=f"unknown option '{name}': did you mean .*{close}"):
        EngineConfig.from_options("m", **{name: 1})


def test_an_option_like_no_other_lists_them_all() -> None:
    with pytest.raises(ValueError, match=r"options are async_scheduling, block_size, .*watermark"):
        EngineConfig.from_options("m", zzzzzz=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 0}, "block_size must be at least 1 and at most 256, got 0"),
        ({"block_size": 257}, "block_size must be at least 1 and at most 256, got 257"),
        ({"block_size": 16.0}, "block_size must be an integer, got float"),
        ({"block_size": True}, "block_size must be an integer, got bool"),
        ({"num_gpu_blocks_override": 0}, "num_gpu_blocks_override must be at least 1"),
        ({"kv_cache_memory_bytes": -1}, "kv_cache_memory_bytes must be at least 1"),
        ({"num_gpu_blocks_override": 5, "kv_cache_memory_bytes": 5}, "both size the pool"),
        ({"enable_prefix_caching": 1}, "enable_prefix_caching must be True or False, got int 1"),
        ({"gpu_memory_utilization": 0}, "gpu_memory_utilization must be above 0 and at most 1, g"),
        ({"gpu_memory_utilization": 1.01}, "gpu_memory_utilization must be above 0 and at most 1"),
        ({"gpu_memory_utilization": "1"}, "gpu_memory_utilization must be a number, got str '1'"),
        ({"watermark": float("nan")}, "watermark must be at least 0 and below 1, got nan"),
        ({"watermark": 1}, "watermark must be at least 0 and below 1, got 1"),
        ({"watermark": "a"}, "watermark must be a number"),
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens must be at least 1"),
        ({"max_num_seqs": 9, "max_num_batched_tokens": 8}, "is 8, below max_num_seqs 9"),
        ({"scheduling_policy": "lifo"}, "scheduling_policy must be one of fcfs, priority, got 'l"),
        ({"preemption_mode": "drop"}, "preemption_mode must be one of auto, swap, recompute"),
        ({"swap_space": -1}, "swap_space must be at least 0 and below 1e9 GiB, got -1"),
        ({"swap_space": float("inf")}, "swap_space must be at least 0 and below 1e9 GiB, got inf"),
        ({"swap_space": 10**400}, "swap_space must be at least 0 and below 1e9 GiB, got 1000"),
        ({"watermark": 10**400}, "watermark must be at least 0 and below 1, got 1000"),
        ({"swap_space": "4"}, "swap_space must be a number, got str '4'"),
        ({"priority_ageing_steps": 0}, "priority_ageing_steps must be at least 1"),
        ({"max_num_overtakes": -1}, "max_num_overtakes must be at least 0"),
        ({"max_num_paced_tokens": 300, "scheduling_policy": "priority"}, "paced under 'fcfs' only"),
        ({"max_num_paced_tokens": -1}, "max_num_paced_tokens must be at least 0"),
        (
            {"max_num_paced_tokens": 255},
            "255: it must be 0, or at least max_num_seqs 256 and at most",
        ),
        ({"max_num_paced_tokens": 2049}, "2049: it must be 0, .* max_num_batched_tokens 2048"),
        ({"reserve_after_preemptions": 0}, "reserve_after_preemptions must be at least 1"),
        ({"max_cudagraph_capture_size": -1}, "max_cudagraph_capture_size must be at least 0"),
        ({"enforce_eager": 1}, "enforce_eager must be True or False, got int 1"),
        ({"async_scheduling": "yes"}, "async_scheduling must be True or False, got str 'yes'"),
        ({"dtype": "float64"}, "dtype must be one of auto, float32, bfloat16, float16"),
        ({"max_model_len": 1}, "max_model_len must be at least 2"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"seed": 2**64}, "seed must be at least 0 and at most 18446744073709551615"),
    ],
)
def test_a_value_out_of_range_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        EngineConfig.from_options("m", **options)


def test_offloading_needs_a_place_and_a_cache() -> None:
    assert CacheConfig(swap_space=1.0, enable_kv_offloading=True).enable_kv_offloading
    assert not CacheConfig(swap_space=1.0).enable_kv_offloading
    for options in ({"swap_space": 0.0}, {"swap_space": 1.0, "enable_prefix_caching": False}):
        with pytest.raises(ValueError, match="enable_kv_offloading needs swap_space above 0 and"):
            CacheConfig(enable_kv_offloading=True, **options)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="enable_kv_offloading must be True or False, got int 1"):
        CacheConfig(swap_space=1.0, enable_kv_offloading=1)  # type: ignore[arg-type]


def test_steps_with_prompts_are_captured_as_far_as_steps_have_tokens_and_rows_of_padding() -> None:
    for options, most in (
        ({}, 256),
        ({"max_cudagraph_capture_size": 100}, 100),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 64}, 64),
        ({"max_num_seqs": 1}, 0),
        ({"max_cudagraph_capture_size": 0}, 0),
    ):
        assert EngineConfig.from_options("m", **options).max_captured_tokens == most, options
