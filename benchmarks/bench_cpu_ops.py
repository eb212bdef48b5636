"""Small CPU operators against the machine's memory copy rate and against plain torch.

Each is checked against the oracle first. Bytes are what must be read and written once, by the
formula beside each operator; inputs rotate over buffers larger than the last-level cache, but for
the decode shapes, which fit any cache and show the cost of a call. The baseline is the same
computation in torch's own operators on the same data.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from pagedkv import ops
from pagedkv.ops import reference
from rows import Row, median_us, parser, report

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "ops"))
from cases import CACHE_PERFORMANCE, ROTARY_PERFORMANCE, ROWS_PERFORMANCE

ROTATE_BYTES = 128 << 20
DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Work:
    """One operator on one shape: how to make operands, run it, check it, and what it moves."""

    name: str
    shape: str
    num_bytes: int
    make: Callable[[], tuple[Tensor, ...]]
    run: Callable[..., object]
    baseline: Callable[..., object] | None
    check: Callable[..., None]


def copy_rate() -> float:
    """Bytes read and written per second by torch's copy of 128 MB."""
    source = torch.ones(ROTATE_BYTES, dtype=torch.uint8)
    target = torch.empty_like(source)
    us = median_us(lambda: target.copy_(source), repeats=9, warmup=2)
    return 2 * ROTATE_BYTES / us * 1e6


