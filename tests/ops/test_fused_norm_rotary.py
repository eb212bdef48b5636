"""fused_norm_rotary_reshape_and_cache: bit for bit the ops that it stands for; its own refusals."""

from __future__ import annotations

import math

import pytest
import torch
from operands import DTYPES, FLOAT8, LAYOUTS, Arena, assert_matches, assert_same
from refusing import Refusal, assert_refused

from pagedkv import ops
from pagedkv.ops import reference

# (num_tokens, num_heads, num_kv_heads, head_dim, rotary_dim, block_size)
SIZES = {
    "qwen": (9, 4, 2, 64, 64, 16),
    "partial": (9, 4, 2, 80, 20, 1),
    "odd_half": (5, 3, 3, 46, 46, 8),
    "no_tokens": (0, 2, 1, 64, 64, 16),
}
OP = "fused_norm_rotary_reshape_and_cache"


def name_of(value: object) -> str:
    return str(value).removeprefix("torch.")


@pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "gptj"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cache_dtype", [None, FLOAT8[0]], ids=name_of)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("size", SIZES)
def test_is_the_three_ops_bit_for_bit(size, dtype, cache_dtype, layout, is_neox) -> None:
    torch.manual_seed(0)
    tokens, heads, kv_heads, dim, rotary, block_size = SIZES[size]
    arena = Arena()
    query = arena.make(torch.randn(tokens, heads, dim).to(dtype), layout)
    key = arena.make(torch.randn(tokens, kv_heads, dim).to(dtype), "sliced")
    value = arena.make(torch.randn(tokens, kv_heads, dim).to(dtype), layout)
    norms = [arena.make(torch.randn(dim).to(dtype), "offset") for _ in range(2)]
    positions, table = torch.randint(0, 40, (tokens,)), torch.rand(40, rotary)
    shape = (tokens // block_size + 3, kv_heads, block_size, dim)
    poison = torch.full(shape, math.nan).to(cache_dtype or dtype)
    caches = arena.make(poison, layout), arena.make(poison, "transposed")
    slots = torch.randperm(shape[0] * block_size)[:tokens]
    slots[1::3] = -1
    scales = {}
    if cache_dtype is not None:
        scales = {"k_scale": torch.rand(kv_heads) + 0.01, "v_scale": torch.tensor([0.03])}
    want_query, want_key = query.reshape(-1, dim).clone(), key.reshape(-1, dim).clone()
    ops.rms_norm(want_query, want_query, norms[0], 1e-5)
    ops.rms_norm(want_key, want_key, norms[1], 1e-5)
    want_query, want_key = want_query.view(query.shape), want_key.view(key.shape)
    want_caches = [cache.clone() for cache in caches]
    ops.fused_rotary_reshape_and_cache(
        positions, want_query, want_key, value, table, *want_caches, slots, is_neox, **scales
    )
    arena.remember()
    ops.fused_norm_rotary_reshape_and_cache(
        positions, query, key, value, *norms, 1e-5, table, *caches, slots, is_neox, **scales
    )
    arena.check_untouched([query, *caches])
    assert_same(query, want_query, "query")
    assert_same(caches[0], want_caches[0], "key_cache")
    assert_same(caches[1], want_caches[1], "value_cache")


def test_matches_the_oracle() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(6, heads, 32) for heads in (4, 2, 2))
    norms, table = torch.rand(2, 32), torch.rand(9, 32)
    positions, slots = torch.arange(6), torch.arange(6)
    caches, want_caches = torch.zeros(2, 2, 2, 4, 32), torch.zeros(2, 2, 2, 4, 32)
    want = query.clone()
    reference.fused_norm_rotary_reshape_and_cache(
        positions, want, key, value, *norms, 1e-5, table, *want_caches, slots
    )
    ops.fused_norm_rotary_reshape_and_cache(
        positions, query, key, value, *norms, 1e-5, table, *caches, slots
    )
    assert_matches(query, want, what="query")
    assert_matches(caches, want_caches, what="caches")


REFUSALS = [
    *(
        Refusal(OP, {norm: change}, f"{norm} {message}")
        for norm in ("query_norm", "key_norm")
        for change, message in (
            (torch.Tensor.half, "has dtype float16, expected float32 as query"),
            (lambda t: t[:6], "has shape [6], expected [head_dim] = [8]"),
            (
                lambda t: t.repeat_interleave(2)[::2],
                "has strides [2], expected a contiguous last dimension",
            ),
        )
    ),
    Refusal(OP, {"epsilon": math.inf}, "epsilon is inf, expected a finite float32 of at least 0"),
    Refusal(OP, {"epsilon": -1.0}, "epsilon is -1, expected a finite float32 of at least 0"),
    Refusal(OP, {"key": lambda t: t[:2]}, "key has shape [2, 2, 8], expected"),
    Refusal(OP, {"slot_mapping": lambda t: t + 8}, "slot"),
    Refusal(OP, {"positions": lambda t: t + 5}, "position"),
]


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.name)
def test_refusal(refusal: Refusal) -> None:
    assert_refused(refusal)


@pytest.mark.parametrize("norm", ["query_norm", "key_norm"])
def test_a_query_that_shares_memory_with_a_norm_is_refused(norm) -> None:
    memory = torch.randn(64)
    norms = {"query_norm": torch.rand(8), "key_norm": torch.rand(8)} | {norm: memory[8:16]}
    key, table, slots = torch.randn(2, 2, 8), torch.rand(4, 8), torch.arange(2)
    caches = torch.zeros(2, 2, 2, 4, 8)
    with pytest.raises(RuntimeError, match=f"query overlaps {norm} in memory"):
        ops.fused_norm_rotary_reshape_and_cache(
            slots,
            memory.view(2, 4, 8),
            key,
            key,
            norms["query_norm"],
            norms["key_norm"],
            1e-5,
            table,
            *caches,
            slots,
        )
