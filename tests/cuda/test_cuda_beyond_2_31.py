"""Caches of more than 2^31 elements: what lies at their end is written, read, copied and swapped as
what lies at their start. An offset in 32 bits would wrap around to somewhere else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from gpu_attention_cases import Case, Problem, check, decode
from operands import assert_same
from torch import Tensor

from pagedkv import ops

E4M3 = torch.float8_e4m3fn
HEADS, BLOCK, DIM = 8, 16, 128
ELEMENTS = HEADS * BLOCK * DIM  # of K or V of a block in one layer


def large_caches(dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Key and value cache: the last blocks begin beyond 2^31 elements."""
    shape = (2**31 // ELEMENTS + 9, HEADS, BLOCK, DIM)
    return [torch.empty(shape, dtype=dtype, device=device) for _ in range(2)]


def scales_for(dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    if dtype != E4M3:
        return {}
    return {
        name: torch.tensor([s], device=device) for name, s in (("k_scale", 0.3), ("v_scale", 2.0))
    }


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, E4M3])
def test_the_last_blocks_are_written_and_read(cache_dtype, device) -> None:
    tokens = 40
    caches = large_caches(cache_dtype, device)
    blocks = caches[0].size(0)
    small = [cache[:3].clone() for cache in caches]
    key, value = torch.randn(2, tokens, HEADS, DIM, device=device).bfloat16()
    scales = scales_for(cache_dtype, device)
    low = torch.randperm(3 * BLOCK, device=device)[:tokens]
    top = (blocks - 3) * BLOCK
    ops.reshape_and_cache(key, value, *small, low, **scales)
    ops.reshape_and_cache(key, value, *caches, low + top, **scales)
    written = torch.zeros(3 * BLOCK, dtype=torch.bool, device=device)
    written[low] = True
    for big, want in zip(caches, small, strict=True):
        got = big[-3:].transpose(1, 2).flatten(0, 1)[written]
        assert_same(got, want.transpose(1, 2).flatten(0, 1)[written])
    table = torch.tensor([[blocks - 1, blocks - 3, blocks - 2]], dtype=torch.int32, device=device)
    starts = torch.tensor([0, tokens], dtype=torch.int32, device=device)
    outs = [torch.empty(2, tokens, HEADS, DIM, dtype=torch.bfloat16, device=device) for _ in "12"]
    ops.gather_blocks(*outs[0], *caches, table, starts, **scales)
    ops.gather_blocks(*outs[1], *(c[-3:] for c in caches), table - (blocks - 3), starts, **scales)
    assert_same(outs[0], outs[1])


@pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "gptj"])
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, E4M3])
def test_the_last_blocks_are_written_with_the_rotation(cache_dtype, is_neox, device) -> None:
    caches = large_caches(cache_dtype, device)
    for cache in caches:
        cache[-3:].view(torch.uint8).fill_(0)
    small = [torch.zeros_like(cache[:3]) for cache in caches]
    top = (caches[0].size(0) - 3) * BLOCK
    query, key, value = torch.randn(3, 40, HEADS, DIM, device=device).bfloat16()
    positions = torch.arange(40, device=device)
    table = torch.rand(40, DIM, device=device)
    slots = torch.randperm(3 * BLOCK, device=device)[:40]
    scales = scales_for(cache_dtype, device)
    for pair, offset in ((small, 0), (caches, top)):
        ops.fused_rotary_reshape_and_cache(
            positions, query.clone(), key, value, table, *pair, slots + offset, is_neox, **scales
        )
    for big, want in zip(caches, small, strict=True):
        assert_same(big[-3:], want)


def large_pool(block_major: bool, device: torch.device) -> Tensor:
    """E4M3 [2, 2, num_blocks, heads, block_size, head_dim], of 2^32 elements and zero; block-major
    as the engine's, or layer after layer."""
    blocks = 2**31 // ELEMENTS // 2 + 5
    shape = (2, 2, blocks, HEADS, BLOCK, DIM)
    if not block_major:
        return torch.zeros(shape, dtype=E4M3, device=device)
    made = torch.zeros((blocks, 2, 2, *shape[3:]), dtype=E4M3, device=device)
    return made.permute(1, 2, 0, 3, 4, 5)


@pytest.mark.parametrize("block_major", [True, False])
def test_the_last_block_is_a_copy_in_all_layers(block_major, device) -> None:
    pool = large_pool(block_major, device)
    content = torch.randn(2, 2, HEADS, BLOCK, DIM, device=device).to(E4M3)
    pool[:, :, 0] = content
    ops.copy_blocks(pool, torch.tensor([[0, pool.size(2) - 1]]))
    assert_same(pool[:, :, -1], content)
    assert (pool[:, :, -2].view(torch.uint8) == 0).all()


@pytest.mark.parametrize("block_major", [True, False])
def test_the_last_block_is_swapped_out_and_in(block_major, device) -> None:
    pool = large_pool(block_major, device)
    content = torch.randn(2, 2, HEADS, BLOCK, DIM, device=device).to(E4M3)
    last = pool.size(2) - 1
    pool[:, :, last] = content
    pinned = torch.zeros(3, 2, 2, HEADS, BLOCK, DIM).to(E4M3).pin_memory().permute(1, 2, 0, 3, 4, 5)
    ops.swap_blocks(pool, pinned, torch.tensor([[last, 2]]))
    ops.swap_blocks(pinned, pool, torch.tensor([[2, last - 2]]))
    torch.cuda.synchronize()
    assert_same(pinned[:, :, 2].to(device), content)
    assert_same(pool[:, :, last - 2], content)
    for untouched in (0, last - 3, last - 1):
        assert (pool[:, :, untouched].view(torch.uint8) == 0).all()


PATHS = {
    "rows": Case("rows", ((1, 70), (100, 130)), num_kv_heads=8, block_size=128),
    "pieces": Case("pieces", (*decode(300), (90, 90)), num_kv_heads=8, num_splits=3),
    "prefix": Case("prefix", decode(*[300] * 12), num_kv_heads=8, groups=((0, 12, 17),)),
    "plain": Case("plain", (*decode(70), (20, 20)), num_kv_heads=8, block_size=129),
}


@pytest.mark.parametrize(("cache_dtype", "token_major"), [(None, False), (E4M3, True)])
@pytest.mark.parametrize("path", PATHS)
def test_attention_reads_the_last_blocks(path, cache_dtype, token_major, device) -> None:
    case = replace(PATHS[path], cache_dtype=cache_dtype, token_major=token_major)
    per_block = case.num_kv_heads * case.block_size * case.head_dim
    problem = Problem(case, device, num_blocks=2**31 // per_block + 340)
    check(problem, *problem.run())
