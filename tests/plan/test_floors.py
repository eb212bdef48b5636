"""Floors of decodes and prompts: the weights, bytes and FLOPs that they are made of."""

from __future__ import annotations

from typing import Any

import pytest

from pagedkv.models import ModelConfig
from pagedkv.plan.floors import Work

LLAMA_8B: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}
LAYERS = 32 * (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336)
BYTES_PER_TOKEN = 2 * 32 * 8 * 128 * 2


def work(**other: Any) -> Work:
    return Work.of(ModelConfig.from_dict({**LLAMA_8B, **other}), 2, BYTES_PER_TOKEN)


def test_a_decode_reads_the_weights_once_and_each_cache() -> None:
    one = work().decode(32, 1024, bandwidth=4.8e12, flops=989e12)
    weights = 2 * (LAYERS + 128256 * 4096)
    assert one.num_bytes == weights + 32 * 1024 * BYTES_PER_TOKEN
    attention = 4 * 32 * 128 * 32 * 1024
    assert one.num_flops == 32 * (2 * (LAYERS + 128256 * 4096) + attention)
    assert (one.bound, one.seconds) == ("bandwidth", one.num_bytes / 4.8e12)
    assert one.tokens_per_s == pytest.approx(32 / one.seconds)
    slow = work().decode(32, 1024, bandwidth=4.8e12, flops=1e12)
    assert (slow.bound, slow.seconds) == ("FLOPs", one.num_flops / 1e12)


def test_a_prompt_is_bound_by_products_unless_it_is_short() -> None:
    one = work().prefill(4000, bandwidth=4.8e12, flops=989e12)
    pairs = sum(range(1, 4001))
    assert one.num_flops == 2 * LAYERS * 4000 + 2 * 128256 * 4096 + 4 * 32 * 128 * 32 * pairs
    assert (one.bound, one.num_tokens, one.num_seqs) == ("FLOPs", 4000, 1)
    assert work().prefill(4, bandwidth=4.8e12, flops=989e12).bound == "bandwidth"


def test_layers_with_a_window_see_no_more_than_it() -> None:
    found = work(architectures=["MistralForCausalLM"], sliding_window=100)
    full = work(architectures=["MistralForCausalLM"], sliding_window=None)
    assert found.config.layer_windows == (100,) * 32
    for length in (1, 99, 100, 101, 250):
        seen = min(length, 100)
        read = found.decode(1, length, 1e12, 1e12).num_bytes - found.weights_bytes
        assert read == seen * BYTES_PER_TOKEN
        pairs = sum(min(i, 100) for i in range(1, length + 1))
        lacking = sum(range(1, length + 1)) - pairs
        more = full.prefill(length, 1e12, 1e12).num_flops
        assert more - found.prefill(length, 1e12, 1e12).num_flops == 4 * 32 * 128 * 32 * lacking
