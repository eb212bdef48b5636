"""reshape_and_cache and gather_blocks against the oracle: poisoned slots and tables, padding,
strides, fp8 with scales, ids near the end of a cache beyond 2^31 elements."""

from __future__ import annotations

import math

import pytest
import torch
from cases import CACHE_CORNERS, CACHE_CORRECTNESS, CacheCase
from operands import DTYPES, FLOAT8, LAYOUTS, Arena, assert_same
from torch import Tensor

from pagedkv import ops
from pagedkv.ops import reference

CASES = CACHE_CORRECTNESS + CACHE_CORNERS
ABSURD_ID = 2**31 - 1


def name_of(value: object) -> str:
    return str(getattr(value, "name", value)).removeprefix("torch.")


def shuffled_slots(case: CacheCase) -> Tensor:
    """Distinct slots in random order, a third of them padding when there is room to pad."""
    slots = torch.randperm(case.num_blocks * case.block_size)[: case.num_tokens]
    if case.num_tokens > 2:
        slots[torch.randperm(case.num_tokens)[: case.num_tokens // 3]] = -1
        slots[0] = -(2**40)
    return slots


def new_rows(case: CacheCase, dtype: torch.dtype, extra: int = 0) -> Tensor:
    return torch.randn(case.num_tokens + extra, case.num_kv_heads, case.head_dim).to(dtype)


def poisoned_cache(case: CacheCase, dtype: torch.dtype) -> Tensor:
    shape = (case.num_blocks, case.num_kv_heads, case.block_size, case.head_dim)
    return torch.full(shape, math.nan, dtype=torch.float32).to(dtype)


def scale_of(kind: str, num_kv_heads: int) -> Tensor:
    if kind == "tensor":
        return torch.tensor([0.03])
    return torch.rand(2 * num_kv_heads)[::2] + 0.01  # per head, and strided


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_reshape_and_cache_writes_the_named_slots_alone(case, dtype, layout) -> None:
    torch.manual_seed(0)
    arena = Arena()
    # More rows than slots: those of a padded batch, which must not be read into the cache.
    key = arena.make(new_rows(case, dtype, extra=2), layout)
    value = arena.make(new_rows(case, dtype, extra=2), "sliced")
    key_cache = arena.make(poisoned_cache(case, dtype), layout)
    value_cache = arena.make(poisoned_cache(case, dtype), "transposed")
    slots = arena.make(shuffled_slots(case))
    expected = key_cache.clone(), value_cache.clone()
    reference.reshape_and_cache(key, value, *expected, slots)
    arena.remember()
    ops.reshape_and_cache(key, value, key_cache, value_cache, slots)
    arena.check_untouched([key_cache, value_cache])
    assert_same(key_cache, expected[0], "key_cache")
    assert_same(value_cache, expected[1], "value_cache")


@pytest.mark.parametrize("kind", ["tensor", "head"])
@pytest.mark.parametrize("float8", FLOAT8, ids=name_of)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_reshape_and_cache_quantises_as_the_oracle(case, dtype, float8, kind) -> None:
    torch.manual_seed(0)
    arena = Arena()
    # Magnitudes from far below the smallest fp8 to far above the largest.
    spread = torch.exp2(torch.randint(-30, 16, (case.num_tokens, case.num_kv_heads, 1)).float())
    key = arena.make((new_rows(case, torch.float32) * spread).to(dtype), "sliced")
    value = arena.make(new_rows(case, dtype), "offset")
    key_cache = arena.make(poisoned_cache(case, float8), "offset")
    value_cache = arena.make(poisoned_cache(case, float8), "sliced")
    slots = shuffled_slots(case)
    k_scale, v_scale = scale_of(kind, case.num_kv_heads), torch.tensor([8.0])
    expected = key_cache.clone(), value_cache.clone()
    reference.reshape_and_cache(key, value, *expected, slots, k_scale=k_scale, v_scale=v_scale)
    arena.remember()
    ops.reshape_and_cache(
        key, value, key_cache, value_cache, slots, k_scale=k_scale, v_scale=v_scale
    )
    arena.check_untouched([key_cache, value_cache])
    assert_same(key_cache, expected[0], "key_cache")
    assert_same(value_cache, expected[1], "value_cache")


@pytest.mark.parametrize("float8", FLOAT8, ids=name_of)
def test_quantising_covers_every_fp16_number(float8) -> None:
    # Ties, denormals, saturation, infinities and NaN: all 65,536 of them.
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    key = every.view(1024, 1, 64)
    caches = [torch.zeros(64, 1, 16, 64, dtype=float8) for _ in range(2)]
    one = torch.ones(1)
    ops.reshape_and_cache(key, key, *caches, torch.arange(1024), k_scale=one, v_scale=one)
    got = caches[0].view(1024, 1, 64)
    largest = torch.finfo(float8).max
    assert_same(got, key.float().clamp(-largest, largest).to(float8))
    finite = ~torch.isnan(key)
    assert torch.isfinite(got.float()[finite]).all()
    assert torch.isnan(got.float()[~finite]).all()


@pytest.mark.parametrize("float8", FLOAT8, ids=name_of)
def test_gather_of_every_fp8_number_is_exact(float8) -> None:
    cache = torch.arange(256, dtype=torch.uint8).view(float8).view(4, 1, 1, 64)
    tables, start = torch.tensor([[0, 1, 2, 3]]).int(), torch.tensor([0, 4]).int()
    key, value = torch.empty(4, 1, 64), torch.empty(4, 1, 64)
    scale = torch.tensor([0.5])
    ops.gather_blocks(key, value, cache, cache, tables, start, k_scale=scale, v_scale=scale)
    expected = cache.float().view(4, 1, 64) * 0.5
    assert_same(key, expected)
    assert_same(value, expected)


def tables_and_starts(case: CacheCase) -> tuple[Tensor, Tensor]:
    """Three sequences, one of them empty, over shuffled blocks. Entries past a sequence's end are
    ids that no cache has."""
    first = case.num_tokens // 3
    lens = [first, 0, case.num_tokens - first]
    width = max(lens) // case.block_size + 2
    tables = torch.full((3, width), ABSURD_ID, dtype=torch.int32)
    for s, seq_len in enumerate(lens):
        num_used = (seq_len + case.block_size - 1) // case.block_size
        tables[s, :num_used] = torch.randint(max(case.num_blocks, 1), (num_used,)).int()
    starts = torch.tensor([0, lens[0], lens[0], sum(lens)], dtype=torch.int32)
    return tables, starts


def filled_cache(case: CacheCase, tables: Tensor, starts: Tensor, dtype: torch.dtype) -> Tensor:
    """NaN in every slot that no sequence owns."""
    cache = poisoned_cache(case, dtype)
    lens = (starts[1:] - starts[:-1]).tolist()
    for table, seq_len in zip(tables.tolist(), lens, strict=True):
        for j in range(seq_len):
            row = torch.randn(case.num_kv_heads, case.head_dim)
            cache[table[j // case.block_size], :, j % case.block_size] = row.to(dtype)
    return cache


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_gather_blocks_reads_the_owned_slots_alone(case, dtype, layout) -> None:
    torch.manual_seed(0)
    arena = Arena()
    tables, starts = tables_and_starts(case)
    key_cache = arena.make(filled_cache(case, tables, starts, dtype), layout)
    value_cache = arena.make(filled_cache(case, tables, starts, dtype), "sliced")
    tables = arena.make(tables, "sliced")
    # Two more rows than are asked for, which stay as they are.
    key = arena.make(torch.full_like(new_rows(case, dtype, extra=2), math.nan), layout)
    value = arena.make(torch.full_like(key, math.nan), "transposed")
    expected = key.clone(), value.clone()
    reference.gather_blocks(*expected, key_cache, value_cache, tables, starts)
    arena.remember()
    ops.gather_blocks(key, value, key_cache, value_cache, tables, starts)
    arena.check_untouched([key, value])
    assert_same(key, expected[0], "key")
    assert_same(value, expected[1], "value")
    assert not torch.isnan(key[: case.num_tokens]).any()
    assert torch.isnan(key[case.num_tokens :]).all()


@pytest.mark.parametrize("kind", ["tensor", "head"])
@pytest.mark.parametrize("float8", FLOAT8, ids=name_of)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_gather_blocks_restores_real_values(case, dtype, float8, kind) -> None:
    torch.manual_seed(0)
    tables, starts = tables_and_starts(case)
    key_cache = filled_cache(case, tables, starts, float8)
    value_cache = filled_cache(case, tables, starts, float8)
    key, value = new_rows(case, dtype), new_rows(case, dtype)
    scales = {"k_scale": scale_of(kind, case.num_kv_heads), "v_scale": torch.tensor([8.0])}
    expected = torch.empty_like(key), torch.empty_like(value)
    reference.gather_blocks(*expected, key_cache, value_cache, tables, starts, **scales)
    ops.gather_blocks(key, value, key_cache, value_cache, tables, starts, **scales)
    assert_same(key, expected[0], "key")
    assert_same(value, expected[1], "value")


def test_what_was_cached_is_gathered() -> None:
    torch.manual_seed(0)
    block_size, tokens = 16, 100
    key, value = torch.randn(2, tokens, 3, 64).bfloat16()
    table = torch.randperm(20)[:7]
    position = torch.arange(tokens)
    slots = table[position // block_size] * block_size + position % block_size
    caches = [torch.zeros(20, 3, block_size, 64).bfloat16() for _ in range(2)]
    ops.reshape_and_cache(key, value, *caches, slots)
    back = torch.empty_like(key), torch.empty_like(value)
    start = torch.tensor([0, tokens], dtype=torch.int32)
    ops.gather_blocks(*back, *caches, table.int().unsqueeze(0), start)
    assert_same(back[0], key)
    assert_same(back[1], value)


def test_blocks_beyond_two_to_the_31_elements() -> None:
    # 2 GiB of address space for each cache; only the pages of the last block are ever touched.
    block_size, head_dim = 16, 64
    num_blocks = 2**31 // (block_size * head_dim) + 3
    last = num_blocks - 1
    caches = [
        torch.empty(num_blocks, 1, block_size, head_dim, dtype=torch.float8_e4m3fn)
        for _ in range(2)
    ]
    one = torch.ones(1)
    key = torch.arange(-32.0, 32.0).view(1, 1, 64)
    slots = torch.tensor([last * block_size + 5])
    ops.reshape_and_cache(key, -key, *caches, slots, k_scale=one, v_scale=one)
    for cache, row in zip(caches, (key, -key), strict=True):
        assert_same(cache[last, 0, 5].float(), row.flatten().to(cache.dtype).float())
    back = torch.empty(6, 1, 64), torch.empty(6, 1, 64)
    table, start = torch.tensor([[last]]).int(), torch.tensor([0, 6]).int()
    ops.gather_blocks(*back, *caches, table, start, k_scale=one, v_scale=one)
    assert_same(back[0][5], caches[0][last, :, 5].float())
    assert_same(back[1][5], caches[1][last, :, 5].float())
