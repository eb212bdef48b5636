"""Every small operator on sizes that several threads share: bitwise the result of one thread, run
after run."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from operands import assert_same
from torch import Tensor

from pagedkv import ops

TOKENS = 1500


def rms_norm() -> list[Tensor]:
    x, out = torch.randn(2, TOKENS, 200).bfloat16()
    ops.rms_norm(out, x, torch.randn(200).bfloat16(), 1e-5)
    return [out]


def fused_add_rms_norm() -> list[Tensor]:
    x, residual = torch.randn(2, TOKENS, 200)
    ops.fused_add_rms_norm(x, residual, torch.randn(200), 1e-5)
    return [x, residual]


def rotary_embedding() -> list[Tensor]:
    query, key = torch.randn(TOKENS, 4, 64), torch.randn(TOKENS, 2, 64)
    table = torch.rand(TOKENS, 64)
    ops.rotary_embedding(torch.randperm(TOKENS), query, key, table, False)
    return [query, key]


def silu_and_mul() -> list[Tensor]:
    out = torch.empty(3, 40_000)  # few rows: their pieces are shared
    ops.silu_and_mul(out, torch.randn(3, 80_000))
    return [out]


def merge_attention_states() -> list[Tensor]:
    a, b = torch.randn(2, TOKENS, 4, 64)
    lse_a, lse_b = torch.randn(2, TOKENS, 4)
    out, lse = torch.empty_like(a), torch.empty_like(lse_a)
    ops.merge_attention_states(out, lse, a, lse_a, b, lse_b)
    return [out, lse]


def reshape_and_cache() -> list[Tensor]:
    key, value = torch.randn(2, TOKENS, 2, 64)
    caches = [torch.zeros(200, 2, 16, 64) for _ in range(2)]
    slots = torch.randperm(3200)[:TOKENS]
    slots[::7] = -1
    ops.reshape_and_cache(key, value, *caches, slots)
    return caches


def fused_rotary_reshape_and_cache() -> list[Tensor]:
    query, key, value = torch.randn(TOKENS, 4, 64), *torch.randn(2, TOKENS, 2, 64)
    caches = [torch.zeros(200, 2, 16, 64) for _ in range(2)]
    slots = torch.randperm(3200)[:TOKENS]
    slots[::7] = -1
    table = torch.rand(TOKENS, 64)
    ops.fused_rotary_reshape_and_cache(
        torch.randperm(TOKENS), query, key, value, table, *caches, slots
    )
    return [query, *caches]


def gather_blocks() -> list[Tensor]:
    caches = torch.randn(2, 50, 2, 16, 64)
    # Many short sequences, empty ones among them, so that pieces begin inside and between them.
    lens = torch.randint(0, 9, (300,))
    starts = torch.cat([torch.zeros(1), lens.cumsum(0)]).int()
    tables = torch.randint(0, 50, (300, 1)).int()
    out = [torch.zeros(int(starts[-1]), 2, 64) for _ in range(2)]
    ops.gather_blocks(*out, caches[0], caches[1], tables, starts)
    for s in range(300):
        rows = slice(int(starts[s]), int(starts[s + 1]))
        assert_same(out[0][rows], caches[0][tables[s, 0], :, : lens[s]].transpose(0, 1))
    return out


def copy_blocks() -> list[Tensor]:
    pool = torch.randn(8, 2, 64, 4, 16, 32)
    ops.copy_blocks(pool, torch.stack([torch.randperm(64), torch.randperm(64)], dim=1))
    return [pool]


RUNS = [
    rms_norm,
    fused_add_rms_norm,
    rotary_embedding,
    silu_and_mul,
    merge_attention_states,
    reshape_and_cache,
    fused_rotary_reshape_and_cache,
    gather_blocks,
    copy_blocks,
]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.__name__)
def test_results_do_not_depend_on_the_number_of_threads(run: Callable[[], list[Tensor]]) -> None:
    results = []
    for count in (1, 2, 5, 2):
        torch.set_num_threads(count)
        torch.manual_seed(0)
        results.append(run())
    for other in results[1:]:
        for got, want in zip(other, results[0], strict=True):
            assert_same(got, want)
