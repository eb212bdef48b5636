"""Named paged-attention problems: CORRECTNESS, CORNERS, SANITIZE, and a random cover of all axes;
those with shared prefixes stand in `gpu_prefix_cases.py`.
`Problem` holds one in poisoned memory and compares the op with the fp32 oracle."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pagedkv.ops import paged_attention, paged_attention_workspace_size, reference

POISON_ID = 2**30  # in every unused table entry: far outside any cache


@dataclass(frozen=True, slots=True)
class Case:
    """rows: (query_len, seq_len) of each sequence; groups: (first_seq, num_seqs,
    num_prefix_blocks) of sequences that share blocks."""

    name: str
    rows: tuple[tuple[int, int], ...]
    num_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 128
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    cache_dtype: torch.dtype | None = None  # None: dtype
    causal: bool = True
    window: int = 0
    alibi: bool = False
    soft_cap: float = 0.0
    num_splits: int = 0
    token_major: bool = False  # the heads of a token are neighbours in memory
    scale_per_head: bool = False
    groups: tuple[tuple[int, int, int], ...] = ()


def decode(*lengths: int) -> tuple[tuple[int, int], ...]:
    return tuple((1, length) for length in lengths)


E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MIXED = (*decode(33, 1, 700, 0), (70, 90), (3, 40), (0, 0), (200, 200), (17, 17))

# At most 32 sequences of 8 packed rows: a kernel of their own.
FEW = (*decode(33, 1, 700, 0, 4097, 16, 17, 250), (2, 40), (2, 2500), (0, 0), (2, 2))


def few(name: str, **changes: object) -> Case:
    return replace(Case("few", FEW), name=f"few_{name}", **changes)  # type: ignore[arg-type]


# More than 32 sequences of several lengths: ranges of warps and blocks end anywhere in them.
UNEQUAL = decode(0, 1, 16, 17, 1500, *range(3, 900, 19), 0)


def unequal(name: str, **changes: object) -> Case:
    made = Case("unequal", UNEQUAL, num_heads=32, num_kv_heads=8)
    return replace(made, name=f"unequal_{name}", **changes)  # type: ignore[arg-type]


CORRECTNESS = (
    Case("decode", decode(5, 64, 1000, 16, 17, 4097)),
    Case("decode_one_long", decode(20000)),
    Case("decode_many", decode(*range(1, 200))),
    Case("equal_over_blocks", decode(2048, 2048)),
    Case("equal_over_warps", decode(*[300] * 150)),
    Case("equal_several_a_warp", decode(*[40] * 1000)),
    Case("equal_fp8", decode(*[1500] * 9), cache_dtype=E4M3),
    Case("rows_of_two_tiles", decode(900, 5, 0, 64), num_heads=24),
    Case("prefill", ((100, 100), (257, 257))),
    Case("prefill_with_context", ((70, 500), (128, 2000))),
    Case("mixed", MIXED),
    Case("mixed_fp16", MIXED, dtype=torch.float16),
    Case("mixed_fp32", MIXED, dtype=torch.float32, head_dim=64),
    Case("mixed_e4m3", MIXED, cache_dtype=E4M3),
    Case("mixed_e5m2_per_head", MIXED, cache_dtype=E5M2, scale_per_head=True),
    Case("mixed_fp16_e4m3", MIXED, dtype=torch.float16, cache_dtype=E4M3, scale_per_head=True),
    Case("window", MIXED, window=37),
    Case("alibi", MIXED, alibi=True),
    Case("soft_cap", MIXED, soft_cap=5.0),
    Case("all_features", MIXED, window=100, alibi=True, soft_cap=20.0, cache_dtype=E4M3),
    Case("not_causal", MIXED, causal=False),
    Case("token_major", MIXED, token_major=True),
    Case("mqa_64", MIXED, num_heads=64, num_kv_heads=1),
    Case("mha", MIXED, num_heads=3, num_kv_heads=3),
    Case("group_of_7", MIXED, num_heads=14, num_kv_heads=2, head_dim=64),
    Case("one_pass", MIXED, num_splits=1),
    Case("five_pieces", MIXED, num_splits=5),
    Case("more_pieces_than_steps", MIXED, num_splits=64),
    Case("most_pieces", decode(33, 1, 700, 0, 5000), num_splits=256),
    Case("speculative", ((4, 100), (4, 4), (3, 1025), (5, 63)), num_heads=16, num_kv_heads=2),
    *(Case(f"head_dim_{d}", MIXED, head_dim=d) for d in (8, 64, 72, 80, 96, 112, 120, 192, 256)),
    *(Case(f"fp8_head_dim_{d}", MIXED, head_dim=d, cache_dtype=E4M3) for d in (64, 96, 192, 256)),
    few("bf16"),
    few("fp16", dtype=torch.float16),
    few("e4m3", cache_dtype=E4M3),
    few("e5m2_per_head", cache_dtype=E5M2, scale_per_head=True),
    few("fp16_e4m3", dtype=torch.float16, cache_dtype=E4M3, scale_per_head=True),
    few("window", window=37),
    few("window_e4m3", window=37, cache_dtype=E4M3),
    few("alibi", alibi=True),
    few("soft_cap", soft_cap=5.0),
    few("all_features", window=100, alibi=True, soft_cap=20.0, cache_dtype=E4M3),
    few("not_causal", causal=False),
    few("token_major", token_major=True),
    few("mha", num_heads=3, num_kv_heads=3),
    few("group_of_3", num_heads=9, num_kv_heads=3),
    few("group_of_8", rows=decode(40, 900, 3), num_heads=16),
    few("many_kv_heads", num_heads=100, num_kv_heads=100),
    *(few(f"head_dim_{d}", head_dim=d) for d in (8, 40, 64, 96, 104, 120)),
    *(few(f"fp8_head_dim_{d}", head_dim=d, cache_dtype=E4M3) for d in (16, 64, 112)),
    *(few(f"block_size_{b}", block_size=b) for b in (8, 24, 32, 256)),
    *(few(f"fp8_block_size_{b}", block_size=b, cache_dtype=E4M3) for b in (8, 24, 256)),
    few("equal", rows=decode(*[600] * 32)),
    few("uneven", rows=decode(9000, *[40] * 15)),
    few("uneven_32", rows=decode(9000, *[40] * 20, 3000, *range(10)), num_heads=64),
    few("uneven_many_kv_heads", rows=decode(5000, *[40] * 31), num_heads=64, num_kv_heads=64),
    unequal("bf16"),
    unequal("fp16", dtype=torch.float16),
    unequal("e4m3", cache_dtype=E4M3, scale_per_head=True),
    unequal("all_features", window=100, alibi=True, soft_cap=20.0),
    unequal("pieces", num_splits=3),
    unequal("one_pass", num_splits=1),
    unequal("two_tiles", rows=(*UNEQUAL, (3, 90), (17, 17)), num_heads=16),
    unequal("head_dim_104", head_dim=104),
    unequal("of_four_warps", head_dim=192, num_heads=8, num_kv_heads=4),
    *(unequal(f"block_size_{b}", block_size=b) for b in (8, 24)),
    unequal("fp8_block_size_8", block_size=8, cache_dtype=E4M3),
    unequal("beside_prefill", rows=(*UNEQUAL, (70, 90), (0, 0), (200, 1200))),
    unequal("one_long", rows=(*UNEQUAL, (1, 20000))),
    unequal("more_sequences_than_threads", rows=decode(*(i * 7 % 190 for i in range(1100)))),
    unequal("few_keys", rows=decode(*(i % 3 for i in range(40)))),
    Case("odd_head_dim", MIXED, head_dim=46),
    Case("fp8_head_dim_72", MIXED, head_dim=72, cache_dtype=E4M3),
    *(Case(f"block_size_{b}", MIXED, block_size=b) for b in (1, 3, 8, 24, 32, 100, 128, 256)),
    *(Case(f"fp8_block_size_{b}", MIXED, block_size=b, cache_dtype=E4M3) for b in (1, 8, 16, 256)),
)

CORNERS = (
    Case("all_empty", decode(0, 0, 0)),
    Case("first_empty", decode(0, 70)),
    Case("one_key", decode(1)),
    Case("queries_without_keys", ((5, 0), (80, 0), (2, 9))),
    Case("window_of_one", MIXED, window=1),
    Case("window_at_block_edges", decode(16, 17, 31, 32, 33, 48), window=16),
    Case("100k", decode(100_000), num_heads=4, num_kv_heads=1),
    Case("100k_window", decode(100_000), num_heads=4, num_kv_heads=1, window=4096),
)

SANITIZE = (
    Case("decode", decode(5, 64, 300, 0, 17), num_heads=4, num_kv_heads=1),
    Case("decode_cut", decode(900, 5), num_heads=4, num_kv_heads=1),
    Case("decode_many", decode(*range(40), 900), num_heads=4, num_kv_heads=1),
    Case("decode_unequal", decode(*range(1, 80, 2)), num_heads=8, num_kv_heads=8),
    Case("decode_fp8", decode(5, 100), num_heads=4, num_kv_heads=1, cache_dtype=E4M3),
    Case("mixed", (*decode(33, 0), (70, 90), (20, 20)), num_heads=4, num_kv_heads=1),
    Case("mixed_fp8", (*decode(33), (70, 90)), num_heads=4, num_kv_heads=1, cache_dtype=E4M3),
    Case("block_of_3", (*decode(33), (70, 90)), num_heads=4, num_kv_heads=1, block_size=3),
    Case("head_dim_80", (*decode(33), (70, 90)), num_heads=4, num_kv_heads=1, head_dim=80),
    Case("head_dim_256", (*decode(33), (70, 90)), num_heads=4, num_kv_heads=1, head_dim=256),
    Case("pieces", (*decode(133), (70, 90)), num_heads=4, num_kv_heads=1, num_splits=3),
    Case("fp32", decode(33), num_heads=4, num_kv_heads=1, dtype=torch.float32),
    # Several steps of keys, several tiles of rows, beside a decode.
    Case("steps", ((1, 300), (150, 400)), num_heads=4, num_kv_heads=1),
    Case("no_keys", ((150, 0), (70, 90), (90, 0)), num_heads=4, num_kv_heads=1),
)


def random_cover(count: int, seed: int) -> list[Case]:
    """Random points of all axes at once."""
    draw = random.Random(seed)
    cases = []
    for number in range(count):
        block_size = draw.choice([8, 16, 16, 32, 64, 128, 256, draw.randint(1, 256)])
        edges = [
            0,
            1,
            block_size - 1,
            block_size,
            block_size + 1,
            *(2**k + e for k in (6, 9, 11) for e in (-1, 0, 1)),
        ]
        rows = []
        for _ in range(draw.randint(1, 7)):
            seq_len = max(0, draw.choice(edges))
            rows.append((min(seq_len, draw.choice([1, 1, 1, 2, 16, 65, 200])), seq_len))
        dtype = draw.choice([torch.bfloat16, torch.float16])
        causal = draw.random() < 0.85
        group = draw.choice([1, 2, 4, 6, 8, 16, 24])
        kv_heads = draw.choice([1, 2, 3])
        cases.append(
            Case(
                f"random_{number}",
                tuple(rows),
                num_heads=group * kv_heads,
                num_kv_heads=kv_heads,
                head_dim=draw.choice([64, 80, 96, 112, 128, 128, 192, 256]),
                block_size=block_size,
                dtype=dtype,
                cache_dtype=draw.choice([None, None, E4M3, E5M2]),
                causal=causal,
                window=draw.choice([0, 0, 1, 30, 128]) if causal else 0,
                alibi=draw.random() < 0.3,
                soft_cap=draw.choice([0.0, 0.0, 10.0]),
                num_splits=draw.choice([0, 0, 0, 1, 3]),
                token_major=draw.random() < 0.3,
                scale_per_head=draw.random() < 0.5,
            )
        )
    return cases


class Problem:
    """A case in memory where everything that is not owned is NaN or an absurd id."""

    def __init__(self, case: Case, device: torch.device, num_blocks: int | None = None) -> None:
        self.case = case
        cache_dtype = case.cache_dtype or case.dtype
        blocks = [math.ceil(seq_len / case.block_size) for _, seq_len in case.rows]
        owned = sum(blocks)
        total = num_blocks or 2 * owned + 3
        shape = (total, case.num_kv_heads, case.block_size, case.head_dim)
        ids = (
            torch.randperm(total)[:owned].tolist()
            if num_blocks is None
            else [total - 1 - i for i in range(owned)]
        )
        width = max([*blocks, 1]) + 2
        tables = torch.full((len(case.rows), width), POISON_ID, dtype=torch.int32)
        caches = [_poisoned(shape, cache_dtype, device, case.token_major) for _ in range(2)]
        lenders = {}  # of each sequence in a group: who owns the shared blocks, and how many
        for first, size, num_blocks in case.groups:
            lender = max(range(first, first + size), key=lambda s: blocks[s])
            lenders |= {s: (lender, num_blocks) for s in range(first, first + size) if s != lender}
        taken = 0
        for s, count in enumerate(blocks):
            tables[s, :count] = torch.tensor(ids[taken : taken + count], dtype=torch.int32)
            taken += count
        for s, ((query_len, seq_len), count) in enumerate(zip(case.rows, blocks, strict=True)):
            mine = tables[s, :count].tolist()
            lender, num_blocks = lenders.get(s, (s, 0))
            borrowed = min(num_blocks, count)
            tables[s, :borrowed] = tables[lender, :borrowed]
            # Blocks wholly before the window of the first query belong to somebody else by now.
            behind = 0
            if case.window and not case.groups:
                behind = max(0, seq_len - query_len - case.window + 1) // case.block_size
            tables[s, :behind] = POISON_ID
            filled = min(max(behind, borrowed) * case.block_size, seq_len)
            token = torch.arange(filled, seq_len, device=device)
            block = torch.tensor(mine, device=device, dtype=torch.int64)[token // case.block_size]
            for cache in caches:
                values = torch.randn(len(token), case.num_kv_heads, case.head_dim, device=device)
                # As bytes or words: float8 tensors have no indexed assignment.
                raw(cache)[block, :, token % case.block_size] = raw(values.to(cache_dtype))
        self.caches = caches
        starts = [0, *itertools.accumulate(q for q, _ in case.rows)]
        self.num_tokens = starts[-1]
        extra = 2  # rows of no sequence: never read, never written
        query = torch.full(
            (self.num_tokens + extra, case.num_heads, case.head_dim), math.nan, device=device
        )
        query[: self.num_tokens] = torch.randn(
            self.num_tokens, case.num_heads, case.head_dim, device=device
        )
        self.operands: dict[str, Any] = {
            "query": query.to(case.dtype),
            "key_cache": caches[0],
            "value_cache": caches[1],
            "block_tables": tables.to(device),
            "seq_lens": torch.tensor([n for _, n in case.rows], dtype=torch.int32, device=device),
            "query_start_loc": torch.tensor(starts, dtype=torch.int32, device=device),
            "max_query_len": max(q for q, _ in case.rows),
            "scale": case.head_dim**-0.5 * 2,
            "causal": case.causal,
            "window": case.window,
            "soft_cap": case.soft_cap,
            "num_splits": case.num_splits,
        }
        if case.groups:
            entries = [(0, 0, 7), *case.groups]  # the first is empty
            self.operands["prefix_groups"] = torch.tensor(entries, dtype=torch.int32, device=device)
        if case.alibi:
            self.operands["alibi_slopes"] = torch.rand(case.num_heads, device=device) * 0.1
        if cache_dtype in (E4M3, E5M2):
            count = case.num_kv_heads if case.scale_per_head else 1
            self.operands["k_scale"] = torch.rand(count, device=device) + 0.3
            self.operands["v_scale"] = torch.rand(count, device=device) * 4 + 0.1

    def run(self, **changes: Any) -> tuple[Tensor, Tensor]:
        """The op on poisoned outputs and workspace: (out, lse)."""
        case = self.case
        operands = self.operands | changes
        query, groups = operands["query"], operands.get("prefix_groups")
        out = torch.full_like(query, math.nan)
        lse = torch.full(query.shape[:2], math.nan, device=query.device)
        size = paged_attention_workspace_size(
            query.size(0),
            case.num_heads,
            case.head_dim,
            num_splits=operands["num_splits"],
            num_prefix_groups=0 if groups is None else len(groups),
            device=query.device,
        )
        workspace = torch.full((size,), 0xFF, dtype=torch.uint8, device=query.device)
        paged_attention(out, lse, workspace=workspace, **operands)
        return out, lse

    def oracle(self) -> tuple[Tensor, Tensor]:
        """The fp32 oracle: (out, lse)."""
        query = self.operands["query"]
        out = torch.full_like(query, math.nan, dtype=torch.float32)
        lse = torch.full(query.shape[:2], math.nan, device=query.device)
        reference.paged_attention(out, lse, **self.operands)
        return out, lse


def raw(tensor: Tensor) -> Tensor:
    """The bits, as integers, with the tensor's shape and strides."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return tensor.view(integers[tensor.element_size()])


