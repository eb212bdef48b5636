"""Paged attention on the GPU against the fp32 oracle, under poison; repeats bit for bit."""

from __future__ import annotations

import pytest
import torch
from gpu_attention_cases import (
    CORNERS,
    CORRECTNESS,
    SANITIZE,
    Case,
    Problem,
    check,
    decode,
    random_cover,
    raw,
)
from pairwise_cover import COVER


def name_of(case: Case) -> str:
    return case.name


@pytest.mark.parametrize("case", [*CORRECTNESS, *CORNERS, *COVER], ids=name_of)
def test_agrees_with_the_oracle_and_repeats_bitwise(case: Case, device: torch.device) -> None:
    problem = Problem(case, device)
    before = [cache.clone() for cache in problem.caches]
    out, lse = problem.run()
    check(problem, out, lse)
    again, lse_again = problem.run()
    assert torch.equal(out.view(torch.uint8), again.view(torch.uint8))
    assert torch.equal(lse.view(torch.uint8), lse_again.view(torch.uint8))
    for cache, old in zip(problem.caches, before, strict=True):
        assert torch.equal(raw(cache), raw(old)), "the cache was written"


@pytest.mark.parametrize("case", random_cover(80, seed=1), ids=name_of)
def test_random_points_of_all_axes(case: Case, device: torch.device) -> None:
    problem = Problem(case, device)
    check(problem, *problem.run())


@pytest.mark.parametrize("case", SANITIZE, ids=name_of)
def test_sanitize(case: Case, device: torch.device) -> None:
    problem = Problem(case, device)
    check(problem, *problem.run())


def test_without_lse_and_workspace_the_output_is_the_same(device: torch.device) -> None:
    problem = Problem(Case("plain", (*decode(40, 900), (70, 70))), device)
    out, _ = problem.run()
    from pagedkv.ops import paged_attention

    bare = torch.full_like(out, float("nan"))
    paged_attention(bare, None, **problem.operands)
    assert torch.equal(out.view(torch.uint8), bare.view(torch.uint8))


def test_a_workspace_serves_one_call_after_the_other(device: torch.device) -> None:
    # Tiles cut over blocks are counted in it: each call must leave the counters as it found them,
    # also for the other kernel, which keeps its own elsewhere.
    lengths = ((5000,), (300, 4000, 1), tuple(range(400, 440)))
    problems = [Problem(Case("reuse", decode(*n)), device) for n in lengths]
    want = [problem.run()[0] for problem in problems]
    from pagedkv.ops import paged_attention, paged_attention_workspace_size

    size = paged_attention_workspace_size(64, 8, 128, device=device)
    workspace = torch.full((size,), 0x5A, dtype=torch.uint8, device=device)
    for number in (0, 1, 2, 0, 0, 2, 2, 1, 0):
        out = torch.full_like(want[number], float("nan"))
        paged_attention(out, None, workspace=workspace, **problems[number].operands)
        assert torch.equal(out.view(torch.uint8), want[number].view(torch.uint8))


def test_strided_query_and_out(device: torch.device) -> None:
    problem = Problem(Case("strided", (*decode(40, 900), (70, 70))), device)
    want, _ = problem.run()
    query = problem.operands["query"]
    tokens, heads, dim = query.shape
    wide = torch.full((tokens, heads + 3, dim + 8), float("nan"), dtype=query.dtype, device=device)
    wide[:, 2:-1, :dim] = query
    out = torch.full((heads, tokens, dim), float("nan"), dtype=query.dtype, device=device)
    from pagedkv.ops import paged_attention

    paged_attention(
        out.transpose(0, 1), None, **(problem.operands | {"query": wide[:, 2:-1, :dim]})
    )
    assert torch.equal(out.transpose(0, 1).contiguous().view(torch.uint8), want.view(torch.uint8))


def test_a_captured_graph_follows_new_lengths(device: torch.device) -> None:
    long = Problem(Case("graph", decode(900, 800, 700, 40)), device)
    operands = dict(long.operands)
    out = torch.zeros_like(operands["query"])
    from pagedkv.ops import paged_attention

    paged_attention(out, None, **operands)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        paged_attention(out, None, **operands)
    operands["seq_lens"].copy_(torch.tensor([33, 800, 0, 1], dtype=torch.int32))
    graph.replay()
    want = torch.zeros_like(out)
    paged_attention(want, None, **operands)
    assert torch.equal(out, want)
    short = torch.zeros_like(out, dtype=torch.float32)
    from pagedkv.ops import reference

    reference.paged_attention(short, None, **operands)
    assert (out[:4].float() - short[:4]).abs().max().item() < 0.02


def test_works_on_a_side_stream(device: torch.device) -> None:
    problem = Problem(Case("stream", (*decode(40, 900), (70, 70))), device)
    want, _ = problem.run()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        out, _ = problem.run()
    stream.synchronize()
    assert torch.equal(out.view(torch.uint8), want.view(torch.uint8))
