"""Paged attention on the GPU: decode, prefill, float8 caches, shared prefixes; beside torch's SDPA,
and beside FlashInfer where that is installed (bench_flashinfer.py).

bf16, block 16, head_dim 128, 32 query and 8 KV heads unless a row says otherwise, shuffled blocks.
Bytes: 2 * batch * length * KV heads * head_dim * size. FLOPs: 4 * batch * query heads * head_dim *
(new * context + new * (new + 1) / 2). Each row is checked against the fp32 oracle on one sequence
before it is timed. A shared prefix counts once. `x baseline` is against FlashAttention-3 as vLLM
0.26 ships it, measured on an H200 on 2026-11-29 with the same method. A percentage is of the
measured read rate or matrix product.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import rows
from gpu_timing import L2_BYTES, Ceilings, graph_us, measure_ceilings
from pagedkv.ops import paged_attention, paged_attention_workspace_size, reference

BLOCK, DIM = 16, 128
CHOICES = ["decode", "fp8", "prefix", "prefill", "sdpa", "flashinfer"]
E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class Shape:
    """batch sequences of `new` query tokens behind `context` earlier ones."""

    batch: int
    new: int
    context: int
    peer: float = 0.0  # FlashAttention-3: us of a decode, TFLOP/s of a prefill
    limit: float = 0.0  # at most us of a decode, at least TFLOP/s of a prefill
    num_heads: int = 32
    num_kv_heads: int = 8
    block_size: int = BLOCK
    float8: bool = False

    @property
    def length(self) -> int:
        return self.context + self.new

    @property
    def kv_bytes(self) -> int:
        size = 1 if self.float8 else 2
        return 2 * self.batch * self.length * self.num_kv_heads * DIM * size

    @property
    def flops(self) -> float:
        pairs = self.new * self.context + self.new * (self.new + 1) / 2
        return 4 * self.batch * self.num_heads * DIM * pairs

    @property
    def words(self) -> str:
        made = f"{self.batch} x {self.length}" if self.new == 1 else f"{self.batch} x {self.new}"
        made += f" + {self.context}" if self.new > 1 and self.context else ""
        made += (
            ""
            if (self.num_heads, self.num_kv_heads) == (32, 8)
            else (f", {self.num_heads}/{self.num_kv_heads} heads")
        )
        return made + ("" if self.block_size == BLOCK else f", block {self.block_size}")


def decode(batch: int, length: int, peer: float, limit: float = 0.0, **more: int | bool) -> Shape:
    return Shape(batch, 1, length - 1, peer, limit, **more)  # type: ignore[arg-type]


DECODE = (
    decode(1, 1024, 10.5, 7.5),
    decode(1, 8192, 18.1, 14),
    decode(1, 65536, 73.6, 66),
    decode(8, 2048, 26.2, 20),
    decode(32, 1024, 42.3, 36),
    decode(32, 4096, 131.5, 124),
    decode(128, 1024, 143.3, 128),
    decode(128, 4096, 496.9, 485),
    decode(256, 2048, 521.1),
    decode(128, 2048, 295.6, 265, num_heads=64),
    decode(128, 2048, 1000.0, num_kv_heads=32),
)
DECODE_FLOAT8 = (
    decode(1, 8192, 16.3, 11, float8=True),
    decode(32, 1024, 35.4, 24, float8=True),
    decode(128, 1024, 122.0, float8=True),
    decode(128, 4096, 385.0, 280, float8=True),
)


@dataclass(frozen=True, slots=True)
class Shared:
    """batch sequences in `groups` groups of equal size, `prefix` keys shared and `own` not."""

    batch: int
    prefix: int
    own: int
    groups: int = 1
    limit: float = 0.0  # at most us

    @property
    def shape(self) -> Shape:
        return decode(self.batch, self.prefix + self.own, 0.0)

    @property
    def kv_bytes(self) -> int:
        """What must be read: each prefix once."""
        keys = self.groups * self.prefix + self.batch * self.own
        return 2 * keys * self.shape.num_kv_heads * DIM * 2

    @property
    def words(self) -> str:
        grouped = "" if self.groups == 1 else f", {self.groups} groups"
        return f"{self.batch} x ({self.prefix} + {self.own}){grouped}"


# The first has a threshold; the others show where sharing begins to pay.
PREFIX = (
    Shared(256, 2048, 128, limit=90),
    Shared(256, 2048, 64),
    Shared(1024, 2048, 128),
    Shared(256, 8192, 128),
    Shared(256, 2048, 128, groups=8),
    Shared(256, 2048, 128, groups=32),
    Shared(64, 2048, 128),
    Shared(64, 256, 128),
    Shared(32, 1024, 128),
    Shared(16, 512, 128),
    Shared(8, 1024, 128),
    Shared(8, 4096, 128),
    Shared(2, 8192, 128),
)
PREFILL = (
    Shape(8, 2048, 0, 451, 500),
    Shape(2, 8192, 0, 617, 640),
    Shape(1, 16384, 0, 597, 640),
    Shape(4, 512, 8192, 562, 590),
    Shape(1, 2048, 14336, 579, 600),
    Shape(2, 8192, 0, 640, block_size=128),
)


class Pool:
    """Caches of random values that all shapes with the same heads and type share."""

    def __init__(self, shape: Shape, num_blocks: int) -> None:
        size = (num_blocks, shape.num_kv_heads, shape.block_size, DIM)
        self.num_blocks = num_blocks
        self.caches = []
        for _ in range(2):
            cache = torch.empty(size, dtype=E4M3 if shape.float8 else torch.bfloat16, device="cuda")
            for piece in cache.split(max(1, num_blocks // 16)):
                piece.copy_(torch.randn(piece.shape, device="cuda", dtype=torch.bfloat16))
            self.caches.append(cache)


def operands(shape: Shape, pool: Pool, ids: Tensor) -> dict[str, object]:
    tokens = shape.batch * shape.new
    width = -(-shape.length // shape.block_size)
    made: dict[str, object] = {
        "query": torch.randn(tokens, shape.num_heads, DIM, device="cuda", dtype=torch.bfloat16),
        "key_cache": pool.caches[0],
        "value_cache": pool.caches[1],
        "block_tables": ids.reshape(shape.batch, width),
        "seq_lens": torch.full((shape.batch,), shape.length, dtype=torch.int32, device="cuda"),
        "query_start_loc": torch.arange(0, tokens + 1, shape.new, dtype=torch.int32, device="cuda"),
        "max_query_len": shape.new,
        "scale": DIM**-0.5,
    }
    if shape.float8:
        made |= {name: torch.tensor([0.9], device="cuda") for name in ("k_scale", "v_scale")}
    return made


def check(shape: Shape, call: dict[str, object], out: Tensor) -> None:
    """The last rows of the last sequence against the oracle."""
    some = min(shape.new, 64)
    sub = dict(call)
    sub["query"] = call["query"][-some:]  # type: ignore[index]
    sub["block_tables"] = call["block_tables"][-1:]  # type: ignore[index]
    sub["seq_lens"] = call["seq_lens"][-1:]  # type: ignore[index]
    sub["query_start_loc"] = torch.tensor([0, some], dtype=torch.int32, device="cuda")
    sub["max_query_len"] = some
    want = torch.empty(some, *out.shape[1:], device="cuda")
    reference.paged_attention(want, None, **sub)  # type: ignore[arg-type]
    error = (out[-some:].float() - want).abs().max().item()
    limit = 2 * torch.finfo(torch.bfloat16).eps * want.abs().max().item()
    assert error <= limit, f"{shape.words}: off by {error:.3g}, at most {limit:.3g}"


def time_shape(shape: Shape, pool: Pool, *, shuffled: bool = True) -> float:
    """Microseconds a call, over as many sets of blocks as exceed four times the L2. shuffled: the
    blocks of a sequence lie anywhere; if not, one behind the other.
    """
    needed = shape.batch * -(-shape.length // shape.block_size)
    sets = max(2, min(64, -(-4 * L2_BYTES // shape.kv_bytes), pool.num_blocks // needed))
    sets = min(sets, pool.num_blocks // needed)
    order = torch.randperm if shuffled else torch.arange
    ids = order(pool.num_blocks, device="cuda")[: sets * needed].int()
    calls: list[Callable[[], object]] = []
    size = paged_attention_workspace_size(
        shape.batch * shape.new, shape.num_heads, DIM, device="cuda"
    )
    workspace = torch.empty(size, dtype=torch.uint8, device="cuda")
    for mine in ids.split(needed):
        call = operands(shape, pool, mine)
        out = torch.empty_like(call["query"])  # type: ignore[call-overload]
        if not calls:
            paged_attention(out, None, workspace=workspace, **call)  # type: ignore[arg-type]
            check(shape, call, out)
        calls.append(
            lambda c=call, o=out: paged_attention(o, None, workspace=workspace, **c)  # type: ignore[misc]
        )
    # A graph of many calls: its own start, some microseconds, is no part of a call.
    return graph_us(calls, repeats=max(1, 64 // len(calls)) if shape.new == 1 else 1)


def decode_row(shape: Shape, pool: Pool, ceilings: Ceilings) -> rows.Row:
    us = time_shape(shape, pool)
    rate = shape.kv_bytes / us * 1e6
    return rows.Row(
        name="decode fp8" if shape.float8 else "decode",
        shape=shape.words,
        us=us,
        rate=f"{rate / 1e12:.2f} TB/s",
        ceiling_percent=100 * rate / ceilings.read,
        baseline=shape.peer / us,
        limit=f"<= {shape.limit:g} us" if shape.limit else "",
        holds=us <= shape.limit or not shape.limit,
    )


def prefill_row(shape: Shape, pool: Pool, ceilings: Ceilings) -> rows.Row:
    us = time_shape(shape, pool)
    rate = shape.flops / us * 1e6
    return rows.Row(
        name="prefill",
        shape=shape.words,
        us=us,
        rate=f"{rate / 1e12:.0f} TFLOP/s",
        ceiling_percent=100 * rate / ceilings.matmul,
        baseline=rate / 1e12 / shape.peer,
        limit=f">= {shape.limit:g} TFLOP/s" if shape.limit else "",
        holds=rate / 1e12 >= shape.limit or not shape.limit,
    )


def prefix_rows(shared: Shared, pool: Pool, ceilings: Ceilings) -> list[rows.Row]:
    """With groups and without; `x baseline` of the first is against the second. The percentage
    counts what must be read once."""
    shape = shared.shape
    size = shared.batch // shared.groups
    blocks = shared.prefix // BLOCK
    own = -(-shared.own // BLOCK)
    needed = shared.groups * blocks + shared.batch * own
    sets = max(2, min(16, -(-4 * L2_BYTES // shared.kv_bytes), pool.num_blocks // needed))
    ids = torch.randperm(pool.num_blocks, device="cuda")[: sets * needed].int()
    groups = torch.tensor(
        [(g * size, size, blocks) for g in range(shared.groups)], dtype=torch.int32, device="cuda"
    )
    workspace = torch.empty(
        paged_attention_workspace_size(
            shared.batch, shape.num_heads, DIM, num_prefix_groups=len(groups), device="cuda"
        ),
        dtype=torch.uint8,
        device="cuda",
    )
    calls: dict[bool, list[Callable[[], object]]] = {True: [], False: []}
    for mine in ids.split(needed):
        prefixes = mine[: shared.groups * blocks].view(shared.groups, blocks)
        tables = torch.cat(
            [
                prefixes.repeat_interleave(size, 0),
                mine[shared.groups * blocks :].view(shared.batch, own),
            ],
            1,
        )
        call = operands(shape, pool, tables)
        out = torch.empty_like(call["query"])  # type: ignore[call-overload]
        for grouped, made in calls.items():
            more = {"prefix_groups": groups if grouped else None, "workspace": workspace}
            if len(made) == 0:
                paged_attention(out, None, **call, **more)  # type: ignore[arg-type]
                check(shape, call, out)
            made.append(
                lambda c=call | more, o=out: paged_attention(o, None, **c)  # type: ignore[misc]
            )
    repeats = max(1, 64 // sets)
    us = {grouped: graph_us(made, repeats=repeats) for grouped, made in calls.items()}
    made_rows = []
    for grouped, name in ((True, "prefix, grouped"), (False, "prefix, not grouped")):
        rate = shared.kv_bytes / us[grouped] * 1e6
        limit = shared.limit if grouped else 0.0
        made_rows.append(
            rows.Row(
                name=name,
                shape=shared.words,
                us=us[grouped],
                rate=f"{rate / 1e12:.2f} TB/s",
                ceiling_percent=100 * rate / ceilings.read,
                baseline=us[False] / us[True] if grouped else None,
                limit=f"<= {limit:g} us" if limit else "",
                holds=us[grouped] <= limit or not limit,
            )
        )
    return made_rows


def sdpa_rows(ceilings: Ceilings) -> list[rows.Row]:
    """torch's own attention on contiguous keys and values of 2 x 8,192 new tokens."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    shape = Shape(2, 8192, 0)
    q = torch.randn(2, 32, 8192, DIM, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(2, 8, 8192, DIM, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    made = []
    for name, backend in (
        ("torch SDPA, FlashAttention", SDPBackend.FLASH_ATTENTION),
        ("torch SDPA, cuDNN", SDPBackend.CUDNN_ATTENTION),
    ):
        with sdpa_kernel(backend):
            us = graph_us(
                [
                    lambda: torch.nn.functional.scaled_dot_product_attention(
                        q, k, v, is_causal=True, enable_gqa=True
                    )
                ]
            )
        rate = shape.flops / us * 1e6
        made.append(
            rows.Row(
                name,
                "2 x 8192, contiguous",
                us,
                f"{rate / 1e12:.0f} TFLOP/s",
                100 * rate / ceilings.matmul,
            )
        )
    return made


def main() -> int:
    arguments = rows.parser(__doc__.splitlines()[0])
    arguments.add_argument("--only", choices=CHOICES, action="append")
    options = arguments.parse_args()
    wanted = options.only or CHOICES
    ceilings = measure_ceilings()
    notes = [
        f"Measured ceilings: read {ceilings.read / 1e12:.2f} TB/s, copy {ceilings.copy / 1e12:.2f} "
        f"TB/s, bf16 matrix product {ceilings.matmul / 1e12:.0f} TFLOP/s, pinned memory "
        f"{ceilings.to_device / 1e9:.0f} GB/s to the device and {ceilings.to_cpu / 1e9:.0f} back."
    ]
    made: list[rows.Row] = []
    pool: Pool | None
    groups = {
        "decode": (DECODE, decode_row),
        "fp8": (DECODE_FLOAT8, decode_row),
        "prefill": (PREFILL, prefill_row),
    }
    for name in wanted:
        if name == "sdpa":
            made += sdpa_rows(ceilings)
            continue
        if name == "flashinfer":
            from bench_flashinfer import comparison  # which takes shapes and operands from here

            made += comparison()
            continue
        if name == "prefix":
            pool = Pool(decode(1, 1, 0.0), 60_000)
            for shared in PREFIX:
                made += prefix_rows(shared, pool, ceilings)
                print(*made[-2:], sep="\n", flush=True)
            continue
        shapes, row = groups[name]
        pool = None
        key = None
        for shape in shapes:
            if key != (shape.num_kv_heads, shape.block_size):
                key = (shape.num_kv_heads, shape.block_size)
                pool = None
                tokens = max(
                    4 * s.batch * s.length if s.kv_bytes < 2**28 else s.batch * s.length
                    for s in shapes
                    if (s.num_kv_heads, s.block_size) == key
                )
                pool = Pool(shape, max(tokens, 300_000) // shape.block_size + 64)
            assert pool is not None
            made.append(row(shape, pool, ceilings))
            print(made[-1], flush=True)
    return rows.report("paged-attention", made, save=options.save, notes=notes)


if __name__ == "__main__":
    sys.exit(main())