def measure(work: Work, ceiling: float) -> Row:
    torch.manual_seed(0)
    operands = work.make()
    work.check(*operands)
    copies = max(1, min(64, ROTATE_BYTES // work.num_bytes)) if work.num_bytes > 1 << 20 else 1
    rotating = cycle([work.make() for _ in range(copies)])
    per_run = max(1, (1 << 20) // work.num_bytes)

    def repeat(function: Callable[..., object]) -> float:
        def once() -> None:
            for _ in range(per_run):
                function(*next(rotating))

        return median_us(once, repeats=15, warmup=copies) / per_run

    us = repeat(work.run)
    baseline = repeat(work.baseline) / us if work.baseline else None
    rate = work.num_bytes / us * 1e6
    return Row(
        work.name,
        work.shape,
        us,
        rate=f"{rate / 1e9:.1f} GB/s",
        ceiling_percent=100 * rate / ceiling,
        baseline=baseline,
    )


def matches(
    op: Callable[..., object], oracle: Callable[..., object], written: int
) -> Callable[..., None]:
    """A check that runs both on copies and compares operand `written`."""

    def check(*operands: Tensor) -> None:
        mine = [o.clone() for o in operands]
        theirs = [o.clone() for o in operands]
        theirs[written] = theirs[written].float()
        op(*mine)
        oracle(*theirs)
        torch.testing.assert_close(mine[written], theirs[written].to(mine[written].dtype))

    return check


def row_works(dtype: torch.dtype) -> Iterable[Work]:
    size = dtype.itemsize
    for case in ROWS_PERFORMANCE:
        t, n = case.num_tokens, case.width
        shape = f"{case.name}: {t} x {n}, {str(dtype).removeprefix('torch.')}"

        def rows(t: int = t, n: int = n) -> Tensor:
            return torch.randn(t, n).to(dtype)

        def weight(n: int = n) -> Tensor:
            return torch.randn(n).to(dtype)

        yield Work(
            "rms_norm",
            shape,
            2 * t * n * size,
            lambda rows=rows, weight=weight: (rows(), rows(), weight()),
            lambda out, x, w: ops.rms_norm(out, x, w, 1e-5),
            lambda out, x, w: functional.rms_norm(x, x.shape[1:], w, 1e-5),
            matches(
                lambda out, x, w: ops.rms_norm(out, x, w, 1e-5),
                lambda out, x, w: reference.rms_norm(out, x, w, 1e-5),
                written=0,
            ),
        )
        yield Work(
            "fused_add_rms_norm",
            shape,
            4 * t * n * size,
            lambda rows=rows, weight=weight: (rows(), rows(), weight()),
            lambda x, r, w: ops.fused_add_rms_norm(x, r, w, 1e-5),
            lambda x, r, w: functional.rms_norm(r.add_(x), x.shape[1:], w, 1e-5),
            matches(
                lambda x, r, w: ops.fused_add_rms_norm(x, r, w, 1e-5),
                lambda x, r, w: reference.fused_add_rms_norm(x, r, w, 1e-5),
                written=0,
            ),
        )
        for name, op, oracle, act in (
            ("silu_and_mul", ops.silu_and_mul, reference.silu_and_mul, functional.silu),
            ("gelu_and_mul", ops.gelu_and_mul, reference.gelu_and_mul, functional.gelu),
        ):
            yield Work(
                name,
                shape,
                3 * t * n * size,
                lambda t=t, n=n, rows=rows: (rows(), torch.randn(t, 2 * n).to(dtype)),
                op,
                lambda out, x, act=act, n=n: torch.mul(act(x[:, :n]), x[:, n:], out=out),
                matches(op, oracle, written=0),
            )


def rotary_works(dtype: torch.dtype) -> Iterable[Work]:
    for case in ROTARY_PERFORMANCE:
        t, d = case.num_tokens, case.head_dim
        table = torch.rand(t, case.rotary_dim)
        positions = torch.arange(t)

        def make(case=case, t=t, d=d) -> tuple[Tensor, ...]:
            query = torch.randn(t, case.num_heads, d).to(dtype)
            return query, torch.randn(t, case.num_kv_heads, d).to(dtype)

        for neox in (True, False):

            def run(q, k, positions=positions, table=table, neox=neox) -> None:
                ops.rotary_embedding(positions, q, k, table, neox)

            def oracle(q, k, positions=positions, table=table, neox=neox) -> None:
                reference.rotary_embedding(positions, q, k, table, neox)

            yield Work(
                "rotary_embedding, " + ("NeoX" if neox else "GPT-J"),
                f"{case.name}: {t} x {case.num_heads}/{case.num_kv_heads} x {d}, "
                f"{str(dtype).removeprefix('torch.')}",
                2 * t * (case.num_heads + case.num_kv_heads) * d * dtype.itemsize,
                make,
                run,
                None,
                matches(run, oracle, written=0),
            )


def cache_works(dtype: torch.dtype, cache_dtype: torch.dtype) -> Iterable[Work]:
    for case in CACHE_PERFORMANCE:
        t, g, d = case.num_tokens, case.num_kv_heads, case.head_dim
        slots = torch.randperm(case.num_blocks * case.block_size)[:t]
        num_used = t // case.block_size
        tables = torch.randperm(case.num_blocks)[:num_used].int().unsqueeze(0)
        starts = torch.tensor([0, t]).int()
        scales = {}
        if cache_dtype.itemsize == 1:
            scales = {"k_scale": torch.tensor([0.1]), "v_scale": torch.tensor([0.1])}
        moved = 2 * t * g * d * (dtype.itemsize + cache_dtype.itemsize)
        names = [str(x).removeprefix("torch.") for x in (dtype, cache_dtype)]
        shape = f"{case.name}: {t} x {g} x {d}, {names[0]} <-> {names[1]}"

        def make(case=case, t=t, g=g, d=d) -> tuple[Tensor, ...]:
            caches = [
                torch.randn(case.num_blocks, g, case.block_size, d).to(cache_dtype)
                for _ in range(2)
            ]
            return torch.randn(t, g, d).to(dtype), torch.randn(t, g, d).to(dtype), *caches

        def write(k, v, kc, vc, slots=slots, scales=scales) -> None:
            ops.reshape_and_cache(k, v, kc, vc, slots, **scales)

        def write_oracle(k, v, kc, vc, slots=slots, scales=scales) -> None:
            reference.reshape_and_cache(k, v, kc, vc, slots, **scales)

        def read(k, v, kc, vc, tables=tables, starts=starts, scales=scales) -> None:
            ops.gather_blocks(k, v, kc, vc, tables, starts, **scales)

        def check(k, v, kc, vc, write=write, write_oracle=write_oracle) -> None:
            expected = kc.clone(), vc.clone()
            write(k, v, kc, vc)
            write_oracle(k, v, *expected)
            assert torch.equal(kc.float(), expected[0].float())
            assert torch.equal(vc.float(), expected[1].float())

        yield Work("reshape_and_cache", shape, moved, make, write, None, check)
        yield Work("gather_blocks", shape, moved, make, read, None, check)


def block_works(dtype: torch.dtype) -> Iterable[Work]:
    # 16 layers of a Llama-3-8B cache, 256 blocks of which a quarter is copied to another quarter.
    pool_shape = (16, 2, 256, 8, 16, 128)
    pairs = torch.randperm(256)[:128].view(2, 64).T.contiguous()
    moved = 2 * 64 * 16 * 2 * 8 * 16 * 128 * dtype.itemsize

    def make() -> tuple[Tensor, ...]:
        return (torch.randn(pool_shape).to(dtype),)

    def plain(pool: Tensor) -> None:
        pool[:, :, pairs[:, 1]] = pool[:, :, pairs[:, 0]]

    def check(pool: Tensor) -> None:
        expected = pool.clone()
        reference.copy_blocks(expected, pairs)
        ops.copy_blocks(pool, pairs)
        assert torch.equal(pool, expected)

    name = str(dtype).removeprefix("torch.")
    shape = f"64 blocks of 16 x 8 x 128 in 16 layers, {name}"
    yield Work("copy_blocks", shape, moved, make, lambda p: ops.copy_blocks(p, pairs), plain, check)


def merge_works(dtype: torch.dtype) -> Iterable[Work]:
    t, h, d = 4096, 32, 128

    def make() -> tuple[Tensor, ...]:
        def state() -> tuple[Tensor, Tensor]:
            return torch.randn(t, h, d).to(dtype), torch.randn(t, h)

        return torch.empty(t, h, d).to(dtype), torch.empty(t, h), *state(), *state()

    yield Work(
        "merge_attention_states",
        f"{t} x {h} x {d}, {str(dtype).removeprefix('torch.')}",
        3 * t * h * (d * dtype.itemsize + 4),
        make,
        ops.merge_attention_states,
        None,
        matches(ops.merge_attention_states, reference.merge_attention_states, written=0),
    )


def main() -> int:
    arguments = parser(__doc__.splitlines()[0]).parse_args()
    ceiling = copy_rate()
    rows = [
        Row(
            "memory copy (ceiling)",
            "128 MB",
            2 * ROTATE_BYTES / ceiling * 1e6,
            rate=f"{ceiling / 1e9:.1f} GB/s",
            ceiling_percent=100.0,
        )
    ]
    for dtype in DTYPES:
        works = [
            *row_works(dtype),
            *rotary_works(dtype),
            *cache_works(dtype, dtype),
            *cache_works(dtype, torch.float8_e4m3fn),
            *block_works(dtype),
            *merge_works(dtype),
        ]
        rows += [measure(work, ceiling) for work in works]
    return report("cpu-ops", rows, save=arguments.save)


if __name__ == "__main__":
    sys.exit(main())
