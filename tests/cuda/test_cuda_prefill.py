"""Prefill on the GPU where its main loop runs long: many tiles a block, many steps a tile, logits
that outgrow what was seen first."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from gpu_attention_cases import POISON_ID, Case, Problem, check

TILE_ROWS = 128  # of the wgmma kernel, in packed rows of one KV head
TOLD_AHEAD = 4  # tiles, at most (kTileSlots)

LONG = ((300, 3000), (1, 50), (1000, 1000), (17, 4000), (0, 0), (513, 700), (130, 0), (2000, 2000))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(32, 8), (12, 4), (4, 4), (64, 1)])
@pytest.mark.parametrize(("head_dim", "block_size"), [(128, 16), (64, 8), (112, 128)])
def test_many_tiles_in_either_order(
    dtype: torch.dtype,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    device: torch.device,
) -> None:
    case = Case("long", LONG, num_heads, num_kv_heads, head_dim, block_size, dtype)
    problem = Problem(case, device)
    out, lse = problem.run()
    check(problem, out, lse)
    prefilled = torch.cat([torch.arange(0, 300), torch.arange(301, 1301)]).to(device)
    # One pass has no place for a counter: tiles are shared out in a fixed order.
    fixed, fixed_lse = problem.run(num_splits=1)
    assert torch.equal(out[prefilled], fixed[prefilled])
    assert torch.equal(lse[prefilled], fixed_lse[prefilled])


def test_many_tiles_in_a_row_that_see_no_key(device: torch.device) -> None:
    # Rows of a sequence without keys, between tiles that have work: so many tiles of them that a
    # block meets more in a row than it is told ahead (TOLD_AHEAD), on a GPU of any size.
    blocks = torch.cuda.get_device_properties(device).multi_processor_count
    case = Case("none", ())
    tiles_a_token = case.num_heads / TILE_ROWS
    empty = math.ceil((TOLD_AHEAD + 2) * blocks / tiles_a_token)
    rows = ((700, 700), (empty, 0), (3000, 3000), (0, 0), (500, 0), (1, 0), (1, 9))
    problem = Problem(replace(case, rows=rows), device)
    out, lse = problem.run()
    check(problem, out, lse)
    fixed, fixed_lse = problem.run(num_splits=1)
    check(problem, fixed, fixed_lse)


@pytest.mark.parametrize("window", [0, 900])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_early_keys_that_weigh_more_than_anything_before(
    dtype: torch.dtype, window: int, device: torch.device
) -> None:
    # Steps run from the last keys to the first, so these come late; only for a few rows, so that
    # neighbouring warps differ.
    problem = Problem(Case("rising", ((300, 1500),), dtype=dtype, window=window), device)
    early = problem.operands["block_tables"][0, : 700 // 16].long()
    early = early[early != POISON_ID]  # entries that lie behind every row's window
    assert len(early) > 10
    problem.caches[0][early] *= 40
    query = problem.operands["query"]
    ordinary = torch.arange(len(query), device=device) % 7 != 3
    query[ordinary] *= 0.01
    out, lse = problem.run()
    check(problem, out, lse)
    assert lse[:300].max() > 100, "the case is not what it says"