def _poisoned(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, token_major: bool
) -> Tensor:
    if token_major:
        blocks, heads, tokens, dim = shape
        return _poisoned((blocks, tokens, heads, dim), dtype, device, False).transpose(1, 2)
    if dtype in (E4M3, E5M2):
        return torch.full(shape, 0x7F, dtype=torch.uint8, device=device).view(dtype)
    return torch.full(shape, math.nan, dtype=dtype, device=device)


def check(problem: Problem, out: Tensor, lse: Tensor) -> None:
    """Against the oracle: values within the rounding of the activations' dtype, NaN nowhere, rows
    of no sequence untouched."""
    want, want_lse = problem.oracle()
    used = problem.num_tokens
    assert out[used:].isnan().all(), "rows of no sequence were written"
    assert lse[used:].isnan().all(), "lse rows of no sequence were written"
    out, want, lse, want_lse = out[:used].float(), want[:used], lse[:used], want_lse[:used]
    assert torch.isfinite(out).all(), (
        f"not finite at {(~torch.isfinite(out)).nonzero()[0].tolist()}"
    )
    if not out.numel():
        return
    epsilon = torch.finfo(problem.case.dtype).eps
    # Weights and result are rounded to the dtype once each, as in a plain implementation of it;
    # with a float8 cache also the query, to fp16.
    limit = 2 * epsilon * max(want.abs().max().item(), 1e-6) + (
        2e-5 if problem.case.dtype == torch.float32 else 0
    )
    error = (out - want).abs()
    assert error.max().item() <= limit, (
        f"{problem.case.name}: {int((error > limit).sum())} of {error.numel()} off by more than "
        f"{limit:.3g} (worst {error.max().item():.3g}), first at "
        f"{(error > limit).nonzero()[0].tolist()}"
    )
    if want.any():
        cosine = torch.nn.functional.cosine_similarity(
            out.double().flatten(), want.double().flatten(), dim=0
        )
        assert 1 - cosine.item() <= epsilon, f"{problem.case.name}: cosine {cosine.item():.6f}"
    empty = want_lse == -math.inf
    assert torch.equal(empty, lse == -math.inf), "empty rows differ"
    assert (out[empty] == 0).all(), "an empty row is not 0"
    lse_error = (lse[~empty] - want_lse[~empty]).abs()
    assert not lse_error.numel() or lse_error.max().item() < 2e-3, (
        f"{problem.case.name}: lse off by {lse_error.max().item():.3g}"
    )
