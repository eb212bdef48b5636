"""Paged attention on the CPU: prefill against torch's scaled_dot_product_attention on the same
contiguous data, decode against the machine's memory copy rate.

Each case is checked against the oracle first; blocks are shuffled. Work and its floor:
* prefill: 4 * head_dim FLOPs for each head and each visible (query, key) pair; the ceiling is
  torch's matrix product (2,048 cubed) in the same dtype.
* decode: all keys and values are read once, 2 * num_kv_heads * head_dim * dtype bytes a token; the
  ceiling is torch's copy, counting what it reads *and* what it writes. A decode only reads, so this
  is the strict definition: counting one direction would halve the ceiling.
What is compared is measured in turns, and the ratio is the median of the turns' ratios, since the
rates of a shared machine drift.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from pagedkv import ops
from pagedkv.ops import reference
from rows import Row, median_us, parser, report

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "ops"))
from attention_cases import PERFORMANCE, PerformanceCase

COPY_BYTES = 256 << 20
ROTATE_BYTES = 256 << 20  # caches that a decode goes through before it meets the first one again
MATMUL = 2048
TURNS = 9
MOST_TIMES_TORCH = 1.3
LEAST_COPY_PERCENT = 60.0
# The cases with a threshold; the others are shown.
PREFILL, DECODE = "smollm2_prefill", "smollm2_decode"
RTOL = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


@dataclass(frozen=True, slots=True)
class Batch:
    """The operands of one call, by schema name, and the same keys and values contiguously,
    [num_seqs, num_kv_heads, seq_len, head_dim]."""

    arguments: dict[str, object]
    out: Tensor
    keys: Tensor
    values: Tensor


def make(case: PerformanceCase, dtype: torch.dtype) -> Batch:
    num_blocks = case.seq_len // case.block_size
    contiguous = (case.num_seqs, case.num_kv_heads, case.seq_len, case.head_dim)
    keys, values = (torch.randn(contiguous).to(dtype) for _ in range(2))
    tables = torch.randperm(case.num_seqs * num_blocks).view(case.num_seqs, num_blocks)
    caches = []
    for tokens in (keys, values):
        blocks = tokens.unflatten(2, (num_blocks, case.block_size)).transpose(1, 2).flatten(0, 1)
        cache = torch.empty_like(blocks, memory_format=torch.contiguous_format)
        cache[tables.flatten()] = blocks
        caches.append(cache)
    query = torch.randn(case.num_seqs * case.query_len, case.num_heads, case.head_dim).to(dtype)
    out = torch.empty_like(query)
    arguments: dict[str, object] = {
        "lse": None,
        "query": query,
        "key_cache": caches[0],
        "value_cache": caches[1],
        "block_tables": tables.int(),
        "seq_lens": torch.full((case.num_seqs,), case.seq_len, dtype=torch.int32),
        "query_start_loc": torch.arange(case.num_seqs + 1, dtype=torch.int32) * case.query_len,
        "max_query_len": case.query_len,
        "scale": case.head_dim**-0.5,
    }
    return Batch(arguments, out, keys, values)


def check(batch: Batch) -> None:
    """Against the oracle."""
    ops.paged_attention(out=batch.out, **batch.arguments)
    truth = torch.empty_like(batch.out, dtype=torch.float32)
    reference.paged_attention(out=truth, **batch.arguments)
    error = (batch.out.float() - truth).abs().max().item()
    limit = RTOL[batch.out.dtype] * truth.abs().max().item()
    assert error <= limit, f"off by {error:.3g}, allowed {limit:.3g}"


def in_turns(*functions: Callable[[], object]) -> list[list[float]]:
    """For each turn the microseconds of every function."""
    for function in functions:
        function()
    return [[median_us(f, repeats=1, warmup=0) for f in functions] for _ in range(TURNS)]


def torch_baselines(batch: Batch, case: PerformanceCase) -> list[Callable[[], Tensor]]:
    """torch's attention with its own grouping of heads and with heads repeated beforehand: the
    faster one counts. Rows of a chunk that is not a whole prompt need a mask, which is what torch
    offers for them."""
    query = batch.arguments["query"]
    assert isinstance(query, Tensor)
    rows = query.unflatten(0, (case.num_seqs, case.query_len)).transpose(1, 2).contiguous()
    group = case.num_heads // case.num_kv_heads
    repeated = [t.repeat_interleave(group, dim=1) for t in (batch.keys, batch.values)]
    is_whole = case.query_len == case.seq_len
    mask = None
    if not is_whole and case.query_len > 1:
        mask = torch.ones(case.query_len, case.seq_len, dtype=torch.bool)
        mask = mask.tril(case.seq_len - case.query_len)
    options = {"attn_mask": mask, "is_causal": is_whole}
    return [
        lambda: scaled_dot_product_attention(
            rows, batch.keys, batch.values, enable_gqa=True, **options
        ),
        lambda: scaled_dot_product_attention(rows, *repeated, **options),
    ]


def measure_compute(case: PerformanceCase, dtype: torch.dtype) -> Row:
    """A prefill or a chunk of one."""
    batch = make(case, dtype)
    check(batch)
    square = torch.randn(2, MATMUL, MATMUL).to(dtype)
    turns = in_turns(
        lambda: ops.paged_attention(out=batch.out, **batch.arguments),
        lambda: square[0] @ square[1],
        *torch_baselines(batch, case),
    )
    us = statistics.median(turn[0] for turn in turns)
    # Query i of the last query_len sees seq_len - query_len + i + 1 keys.
    pairs = case.query_len * (2 * case.seq_len - case.query_len + 1) / 2
    flops = 4 * case.head_dim * case.num_heads * case.num_seqs * pairs
    matmul_share = statistics.median(flops / t[0] / (2 * MATMUL**3 / t[1]) for t in turns)
    which = min((2, 3), key=lambda i: statistics.median(turn[i] for turn in turns))
    baseline = statistics.median(turn[which] / turn[0] for turn in turns)
    limited = case.name == PREFILL
    return Row(
        case.name,
        shape_of(case, dtype),
        us,
        rate=f"{flops / us / 1e3:.0f} GFLOP/s",
        ceiling_percent=100 * matmul_share,
        baseline=baseline,
        limit=f"at most {MOST_TIMES_TORCH} x torch's time" if limited else "",
        holds=not limited or baseline >= 1 / MOST_TIMES_TORCH,
    )


def measure_decode(case: PerformanceCase, dtype: torch.dtype) -> Row:
    """One query token per sequence."""
    num_bytes = 2 * case.num_seqs * case.seq_len * case.num_kv_heads * case.head_dim
    num_bytes *= dtype.itemsize
    batches = [make(case, dtype) for _ in range(max(2, ROTATE_BYTES // num_bytes))]
    check(batches[0])
    source = torch.ones(COPY_BYTES, dtype=torch.uint8)
    target = torch.empty_like(source)

    def decode_all() -> None:
        for batch in batches:
            ops.paged_attention(out=batch.out, **batch.arguments)

    rotating = [cycle(f) for f in zip(*(torch_baselines(b, case) for b in batches), strict=True)]
    turns = in_turns(
        decode_all,
        lambda: target.copy_(source),
        *(lambda functions=functions: next(functions)() for functions in rotating),
    )
    turns = [[turn[0] / len(batches), *turn[1:]] for turn in turns]
    us = statistics.median(turn[0] for turn in turns)
    share = statistics.median(num_bytes / t[0] / (2 * COPY_BYTES / t[1]) for t in turns)
    which = min((2, 3), key=lambda i: statistics.median(turn[i] for turn in turns))
    limited = case.name == DECODE
    return Row(
        case.name,
        shape_of(case, dtype),
        us,
        rate=f"{num_bytes / us / 1e3:.1f} GB/s",
        ceiling_percent=100 * share,
        baseline=statistics.median(turn[which] / turn[0] for turn in turns),
        limit=f"at least {LEAST_COPY_PERCENT:.0f}% of the copy rate" if limited else "",
        holds=not limited or 100 * share >= LEAST_COPY_PERCENT,
    )


def shape_of(case: PerformanceCase, dtype: torch.dtype) -> str:
    return (
        f"{case.num_seqs} x {case.query_len} queries over {case.seq_len} tokens, "
        f"{case.num_heads}/{case.num_kv_heads} heads of {case.head_dim}, blocks of "
        f"{case.block_size}, {str(dtype).removeprefix('torch.')}"
    )


def ceilings() -> list[Row]:
    """The copy and the matrix products by themselves."""
    source = torch.ones(COPY_BYTES, dtype=torch.uint8)
    target = torch.empty_like(source)
    us = median_us(lambda: target.copy_(source), repeats=TURNS)
    rows = [Row("copy", f"{COPY_BYTES >> 20} MiB", us, f"{2 * COPY_BYTES / us / 1e3:.1f} GB/s")]
    for dtype in (torch.float32, torch.bfloat16):
        a, b = torch.randn(2, MATMUL, MATMUL).to(dtype)
        us = median_us(lambda a=a, b=b: a @ b, repeats=TURNS)
        shape = f"{MATMUL} cubed, {str(dtype).removeprefix('torch.')}"
        rows.append(Row("matrix product", shape, us, f"{2 * MATMUL**3 / us / 1e3:.0f} GFLOP/s"))
    return rows


def main() -> int:
    arguments = parser(__doc__ or "").parse_args()
    torch.manual_seed(0)
    rows = ceilings()
    for case in PERFORMANCE:
        for name in case.dtypes:
            measure = measure_decode if case.query_len == 1 else measure_compute
            rows.append(measure(case, getattr(torch, name)))
    notes = [
        "Ceilings: torch's matrix product for prefill; for decode the copy rate, bytes read and "
        "bytes written both counted, though a decode only reads. Baseline: torch's "
        "scaled_dot_product_attention on contiguous keys and values, the faster of grouped and "
        "repeated heads. Percentages and baselines are medians of ratios taken turn by turn.",
    ]
    return report("cpu-attention", rows, save=arguments.save, notes=notes)


if __name__ == "__main__":
    sys.exit(main())
