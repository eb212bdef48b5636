"""fused_norm_rotary_reshape_and_cache on the GPU: the norms and the rotation that it stands for, on
vectors and element by element."""

from __future__ import annotations

import math

import pytest
import torch
from operands import DTYPES, assert_same

from pagedkv import ops
from pagedkv.ops import reference

# (num_tokens, num_heads, num_kv_heads, head_dim, rotary_dim)
SIZES = {
    "qwen": (1, 16, 8, 128, 128),
    "gemma": (37, 4, 1, 256, 256),
    "small": (9, 3, 3, 64, 64),
    "lanes_no_power_of_two": (9, 4, 2, 80, 80),
    "partial": (9, 4, 2, 80, 20),
    "odd_half": (5, 3, 3, 46, 46),
}


@pytest.mark.parametrize("cache_dtype", [None, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "gptj"])
@pytest.mark.parametrize("shift", [0, 1], ids=["aligned", "shifted"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_it_is_the_norms_and_then_the_rotation(
    size, dtype, shift, is_neox, cache_dtype, device
) -> None:
    tokens, heads, kv_heads, dim, rotary = SIZES[size]
    wide = torch.randn(tokens, heads + 2 * kv_heads, dim + 8, device=device).to(dtype)
    parts = [heads, kv_heads, kv_heads]
    query, key, value = wide[..., shift : shift + dim].split(parts, 1)
    before = key.clone()
    norms = [torch.rand(dim, device=device).to(dtype) for _ in range(2)]
    angles = torch.rand(50, rotary // 2, device=device) * 6.3
    table = torch.cat([angles.cos(), angles.sin()], dim=1)
    positions = torch.randint(3, 40, (tokens,), device=device)
    slots = torch.randperm(48, device=device)[:tokens]
    slots[1::3] = -1
    scales = {}
    if cache_dtype is not None:
        scales = {"k_scale": torch.rand(kv_heads, device=device) + 0.01}
        scales["v_scale"] = torch.tensor([0.03], device=device)
    shape = (3, kv_heads, 16, dim)
    caches = [torch.full(shape, math.nan, device=device).to(cache_dtype or dtype) for _ in "kv"]
    want_query, want_caches = query.clone(), [cache.clone() for cache in caches]
    reference.fused_norm_rotary_reshape_and_cache(
        positions,
        want_query,
        key,
        value,
        *norms,
        1e-6,
        table,
        *want_caches,
        slots,
        is_neox,
        **scales,
    )
    ops.fused_norm_rotary_reshape_and_cache(
        positions, query, key, value, *norms, 1e-6, table, *caches, slots, is_neox, **scales
    )
    assert_same(key, before, "key")
    assert_same(caches[1], want_caches[1], "value_cache")
    # Two roundings, of the norm and of the rotation, each of which may fall to the other side.
    epsilon = torch.finfo(dtype).eps
    for got, want in ((query, want_query), (caches[0], want_caches[0])):
        rounding = 0.13 if got.dtype == cache_dtype else 8 * epsilon  # a step of e4m3
        torch.testing.assert_close(
            got.float(), want.float(), rtol=rounding, atol=rounding, equal_nan=True
        )
