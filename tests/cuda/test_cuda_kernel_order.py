"""Kernels that overlap the end of the one before them still see all that it wrote."""

from __future__ import annotations

import math

import pytest
import torch
from gpu_attention_cases import Case, Problem, decode

from pagedkv import ops

ROWS, SHARED, OWN, BLOCK, HEADS, KV_HEADS, DIM = 64, 16, 3, 16, 8, 2, 128  # lengths in blocks


@pytest.mark.parametrize("num_splits", [0, 3])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("query_lens", [(1,), (16,), (40,), (1, 40)], ids=str)
def test_attention_sees_the_keys_that_the_op_before_it_wrote(
    query_lens, grouped, num_splits, device
) -> None:
    # A long write, the blocks that matter last in it, then attention at once; the same again when
    # the write has ended for certain. Up to 16 tokens are decoded; 40 are prefilled, by a kernel
    # that starts beside decode.
    spare = 2000  # blocks that only make the write long
    used = SHARED + ROWS * OWN
    caches = [
        torch.zeros(used + spare, KV_HEADS, BLOCK, DIM, device=device).bfloat16() for _ in range(2)
    ]
    own = torch.arange(SHARED, used).view(ROWS, OWN)
    tables = torch.cat([torch.arange(SHARED).expand(ROWS, SHARED), own], 1).int().to(device)
    slots = torch.arange((used + spare) * BLOCK, device=device).flip(0)
    positions = torch.zeros_like(slots)
    table = torch.cat([torch.ones(1, DIM // 2), torch.zeros(1, DIM // 2)], 1).to(device)
    starts = torch.tensor([0, *query_lens * (ROWS // len(query_lens))]).cumsum(0).int()
    tokens = int(starts[-1])
    call = {
        "block_tables": tables,
        "seq_lens": torch.full((ROWS,), (SHARED + OWN) * BLOCK, dtype=torch.int32, device=device),
        "query_start_loc": starts.to(device),
        "max_query_len": max(query_lens),
        "scale": DIM**-0.5,
        "num_splits": num_splits,
        "prefix_groups": torch.tensor([[0, ROWS, SHARED]], dtype=torch.int32, device=device)
        if grouped
        else None,
    }
    rows = len(slots)
    for fused in (False, True, False, True):
        key, value = torch.randn(2, rows, KV_HEADS, DIM, device=device).bfloat16()
        query = torch.randn(rows, HEADS, DIM, device=device).bfloat16()
        outs = [
            torch.full((tokens, HEADS, DIM), math.nan, device=device).bfloat16() for _ in range(2)
        ]
        torch.cuda.synchronize()
        if fused:  # position 0: turned by no angle
            ops.fused_rotary_reshape_and_cache(positions, query, key, value, table, *caches, slots)
        else:
            ops.reshape_and_cache(key, value, *caches, slots)
        ops.paged_attention(outs[0], None, query[:tokens], *caches, **call)
        torch.cuda.synchronize()
        ops.paged_attention(outs[1], None, query[:tokens], *caches, **call)
        assert torch.equal(outs[0].view(torch.int16), outs[1].view(torch.int16))


AFTER = (
    Case("small_batch", decode(*[8000] * 4)),
    Case("decode", decode(*[3000] * 40)),
    Case("prefill_beside_decode", (*decode(*[6000] * 40), (70, 70))),
    Case("pieces", (*decode(*[3000] * 40), (70, 70)), num_splits=3),
    Case("prefix", (*decode(*[900] * 40), (70, 70)), groups=((0, 40, 20),)),
    Case("float8", (*decode(*[6000] * 40), (70, 70)), cache_dtype=torch.float8_e4m3fn),
)


@pytest.mark.parametrize("case", AFTER, ids=lambda case: case.name)
def test_the_op_behind_attention_sees_all_of_its_rows(case, device) -> None:
    # Prefill ends before the decode that runs beside it; a row that is read too early is NaN.
    problem = Problem(case, device)
    query, rows = problem.operands["query"], problem.num_tokens
    weight = torch.ones(case.num_heads * case.head_dim, device=device).to(query.dtype)
    results = []
    for waits in (False, True, False):
        out = torch.full_like(query, math.nan)
        normed = torch.empty(rows, len(weight), dtype=query.dtype, device=device)
        torch.cuda.synchronize()
        ops.paged_attention(out, None, **problem.operands)
        if waits:
            torch.cuda.synchronize()
        ops.rms_norm(normed, out[:rows].flatten(1), weight, 1e-5)
        results.append(normed)
    assert torch.isfinite(results[1]).all()
    for result in results:
        assert torch.equal(result.view(torch.int16), results[1].view(torch.int16))
