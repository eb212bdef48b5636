"""Faults that paged attention kernels have had elsewhere, each as the behaviour that is right.

Captured graphs and strides of query and out are in test_cuda_paged_attention.py; so are head sizes
and block sizes. Caches beyond 2^31 elements: test_cuda_beyond_2_31.py.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from gpu_attention_cases import (
    E4M3,
    E5M2,
    MIXED,
    POISON_ID,
    Case,
    Problem,
    check,
    decode,
    raw,
)
from torch import Tensor

from pagedkv.ops import (
    merge_attention_states,
    paged_attention,
    paged_attention_workspace_size,
    reference,
)

# One of each way through the kernels: decode, pieces, chunks, float8, and the plain kernel.
PATHS = {
    "decode": Case("decode", (*decode(70, 500), (2, 33))),
    "pieces": Case("pieces", (*decode(70, 500), (90, 300)), num_splits=3),
    "chunks": Case("chunks", ((100, 100), (90, 333))),
    "float8": Case("float8", (*decode(70, 500), (90, 333)), cache_dtype=E4M3),
    "plain": Case("plain", (*decode(70), (90, 100)), block_size=3),
    "fp32": Case("fp32", (*decode(70), (90, 100)), dtype=torch.float32, head_dim=64),
}

every_path = pytest.mark.parametrize("path", PATHS)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(raw(a), raw(b))


@every_path
def test_slots_past_the_end_of_a_sequence_never_reach_the_output(path, device) -> None:
    # The last block's tail, whole blocks that a table lists too early, and every block of nobody
    # are NaN (Problem); infinities there must not come through either.
    problem = Problem(PATHS[path], device)
    out, lse = problem.run()
    check(problem, out, lse)
    for cache in problem.caches:
        poison = torch.isnan(cache.float())
        stored = cache.to(torch.float32)
        stored[poison] = math.inf
        cache.copy_(stored.to(cache.dtype))
    again, lse_again = problem.run()
    assert same_bits(out, again)
    assert same_bits(lse, lse_again)


@every_path
def test_a_block_that_is_listed_before_it_is_needed_is_not_read(path, device) -> None:
    problem = Problem(PATHS[path], device)
    want, _ = problem.run()
    # The absurd ids behind each sequence's blocks become a valid one, of NaN.
    used = {b for row in problem.operands["block_tables"].tolist() for b in row if b < 2**30}
    spare = next(b for b in range(problem.caches[0].size(0)) if b not in used)
    tables = problem.operands["block_tables"]
    tables[tables >= 2**30] = spare
    out, _ = problem.run()
    assert same_bits(out, want)


@every_path
def test_a_table_without_a_spare_column_is_not_read_past_its_end(path, device) -> None:
    problem = Problem(PATHS[path], device)
    want, _ = problem.run()
    tables = problem.operands["block_tables"]
    width = max(-(-n // problem.case.block_size) for _, n in problem.case.rows)
    # The last row ends with its allocation: memcheck sees a read behind it.
    exact = tables[:, :width].contiguous()
    out, _ = problem.run(block_tables=exact)
    assert same_bits(out, want)


@pytest.mark.parametrize("max_query_len", [91, 5000])
@every_path
def test_max_query_len_may_be_more_than_there_are(path, max_query_len, device) -> None:
    # As in a graph that was captured for longer chunks: kernels for them find nothing to do.
    problem = Problem(PATHS[path], device)
    check(problem, *problem.run(max_query_len=max(max_query_len, problem.num_tokens)))


@every_path
def test_a_wider_table_changes_nothing(path, device) -> None:
    # How work is divided depends on the lengths, never on the width of the table.
    problem = Problem(PATHS[path], device)
    want, want_lse = problem.run()
    tables = problem.operands["block_tables"]
    wide = torch.full((tables.size(0), 5000), 2**30, dtype=torch.int32, device=device)
    wide[:, : tables.size(1)] = tables
    out, lse = problem.run(block_tables=wide)
    assert same_bits(out, want)
    assert same_bits(lse, want_lse)


@pytest.mark.parametrize("num_splits", [0, 1, 2, 7])
@pytest.mark.parametrize("cache_dtype", [None, E4M3])
def test_empty_rows_are_zero_with_lse_minus_infinity_on_every_path(
    num_splits, cache_dtype, device
) -> None:
    # Padding of one token and of many, between rows that have keys; a row of no query tokens.
    rows = ((1, 0), (1, 90), (1, 0), (0, 50), (80, 0), (70, 100), (0, 0), (1, 1), (3, 0))
    for block_size in (16, 3):
        case = Case(
            "empty", rows, num_splits=num_splits, cache_dtype=cache_dtype, block_size=block_size
        )
        problem = Problem(case, device)
        check(problem, *problem.run())


def test_padded_rows_of_a_replayed_graph_are_zero_again(device) -> None:
    # Three rows in a graph of four: what was NaN becomes 0, at every replay.
    problem = Problem(Case("graph", decode(70, 500, 33, 20)), device)
    out = torch.full_like(problem.operands["query"], math.nan)
    lse = torch.full(out.shape[:2], math.nan, device=device)
    size = paged_attention_workspace_size(out.size(0), 8, 128, device=device)
    workspace = torch.full((size,), 0xFF, dtype=torch.uint8, device=device)
    paged_attention(out, lse, workspace=workspace, **problem.operands)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        paged_attention(out, lse, workspace=workspace, **problem.operands)
    for lengths in ([70, 500, 33, 0], [0, 0, 0, 0], [1, 16, 17, 0], [70, 500, 33, 20]):
        problem.operands["seq_lens"].copy_(torch.tensor(lengths, dtype=torch.int32))
        out.fill_(math.nan)
        lse.fill_(math.nan)
        workspace.fill_(0xFF)  # a plan of an earlier run, or none at all
        graph.replay()
        want = torch.full_like(out, math.nan, dtype=torch.float32)
        want_lse = torch.full_like(lse, math.nan)
        reference.paged_attention(want, want_lse, **problem.operands)
        torch.testing.assert_close(out[:4].float(), want[:4], atol=0.03, rtol=0.03)
        torch.testing.assert_close(lse[:4], want_lse[:4], atol=2e-3, rtol=0)


def test_a_graph_follows_lengths_beyond_those_it_was_captured_with(device) -> None:
    problem = Problem(Case("grows", decode(5000, 3000, 4000, 2000)), device)
    seq_lens = problem.operands["seq_lens"]
    full = seq_lens.clone()
    seq_lens.fill_(1)
    out = torch.zeros_like(problem.operands["query"])
    paged_attention(out, None, **problem.operands)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        paged_attention(out, None, **problem.operands)
    seq_lens.copy_(full)
    graph.replay()
    want, _ = problem.run()
    assert same_bits(out[:4], want[:4])


@every_path
def test_nothing_is_written_behind_the_workspace(path, device) -> None:
    case = PATHS[path]
    problem = Problem(case, device)
    query = problem.operands["query"]
    size = paged_attention_workspace_size(
        query.size(0), case.num_heads, case.head_dim, num_splits=case.num_splits, device=device
    )
    room = torch.full((size + 4096,), 0x5A, dtype=torch.uint8, device=device)
    out = torch.empty_like(query)
    paged_attention(out, None, workspace=room[:size], **problem.operands)
    assert (room[size:] == 0x5A).all()
    if size:
        with pytest.raises(RuntimeError, match=f"workspace has {size - 1} bytes, expected at"):
            paged_attention(out, None, workspace=room[: size - 1], **problem.operands)


@pytest.mark.parametrize("num_splits", [0, 3, 64])
def test_pieces_outlive_the_call_that_allocated_them(num_splits, device) -> None:
    # The op's own workspace goes back to the allocator while the kernels still run; what is
    # allocated and filled next, on the same stream, comes after them.
    case = Case("frees", (*decode(3000, 40, 1), (90, 2000)), num_splits=num_splits)
    problem = Problem(case, device)
    want, _ = problem.run()
    for _ in range(5):
        out = torch.empty_like(want)
        torch.cuda._sleep(2_000_000)
        paged_attention(out, None, **problem.operands)
        junk = [torch.full((2**20 * k,), math.nan, device=device) for k in (1, 2, 4)]
        assert same_bits(out[: problem.num_tokens], want[: problem.num_tokens])
        del junk


@pytest.mark.parametrize("num_splits", [0, 1, 5])
def test_the_output_does_not_depend_on_whether_lse_is_asked_for(num_splits, device) -> None:
    problem = Problem(Case("lse", MIXED, num_splits=num_splits), device)
    with_lse, _ = problem.run()
    without = torch.full_like(with_lse, math.nan)
    paged_attention(without, None, **problem.operands)
    assert same_bits(with_lse, without)


@every_path
def test_strides_of_lse_are_honoured(path, device) -> None:
    problem = Problem(PATHS[path], device)
    _, want = problem.run()
    query = problem.operands["query"]
    tokens, heads = query.shape[:2]
    for lse in (
        torch.full((heads, tokens), math.nan, device=device).T,
        torch.full((tokens, 2 * heads + 3), math.nan, device=device)[:, 1 : 2 * heads : 2],
    ):
        paged_attention(torch.empty_like(query), lse, **problem.operands)
        assert same_bits(lse.contiguous(), want)


@pytest.mark.parametrize("path", [*PATHS, "prefix"])
def test_tables_lengths_slopes_and_scales_may_be_parts_of_larger_tensors(path, device) -> None:
    shared = Case("prefix", decode(*[300] * 12), groups=((0, 12, 17),))
    case = replace((PATHS | {"prefix": shared})[path], alibi=True, scale_per_head=True)
    problem = Problem(case, device)
    want, want_lse = problem.run()
    operands = problem.operands
    tables = operands["block_tables"]
    wide = torch.full((len(tables) + 1, tables.size(1) + 8), POISON_ID, dtype=torch.int32)
    moved = {"block_tables": wide.to(device)[1:, 3:-5].copy_(tables)}
    for name in ("seq_lens", "query_start_loc"):
        size = len(operands[name])
        junk = torch.full((size + 4,), POISON_ID, dtype=torch.int32, device=device)
        moved[name] = junk[1 : size + 1].copy_(operands[name])
    for step, name in enumerate(("alibi_slopes", "k_scale", "v_scale"), start=2):
        if name in operands:
            junk = torch.full((step * len(operands[name]),), math.nan, device=device)
            moved[name] = junk[::step].copy_(operands[name])
    out, lse = problem.run(**moved)
    assert same_bits(out, want)
    assert same_bits(lse, want_lse)


@pytest.mark.parametrize("group", [1, 4, 8])
def test_two_parts_merged_by_their_lse_are_the_whole(group, device) -> None:
    # Needs lse [tokens, heads] in the order of the query heads, also where they share KV heads.
    case = Case("parts", decode(160, 96), num_heads=2 * group, causal=False)
    problem = Problem(case, device)
    whole, whole_lse = problem.run()
    cut = 64
    seq_lens, tables = problem.operands["seq_lens"], problem.operands["block_tables"]
    head = problem.run(seq_lens=torch.full_like(seq_lens, cut))
    tail = problem.run(seq_lens=seq_lens - cut, block_tables=tables[:, cut // 16 :].contiguous())
    out, lse = torch.empty_like(whole), torch.empty_like(whole_lse)
    merge_attention_states(out, lse, *head, *tail)
    used = problem.num_tokens
    torch.testing.assert_close(out[:used], whole[:used], atol=0.02, rtol=0.02)
    torch.testing.assert_close(lse[:used], whole_lse[:used], atol=1e-3, rtol=0)


def test_two_empty_parts_merge_to_an_empty_one(device) -> None:
    nan = torch.full((3, 4, 64), math.nan, device=device)
    empty = torch.full((3, 4), -math.inf, device=device)
    out, lse = nan.clone(), torch.full_like(empty, math.nan)
    merge_attention_states(out, lse, nan, empty, nan.clone(), empty.clone())
    assert (out == 0).all()
    assert (lse == -math.inf).all()


@pytest.mark.parametrize("cache_dtype", [E4M3, E5M2])
@pytest.mark.parametrize("scales", [(0.01, 8.0), (8.0, 0.01), (1.0, 3.0)])
@pytest.mark.parametrize(("block_size", "num_splits"), [(16, 0), (16, 3), (3, 0)])
def test_scales_of_a_float8_cache_count_on_every_path(
    cache_dtype, scales, block_size, num_splits, device
) -> None:
    rows = (*decode(40, 300), (90, 200))
    case = Case(
        "scales", rows, cache_dtype=cache_dtype, block_size=block_size, num_splits=num_splits
    )
    problem = Problem(case, device)
    problem.operands["k_scale"] = torch.tensor([scales[0]], device=device)
    problem.operands["v_scale"] = torch.tensor([scales[1]], device=device)
    check(problem, *problem.run())


@pytest.mark.parametrize("dim", [128, 192])
def test_keys_and_values_of_two_head_sizes_are_refused(dim, device) -> None:
    problem = Problem(Case("sizes", decode(40), head_dim=dim, cache_dtype=E4M3), device)
    shorter = problem.caches[1][..., : dim - 64].contiguous()
    with pytest.raises(RuntimeError, match=r"value_cache has shape .*, expected"):
        problem.run(value_cache=shorter)


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 31, 32, 33, 64])
def test_a_window_sees_exactly_its_keys_at_block_edges(window, device) -> None:
    # Key j is visible to query i iff i - window < j <= i: with keys that all score alike, the
    # output is the mean of the values in the window.
    lengths = (1, 15, 16, 17, 31, 32, 33, 47, 48, 49, 64, 65)
    rows = (*decode(*lengths), (65, 65), (70, 129))
    problem = Problem(Case("window", rows, window=window, num_heads=2), device)
    keys, values = problem.caches
    keys[~torch.isnan(keys)] = 0
    out, _ = problem.run()
    row = 0
    for s, (query_len, seq_len) in enumerate(rows):
        blocks = problem.operands["block_tables"][s, : -(-seq_len // 16)].long()
        blocks[blocks == POISON_ID] = 0  # wholly before the window: in no mean
        mine = values[blocks].transpose(1, 2).flatten(0, 1)[:seq_len].float()
        for i in range(seq_len - query_len, seq_len):
            mean = mine[max(0, i - window + 1) : i + 1].mean(0)
            torch.testing.assert_close(out[row].float(), mean, atol=0.02, rtol=0.02)
            row += 1


@pytest.mark.parametrize("dim", [32, 40, 46, 72, 80, 96, 112, 120, 248, 256])
@pytest.mark.parametrize("block_size", [1, 8, 16, 256])
def test_head_sizes_and_block_sizes_outside_the_usual_are_right(dim, block_size, device) -> None:
    rows = (*decode(33, 257), (70, 90))
    problem = Problem(Case("size", rows, head_dim=dim, block_size=block_size), device)
    check(problem, *problem.run())


def test_a_head_size_beyond_the_kernels_is_refused(device) -> None:
    problem = Problem(Case("large", decode(8), head_dim=264), device)
    with pytest.raises(RuntimeError, match="head_dim is 264, expected 1 to 256"):
        problem.run()


@every_path
def test_queries_and_caches_at_odd_addresses_are_right(path, device) -> None:
    # 16-byte accesses are not possible: the kernels must notice.
    problem = Problem(PATHS[path], device)
    want, _ = problem.run()
    moved = {}
    for name in ("query", "key_cache", "value_cache"):
        tensor = problem.operands[name]
        buffer = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=device)
        view = buffer[1:].view(tensor.shape)
        raw(view).copy_(raw(tensor))
        moved[name] = view
    out, lse = problem.run(**moved)
    check(problem, out, lse)
    assert (
        out[: problem.num_tokens].float() - want[: problem.num_tokens].float()
    ).abs().max() < 0.05
