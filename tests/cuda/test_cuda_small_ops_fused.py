"""fused_rotary_reshape_and_cache on the GPU: bit for bit the two ops that it stands for, on vectors
and element by element, and the oracle's result."""

from __future__ import annotations

import math

import pytest
import torch
from operands import DTYPES, FLOAT8, assert_same
from torch import Tensor

from pagedkv import ops
from pagedkv.ops import reference

# (num_tokens, num_heads, num_kv_heads, head_dim, rotary_dim, block_size)
SIZES = {
    "llama": (37, 32, 8, 128, 128, 16),
    "many_heads": (5, 80, 80, 64, 64, 16),
    "one_head": (9, 1, 1, 256, 256, 3),
    "partial": (9, 4, 2, 80, 20, 16),
    "odd_half": (5, 3, 3, 46, 46, 8),
    "no_query_heads": (4, 0, 2, 64, 64, 4),
}


class Operands:
    """Views of one projection, poisoned caches, a third of the tokens padding."""

    def __init__(
        self, size: str, dtype: torch.dtype, cache_dtype: torch.dtype, shift: int, device
    ) -> None:
        tokens, heads, kv_heads, dim, rotary, block_size = SIZES[size]
        # Rows that begin `shift` elements into their memory: aligned for vectors, or not.
        wide = torch.randn(tokens, heads + 2 * kv_heads, dim + 8, device=device).to(dtype)
        self.projected = wide[..., shift : shift + dim]
        self.heads = [heads, kv_heads, kv_heads]
        self.positions = torch.randint(3, 40, (tokens,), device=device)
        angles = torch.rand(50, rotary // 2, device=device) * 6.3
        rows = torch.full((50, rotary + 4), math.nan, device=device)  # 16-byte aligned ones
        self.table = rows[:, shift : shift + rotary].copy_(
            torch.cat([angles.cos(), angles.sin()], 1)
        )
        shape = (tokens // block_size + 3, kv_heads, block_size, dim)
        self.caches = [torch.full(shape, math.nan, device=device).to(cache_dtype) for _ in range(2)]
        self.slots = torch.randperm(shape[0] * block_size, device=device)[:tokens]
        self.slots[1::3] = -1
        self.scales: dict[str, Tensor] = {}
        if cache_dtype in FLOAT8:
            self.scales = {
                "k_scale": torch.rand(kv_heads, device=device) + 0.01,
                "v_scale": torch.tensor([0.03], device=device),
            }

    def copies(self) -> tuple[Tensor, list[Tensor]]:
        return self.projected.clone(), [cache.clone() for cache in self.caches]


@pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "gptj"])
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("cache_dtype", [None, *FLOAT8])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_the_fused_op_is_the_two_ops_bit_for_bit(
    size, dtype, cache_dtype, shift, is_neox, device
) -> None:
    made = Operands(size, dtype, cache_dtype or dtype, shift, device)
    projected, caches = made.copies()
    query, key, value = projected.split(made.heads, 1)
    ops.rotary_embedding(made.positions, query, key, made.table, is_neox)
    ops.reshape_and_cache(key, value, *caches, made.slots, **made.scales)
    query, key, value = made.projected.split(made.heads, 1)
    kept = key.clone(), value.clone()
    ops.fused_rotary_reshape_and_cache(
        made.positions,
        query,
        key,
        value,
        made.table,
        *made.caches,
        made.slots,
        is_neox,
        **made.scales,
    )
    assert_same(query, projected[:, : made.heads[0]], "query")
    assert_same(key, kept[0], "key, which is only read")
    assert_same(value, kept[1], "value, which is only read")
    assert_same(made.caches[0], caches[0], "key_cache")
    assert_same(made.caches[1], caches[1], "value_cache")


@pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "gptj"])
@pytest.mark.parametrize("size", SIZES)
def test_the_fused_op_matches_the_oracle(size, is_neox, device) -> None:
    made = Operands(size, torch.float32, torch.float32, 0, device)
    projected, caches = made.copies()
    for module, heads, mine in (
        (ops, made.projected, made.caches),
        (reference, projected, caches),
    ):
        query, key, value = heads.split(made.heads, 1)
        module.fused_rotary_reshape_and_cache(
            made.positions, query, key, value, made.table, *mine, made.slots, is_neox
        )
    torch.testing.assert_close(made.projected, projected, atol=2e-6, rtol=2e-6)
    for got, want in zip(made.caches, caches, strict=True):
        torch.testing.assert_close(got, want, atol=2e-6, rtol=2e-6, equal_nan=True)
