"""fused_rotary_reshape_and_cache: bit for bit the two ops that it stands for, in every dtype,
layout and pairing, with padding, and nothing else written."""

from __future__ import annotations

import math

import pytest
import torch
from operands import DTYPES, FLOAT8, LAYOUTS, Arena, assert_matches, assert_same
from torch import Tensor

from pagedkv import ops
from pagedkv.ops import reference

# (num_tokens, num_heads, num_kv_heads, head_dim, rotary_dim, block_size)
SIZES = {
    "smollm2": (21, 9, 3, 64, 64, 16),
    "partial": (9, 4, 2, 80, 20, 1),
    "odd_half": (5, 3, 3, 46, 46, 8),
    "one_pair": (3, 1, 1, 2, 2, 4),
    "more_pairs_than_a_chunk": (3, 2, 1, 320, 290, 16),
    "no_query_heads": (4, 0, 2, 16, 8, 4),
    "no_tokens": (0, 2, 1, 64, 64, 16),
}


def name_of(value: object) -> str:
    return str(value).removeprefix("torch.")


class Operands:
    """Operands in poison; positions repeated and not from 0, a third of the slots padding."""

    def __init__(self, size: str, dtype: torch.dtype, cache_dtype: torch.dtype, layout: str):
        torch.manual_seed(0)
        tokens, heads, kv_heads, dim, rotary, block_size = SIZES[size]
        self.arena = arena = Arena()
        self.query = arena.make(torch.randn(tokens, heads, dim).to(dtype), layout)
        self.key = arena.make(torch.randn(tokens, kv_heads, dim).to(dtype), "sliced")
        self.value = arena.make(torch.randn(tokens, kv_heads, dim).to(dtype), layout)
        self.positions = torch.randint(3, 40, (tokens,))
        angles = torch.rand(50, rotary // 2) * 6.3
        table = torch.full((50, rotary), math.nan)
        table[self.positions] = torch.cat([angles.cos(), angles.sin()], dim=1)[self.positions]
        self.table = arena.make(table, "sliced")
        shape = (tokens // block_size + 3, kv_heads, block_size, dim)
        poison = torch.full(shape, math.nan).to(cache_dtype)
        self.key_cache = arena.make(poison, layout)
        self.value_cache = arena.make(poison, "transposed")
        self.slots = torch.randperm(shape[0] * block_size)[:tokens]
        self.slots[1::3] = -1
        self.scales: dict[str, Tensor] = {}
        if cache_dtype in FLOAT8:
            self.scales = {
                "k_scale": torch.rand(kv_heads) + 0.01,
                "v_scale": torch.tensor([0.03]),
            }

    def run(self, module, query, key, key_cache, value_cache, is_neox: bool) -> None:
        module.fused_rotary_reshape_and_cache(
            self.positions,
            query,
            key,
            self.value,
            self.table,
            key_cache,
            value_cache,
            self.slots,
            is_neox,
            **self.scales,
        )


@pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "gptj"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cache_dtype", [None, *FLOAT8], ids=name_of)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("size", SIZES)
def test_is_the_two_ops_bit_for_bit(size, dtype, cache_dtype, layout, is_neox) -> None:
    made = Operands(size, dtype, cache_dtype or dtype, layout)
    query, key = made.query.clone(), made.key.clone()
    key_cache, value_cache = made.key_cache.clone(), made.value_cache.clone()
    ops.rotary_embedding(made.positions, query, key, made.table, is_neox)
    ops.reshape_and_cache(key, made.value, key_cache, value_cache, made.slots, **made.scales)
    made.arena.remember()
    made.run(ops, made.query, made.key, made.key_cache, made.value_cache, is_neox)
    made.arena.check_untouched([made.query, made.key_cache, made.value_cache])
    assert_same(made.query, query, "query")
    assert_same(made.key_cache, key_cache, "key_cache")
    assert_same(made.value_cache, value_cache, "value_cache")


@pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "gptj"])
@pytest.mark.parametrize("size", SIZES)
def test_matches_the_oracle(size, is_neox) -> None:
    made = Operands(size, torch.float32, torch.float32, "contiguous")
    query, key = made.query.clone(), made.key.clone()
    key_cache, value_cache = made.key_cache.clone(), made.value_cache.clone()
    made.run(reference, query, key, key_cache, value_cache, is_neox)
    assert_same(key, made.key, "the oracle's key")
    made.run(ops, made.query, made.key, made.key_cache, made.value_cache, is_neox)
    assert_matches(made.query, query, what="query")
    assert_matches(made.key_cache, key_cache, what="key_cache")
    assert_same(made.value_cache, value_cache, "value_cache")


def test_query_key_and_value_of_one_projection() -> None:
    # As a model calls it: three views of the rows of one matrix product.
    torch.manual_seed(0)
    tokens, heads, kv_heads, dim = 6, 4, 2, 16
    projected = torch.randn(tokens, heads + 2 * kv_heads, dim)
    query, key, value = projected.split([heads, kv_heads, kv_heads], 1)
    rest = projected[:, heads:].clone()
    table, positions = torch.rand(9, dim), torch.arange(tokens)
    caches = [torch.zeros(2, kv_heads, 4, dim) for _ in range(2)]
    rotated, rotated_key = query.clone(), key.clone()
    ops.rotary_embedding(positions, rotated, rotated_key, table)
    ops.fused_rotary_reshape_and_cache(
        positions, query, key, value, table, *caches, torch.arange(tokens)
    )
    assert_same(projected[:, :heads], rotated)
    assert_same(projected[:, heads:], rest, "key and value")
    assert_same(caches[0][1, :, :2].transpose(0, 1), rotated_key[4:], "second block of keys")
    assert_same(caches[1][0].transpose(0, 1), value[:4], "first block of values")
