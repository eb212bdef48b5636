"""What must not change a result of paged attention on the CPU, not by one bit: how a prompt is cut
into chunks, who else is in the batch, threads, block size, the workspace. And numbers at the edge:
huge logits, NaN where nobody looks, caches beyond 2^31 elements."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_cases import AttentionCase
from attention_operands import AttentionCall, again, make, oracle, plain
from operands import Arena, assert_matches, assert_same
from torch import Tensor

from pagedkv import ops

DTYPES = ("float32", "bfloat16")
MIXED = ((1500, 1), (0, 1), (130, 100), (40, 3), (2100, 1), (7, 7), (700, 90))


def attend(call: AttentionCall, **changes: Any) -> tuple[Tensor, Tensor]:
    """out and lse of a fresh run."""
    fresh = again(call)
    ops.paged_attention(**fresh.arguments(**changes))
    assert fresh.lse is not None
    return fresh.out[: call.num_rows], fresh.lse[: call.num_rows]


def assert_same_results(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> None:
    assert_same(got[0], want[0])
    assert_same(got[1], want[1], "lse")


def one_sequence(call: AttentionCall, s: int) -> dict[str, Any]:
    """Operands of a batch of sequence s alone."""
    starts = call.inputs["query_start_loc"].tolist()
    rows = slice(starts[s], starts[s + 1])
    return {
        "query": call.inputs["query"][rows],
        "block_tables": call.inputs["block_tables"][s : s + 1],
        "seq_lens": call.inputs["seq_lens"][s : s + 1],
        "query_start_loc": torch.tensor([0, rows.stop - rows.start], dtype=torch.int32),
        "out": torch.empty_like(call.inputs["query"][rows]),
        "lse": torch.empty(rows.stop - rows.start, call.out.size(1)),
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cache", ["same", "float8_e4m3fn"])
def test_neighbours_do_not_matter(dtype: str, cache: str) -> None:
    call = make(AttentionCase("mixed", MIXED, dtype=dtype, cache=cache))
    out, lse = attend(call)
    starts = call.inputs["query_start_loc"].tolist()
    for s in range(len(MIXED)):
        alone = call.arguments(**one_sequence(call, s))
        ops.paged_attention(**alone)
        rows = slice(starts[s], starts[s + 1])
        assert_same_results((alone["out"], alone["lse"]), (out[rows], lse[rows]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 90])
def test_chunks_of_a_prompt_do_not_matter(dtype: str, window: int) -> None:
    whole = make(AttentionCase("whole", ((600, 600),), dtype=dtype, window=window))
    out, lse = attend(whole)
    begin = 0
    for size in (70, 300, 100, 130):  # enough rows each that keys are not cut into pieces
        end = begin + size
        changes = {
            "query": whole.inputs["query"][begin:end],
            "seq_lens": torch.tensor([end], dtype=torch.int32),
            "query_start_loc": torch.tensor([0, size], dtype=torch.int32),
            "out": torch.empty_like(out[begin:end]),
            "lse": torch.empty_like(lse[begin:end]),
        }
        ops.paged_attention(**whole.arguments(**changes))
        assert_same_results((changes["out"], changes["lse"]), (out[begin:end], lse[begin:end]))
        begin = end


@pytest.mark.parametrize("num_splits", [0, 1, 3])
def test_threads_do_not_matter(num_splits: int) -> None:
    call = make(AttentionCase("mixed", MIXED, num_splits=num_splits))
    want = attend(call)
    for threads in (2, 5):
        torch.set_num_threads(threads)
        assert_same_results(attend(call), want)


@pytest.mark.parametrize("block_size", [1, 7, 256])
def test_block_size_does_not_matter(block_size: int) -> None:
    call = make(AttentionCase("blocks of 16", ((300, 1), (200, 60))))
    want = attend(call)
    counts = [-(-seq_len // block_size) for seq_len, _ in call.case.sequences]
    tables = torch.full((2, max(counts)), -1, dtype=torch.int32)
    order = torch.randperm(sum(counts))
    tables[0, : counts[0]], tables[1, : counts[1]] = order.int().split(counts)
    moved = {"block_tables": tables}
    for name in ("key_cache", "value_cache"):
        old = call.inputs[name]
        moved[name] = torch.full((sum(counts), old.size(1), block_size, old.size(3)), math.nan)
        for s, (seq_len, _) in enumerate(call.case.sequences):
            for j in range(seq_len):
                block = call.inputs["block_tables"][s, j // 16]
                moved[name][tables[s, j // block_size], :, j % block_size] = old[block, :, j % 16]
    assert_same_results(attend(call, **moved), want)


@pytest.mark.parametrize(
    ("num_splits", "prefix", "is_used"), [(1, None, False), (3, None, True), (2, (0, 2, 2), True)]
)
def test_the_workspace_is_used_as_promised(
    num_splits: int, prefix: tuple[int, int, int] | None, is_used: bool
) -> None:
    case = AttentionCase("split", ((90, 1), (80, 3)), num_splits=num_splits, prefix=prefix)
    call = make(case)
    want = attend(call)
    num_groups = len(call.options["prefix_groups"]) if prefix else 0
    size = ops.paged_attention_workspace_size(
        *call.out.shape, num_splits=num_splits, num_prefix_groups=num_groups
    )
    arena = Arena()
    workspace = arena.make(torch.full((size,), 0xFF, dtype=torch.uint8))
    arena.remember()
    assert_same_results(attend(call, workspace=workspace), want)
    arena.check_untouched([workspace])
    assert bool((workspace != 0xFF).any()) == is_used


def test_the_automatic_cut_may_need_more_than_the_workspace() -> None:
    case = AttentionCase("long", tuple((9000, 1) for _ in range(8)), num_kv_heads=1, group=8)
    call = make(case)
    want = attend(call)
    size = ops.paged_attention_workspace_size(len(call.out), 8, 64)
    assert size < 8 * 8 * 9 * (64 + 2) * 4  # nine pieces of 1,024 keys
    arena = Arena()
    workspace = arena.make(torch.full((size,), 0xFF, dtype=torch.uint8))
    arena.remember()
    assert_same_results(attend(call, workspace=workspace), want)
    arena.check_untouched([workspace])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("query_len", [1, 40])
def test_a_row_that_sees_one_key_is_its_value(dtype: str, query_len: int) -> None:
    call = make(AttentionCase("own", ((75, query_len),), dtype=dtype, window=1, group=4))
    out, _ = attend(call)
    for i in range(query_len):
        j = 75 - query_len + i
        block = call.inputs["block_tables"][0, j // 16]
        value = call.inputs["value_cache"][block, :, j % 16]
        # Its weight is 1 up to the rounding of one multiply-add.
        rtol = 2 * torch.finfo(torch.float32).eps if dtype == "float32" else 0
        torch.testing.assert_close(out[i], value.repeat_interleave(4, dim=0), rtol=rtol, atol=0)


@pytest.mark.parametrize("query_len", [1, 60])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_no_row_sees_is_not_read(query_len: int, dtype: str) -> None:
    """Blocks behind the window may have been given to somebody else: their table entries are
    absurd ids in every case here, and so the rest of the first block is left to see to.
    """
    call = make(AttentionCase("window", ((700, query_len),), dtype=dtype, window=33))
    want = attend(call)
    for name in ("key_cache", "value_cache"):
        for j in range((700 - query_len - 32) // 16 * 16, 700 - query_len - 32):
            block = call.inputs["block_tables"][0, j // 16]
            call.inputs[name][block, :, j % 16] = math.nan
    assert_same_results(attend(call), want)


@pytest.mark.parametrize("query_len", [1, 2, 40])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_stays_in_its_row(query_len: int, dtype: str) -> None:
    call = make(AttentionCase("nan", ((90, query_len),), dtype=dtype, group=4))
    want_out, want_lse = attend(call)
    call.inputs["query"][query_len // 2, 1, 5] = math.nan
    out, lse = attend(call)
    assert torch.isnan(out[query_len // 2, 1]).all()
    assert torch.isnan(lse[query_len // 2, 1])
    out[query_len // 2, 1], lse[query_len // 2, 1] = 0, 0
    want_out[query_len // 2, 1], want_lse[query_len // 2, 1] = 0, 0
    assert_same_results((out, lse), (want_out, want_lse))


@pytest.mark.parametrize("scale", [0.0, -0.2, 3.0, 40.0])
@pytest.mark.parametrize("soft_cap", [0.0, 20.0])
def test_any_finite_scale(scale: float, soft_cap: float) -> None:
    call = make(AttentionCase("scale", ((90, 1), (50, 20), (1100, 2)), soft_cap=soft_cap))
    call = replace(call, options=call.options | {"scale": scale})
    out, lse = attend(call)
    truth, truth_lse = oracle(call)
    rough, rough_lse = plain(call)
    assert_matches(out, truth[: call.num_rows], rough[: call.num_rows])
    assert_matches(lse, truth_lse[: call.num_rows], rough_lse[: call.num_rows], "lse")


@pytest.mark.parametrize("query_len", [1, 20])
def test_ids_beyond_2_31_elements(query_len: int) -> None:
    block_size, head_dim = 16, 256
    num_blocks = 2**31 // (block_size * head_dim) + 5
    # Only the pages of the used blocks are ever touched.
    cache = torch.empty(num_blocks, 1, block_size, head_dim, dtype=torch.float8_e5m2)
    small = torch.randn(3, 1, block_size, head_dim).to(torch.float8_e5m2)
    cache[-3:] = small
    results = []
    for keys, first in ((small, 0), (cache, num_blocks - 3)):
        torch.manual_seed(0)
        out = torch.empty(query_len, 2, head_dim)
        ops.paged_attention(
            out,
            None,
            torch.randn(query_len, 2, head_dim),
            keys,
            keys,
            torch.tensor([[first + 2, first, first + 1]], dtype=torch.int32),
            torch.tensor([41], dtype=torch.int32),
            torch.tensor([0, query_len], dtype=torch.int32),
            max_query_len=query_len,
            scale=0.1,
            k_scale=torch.ones(1),
            v_scale=torch.ones(1),
        )
        results.append(out)
    assert_same(results[1], results[0])
