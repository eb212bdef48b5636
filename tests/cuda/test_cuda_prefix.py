"""Shared prefixes on the GPU against the fp32 oracle, under poison: read once, and repeating bit
for bit."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from gpu_attention_cases import POISON_ID, Case, Problem, check, decode
from gpu_prefix_cases import MIXED, PREFIX, PREFIX_SANITIZE, random_prefixes
from torch import Tensor

from pagedkv.ops import paged_attention, reference


def name_of(case: Case) -> str:
    return case.name


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("case", PREFIX, ids=name_of)
def test_agrees_with_the_oracle_and_repeats_bitwise(case: Case, device: torch.device) -> None:
    problem = Problem(case, device)
    before = [cache.clone() for cache in problem.caches]
    out, lse = problem.run()
    check(problem, out, lse)
    again, lse_again = problem.run()
    assert same_bits(out, again)
    assert same_bits(lse, lse_again)
    for cache, old in zip(problem.caches, before, strict=True):
        assert same_bits(cache.contiguous(), old.contiguous())


@pytest.mark.parametrize("case", random_prefixes(60, seed=3), ids=name_of)
def test_random_groups(case: Case, device: torch.device) -> None:
    problem = Problem(case, device)
    check(problem, *problem.run())


@pytest.mark.parametrize("case", PREFIX_SANITIZE, ids=name_of)
def test_sanitize(case: Case, device: torch.device) -> None:
    problem = Problem(case, device)
    check(problem, *problem.run())


@pytest.mark.parametrize("num_splits", [0, 1, 3])
def test_a_prefix_is_read_through_the_first_table_only(
    num_splits: int, device: torch.device
) -> None:
    """The others' entries for it name a block full of NaN, which no decoded row touches."""
    lengths = [700, 641, 690, 660, 641]
    problem = Problem(
        Case("once", decode(*lengths), groups=((0, 5, 40),), num_splits=num_splits), device
    )
    nan_block = problem.caches[0].isnan().flatten(1).all(1).nonzero()[0].item()
    tables = problem.operands["block_tables"].clone()
    tables[1:, :40] = nan_block
    out, lse = problem.run(block_tables=tables)
    check(problem, out, lse)
    alone, _ = problem.run(block_tables=tables, prefix_groups=None)
    assert not torch.allclose(alone[1:5], out[1:5])  # without groups they are read


@pytest.mark.parametrize("window", [5, 100, 660])
def test_nothing_behind_a_window_is_read(window: int, device: torch.device) -> None:
    """Table entries wholly before the window of a sequence's first query are absurd ids."""
    problem = Problem(replace(MIXED, window=window), device)
    tables = problem.operands["block_tables"].clone()
    for seq, (query_len, seq_len) in enumerate(MIXED.rows):
        tables[seq, : max(0, seq_len - query_len - window + 1) // MIXED.block_size] = POISON_ID
    check(problem, *problem.run(block_tables=tables))


def test_without_lse_and_workspace_the_output_is_the_same(device: torch.device) -> None:
    problem = Problem(MIXED, device)
    out, _ = problem.run()
    bare = torch.full_like(out, math.nan)
    paged_attention(bare, None, **problem.operands)
    assert same_bits(out, bare)


def test_calls_share_a_workspace_with_anything_in_it(device: torch.device) -> None:
    """What one call has left there means nothing to the next, of another shape or the same."""
    names = {"many_rows", "uneven", "mixed", "early_and_late", "head_dim_96", "speculative"}
    problems = [Problem(case, device) for case in PREFIX if case.name in names]
    assert len(problems) == len(names)
    want = [problem.run() for problem in problems]
    workspace = torch.randint(256, (1 << 28,), dtype=torch.uint8, device=device)
    for i in [*range(len(problems)), *reversed(range(len(problems)))] * 2:
        out, lse = (torch.full_like(one, math.nan) for one in want[i])
        paged_attention(out, lse, workspace=workspace, **problems[i].operands)
        assert same_bits(out, want[i][0])
        assert same_bits(lse, want[i][1])


def test_a_captured_graph_follows_new_lengths_and_groups(device: torch.device) -> None:
    """Tables that share blocks in several ways: each replay takes other groups of them."""
    case = Case("graph", decode(*[900] * 12), groups=((0, 12, 20),))
    operands: dict[str, Any] = Problem(case, device).operands
    shared = operands["block_tables"]
    shared[6:, 20:30] = shared[6, 20:30]  # the last six share ten blocks more
    groups = torch.zeros(4, 3, dtype=torch.int32, device=device)
    operands["prefix_groups"] = groups
    out = torch.full_like(operands["query"], math.nan)
    paged_attention(out, None, **operands)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        paged_attention(out, None, **operands)
    lengths = operands["seq_lens"]
    for entries, changed in (
        ([(0, 12, 20)], {}),
        ([(0, 6, 20), (6, 6, 30)], {0: 321, 11: 481}),
        ([(6, 4, 3), (2, 2, 17)], {3: 273, 5: 0, 7: 49}),
        ([(1, 3, 20), (6, 6, 29)], {2: 10, 8: 500}),
        ([], {0: 900}),
    ):
        groups.zero_()
        if entries:
            groups[-len(entries) :] = torch.tensor(entries, dtype=torch.int32)
        lengths.fill_(900)
        for seq, length in changed.items():
            lengths[seq] = length
        graph.replay()
        want = torch.full_like(out, math.nan)
        paged_attention(want, None, **operands)
        assert same_bits(out, want)
        oracle = torch.zeros_like(out, dtype=torch.float32)
        reference.paged_attention(oracle, None, **operands)
        assert (out[:12].float() - oracle[:12]).abs().max().item() < 0.02


@pytest.mark.parametrize(
    "entry", [(-1, 2, 2), (0, 99, 2), (3, 2, 2), (0, 2, -1), (0, 2, 100), (2**31 - 1, 2, 2)]
)
def test_an_entry_outside_the_batch_is_not_used(
    entry: tuple[int, int, int], device: torch.device
) -> None:
    """The CPU raises; on a GPU nothing out of bounds is read, and rows are attended to alone."""
    problem = Problem(Case("alone", decode(90, 80, 70, 60)), device)
    groups = torch.tensor([entry], dtype=torch.int32, device=device)
    out, lse = problem.run(prefix_groups=groups)
    check(problem, out, lse)


def test_groups_do_not_change_rows_outside_them(device: torch.device) -> None:
    problem = Problem(replace(MIXED, groups=((1, 4, 40),)), device)
    out, lse = problem.run()
    alone, lse_alone = problem.run(prefix_groups=None)
    outside = [0, *range(7, problem.num_tokens)]  # tokens 1 to 6 are the group's
    assert (out[outside].float() - alone[outside].float()).abs().max().item() < 0.02
    assert (lse[outside] - lse_alone[outside]).abs().nan_to_num().max().item() < 2e-3
