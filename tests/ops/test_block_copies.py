"""copy_blocks and swap_blocks: whole blocks of all layers, in order, and nothing else."""

from __future__ import annotations

import pytest
import torch
from operands import DTYPES, FLOAT8, Arena, assert_same
from torch import Tensor

from pagedkv import ops
from pagedkv.ops import reference

PAIRS = {
    "one": [(3, 1)],
    "fan_out": [(3, 1), (3, 0), (3, 4)],
    "chain_in_order": [(0, 1), (1, 2), (2, 3)],
    "last_write_wins": [(0, 4), (1, 4), (2, 4)],
    "exchange_through_a_third": [(0, 4), (1, 0), (4, 1)],
    "onto_itself": [(2, 2), (2, 0)],
    "none": [],
}


def pool_of(num_blocks: int, dtype: torch.dtype, num_layers: int = 2) -> Tensor:
    return torch.randn(num_layers, 2, num_blocks, 3, 4, 8).to(dtype)


def pairs_of(name: str) -> Tensor:
    return torch.tensor(PAIRS[name], dtype=torch.int64).view(-1, 2)


@pytest.mark.parametrize("layout", ["contiguous", "sliced", "transposed", "offset"])
@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("dtype", [*DTYPES, *FLOAT8], ids=str)
def test_copy_blocks_runs_the_pairs_in_order(dtype, name, layout) -> None:
    torch.manual_seed(0)
    arena = Arena()
    pool = arena.make(pool_of(5, dtype), layout)
    expected = pool.clone()
    reference.copy_blocks(expected, pairs_of(name))
    arena.remember()
    ops.copy_blocks(pool, pairs_of(name))
    arena.check_untouched([pool])
    assert_same(pool, expected)


@pytest.mark.parametrize("layouts", [("contiguous", "sliced"), ("transposed", "contiguous")])
@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("dtype", [*DTYPES, *FLOAT8], ids=str)
def test_swap_blocks_moves_blocks_between_pools(dtype, name, layouts) -> None:
    torch.manual_seed(0)
    arena = Arena()
    source = arena.make(pool_of(5, dtype), layouts[0])
    destination = arena.make(pool_of(7, dtype), layouts[1])
    expected = destination.clone()
    reference.swap_blocks(source, expected, pairs_of(name))
    arena.remember()
    ops.swap_blocks(source, destination, pairs_of(name))
    arena.check_untouched([destination])
    assert_same(destination, expected)


def test_swapped_out_and_in_again_is_the_same() -> None:
    pool = pool_of(6, torch.bfloat16)
    host = torch.full_like(pool_of(2, torch.bfloat16), torch.nan)
    before = pool.clone()
    ops.swap_blocks(pool, host, torch.tensor([[4, 1], [2, 0]]))
    pool[:, :, [2, 4]] = torch.nan
    ops.swap_blocks(host, pool, torch.tensor([[1, 4], [0, 2]]))
    assert_same(pool, before)


@pytest.mark.parametrize("shape", [(0, 2, 3, 2, 4, 8), (1, 2, 3, 0, 4, 8), (1, 2, 3, 2, 0, 8)])
def test_pools_without_elements_are_left_alone(shape) -> None:
    pool = torch.empty(shape)
    ops.copy_blocks(pool, torch.tensor([[0, 1]]))
    ops.swap_blocks(pool, torch.empty(shape), torch.tensor([[0, 1]]))


def test_blocks_beyond_two_to_the_31_elements() -> None:
    # 4 GiB of address space; only the pages of two blocks are touched.
    num_blocks = 2**31 // 1024 + 3
    pool = torch.empty(1, 2, num_blocks, 1, 16, 64, dtype=torch.float8_e5m2)
    pool[:, :, 1] = torch.arange(64.0).to(pool.dtype)
    ops.copy_blocks(pool, torch.tensor([[1, num_blocks - 1]]))
    assert_same(pool[:, :, num_blocks - 1], pool[:, :, 1])
