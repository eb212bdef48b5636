"""The cache ops and the layers on the GPU, at 8,192 tokens of a Llama-3.1-8B layer.

Bytes: reshape_and_cache and gather_blocks read and write 2 * T * KV heads * head_dim elements;
fused_rotary_reshape_and_cache T * (heads + 2 * KV heads) * head_dim; copy_blocks its blocks;
rms_norm moves 2 and fused_add_rms_norm 4 streams of T * hidden; silu_and_mul and gelu_and_mul 3 of
T * intermediate; rotary_embedding 2 of T * (heads + KV heads) * head_dim. A percentage is of the
measured copy rate; `x baseline` of a fused op is the time of the ops that it stands for over its
own. Each op is compared with the oracle before it is timed. Swaps are in bench_cache_layout.py.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import rows
from gpu_timing import Ceilings, graph_us, measure_ceilings
from pagedkv import ops
from pagedkv.ops import reference

T, HEADS, KV_HEADS, DIM, HIDDEN, FEATURES, BLOCK = 8192, 32, 8, 128, 4096, 14336, 16
SETS = 3  # of inputs, in rotation: each is larger than the L2
REPEATS = 20  # of the rotation in one graph, so that the graph's own start counts little
AT_LEAST = 85.0  # percent of the copy rate
E4M3 = torch.float8_e4m3fn


def row(
    name: str,
    shape: str,
    num_bytes: float,
    calls: list[Callable[[], object]],
    ceilings: Ceilings,
    limit: bool = False,
) -> rows.Row:
    us = graph_us(calls, repeats=REPEATS)
    percent = 100 * num_bytes / us * 1e6 / ceilings.copy
    return rows.Row(
        name,
        shape,
        us,
        f"{num_bytes / us * 1e6 / 1e12:.2f} TB/s",
        percent,
        limit=f">= {AT_LEAST:g} %" if limit else "",
        holds=percent >= AT_LEAST or not limit,
    )


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def agrees(name: str, written: list[int], *operands: Any, **more: Any) -> None:
    """The op on copies of the operands against the oracle, where it writes."""
    mine = [x.clone() if isinstance(x, Tensor) else x for x in operands]
    want = [x.clone() if isinstance(x, Tensor) else x for x in operands]
    getattr(ops, name)(*mine, **more)
    getattr(reference, name)(*want, **more)
    for i in written:
        got, oracle = mine[i].float(), want[i].float()
        limit = 2 * torch.finfo(torch.bfloat16).eps * oracle.abs().max().item()
        error = (got - oracle).abs().max().item()
        assert error <= limit, f"{name}: operand {i} off by {error:.3g}, at most {limit:.3g}"


def layer_rows(ceilings: Ceilings) -> list[rows.Row]:
    weight = random(HIDDEN)
    wide = [random(T, HIDDEN) for _ in range(2 * SETS)]
    pairs = list(zip(wide[:SETS], wide[SETS:], strict=True))
    gates = [random(T, 2 * FEATURES) for _ in range(2)]
    out = random(T, FEATURES)
    agrees("rms_norm", [0], random(9, HIDDEN), random(9, HIDDEN), weight, 1e-5)
    agrees("fused_add_rms_norm", [0, 1], random(9, HIDDEN), random(9, HIDDEN), weight, 1e-5)
    agrees("silu_and_mul", [0], out[:9], gates[0][:9])
    made = [
        row(
            "rms_norm",
            f"{T} x {HIDDEN}",
            2 * T * HIDDEN * 2,
            [lambda a=a, b=b: ops.rms_norm(a, b, weight, 1e-5) for a, b in pairs],
            ceilings,
            limit=True,
        ),
        row(
            "fused_add_rms_norm",
            f"{T} x {HIDDEN}",
            4 * T * HIDDEN * 2,
            [lambda a=a, b=b: ops.fused_add_rms_norm(a, b, weight, 1e-5) for a, b in pairs],
            ceilings,
        ),
        row(
            "silu_and_mul",
            f"{T} x {FEATURES}",
            3 * T * FEATURES * 2,
            [lambda g=g: ops.silu_and_mul(out, g) for g in gates],
            ceilings,
            limit=True,
        ),
    ]
    for kind in ("none", "tanh"):
        agrees("gelu_and_mul", [0], out[:9], gates[0][:9], kind)
        made.append(
            row(
                f"gelu_and_mul ({kind})",
                f"{T} x {FEATURES}",
                3 * T * FEATURES * 2,
                [lambda g=g, k=kind: ops.gelu_and_mul(out, g, k) for g in gates],  # type: ignore[misc]
                ceilings,
            )
        )
    return made


def slots_of(kind: str, num_blocks: int) -> tuple[Tensor, ...]:
    """SETS of slots: of whole blocks in any order, as chunks of prompts take them, or every token
    somewhere else, as in a step of decodes alone."""
    if kind == "shuffled tokens":
        return torch.randperm(num_blocks * BLOCK, device="cuda")[: SETS * T].split(T)
    blocks = torch.randperm(num_blocks, device="cuda")[: SETS * T // BLOCK]
    offsets = torch.arange(BLOCK, device="cuda")
    return (blocks.unsqueeze(1) * BLOCK + offsets).flatten().split(T)


def cache_rows(dtype: torch.dtype, ceilings: Ceilings) -> list[rows.Row]:
    num_blocks = SETS * T // BLOCK + 64
    shape = (num_blocks, KV_HEADS, BLOCK, DIM)
    caches = [torch.zeros(shape, device="cuda").to(dtype) for _ in range(2)]
    projected = [random(T, HEADS + 2 * KV_HEADS, DIM) for _ in range(SETS)]
    parts = [p.split([HEADS, KV_HEADS, KV_HEADS], 1) for p in projected]
    positions = torch.randint(0, 8192, (T,), device="cuda")
    angles = torch.rand(8192, DIM // 2, device="cuda") * 6.28
    table = torch.cat([angles.cos(), angles.sin()], 1)  # rotated again and again, nothing grows
    one = torch.ones(1, device="cuda")
    scales = {"k_scale": one, "v_scale": one} if dtype == E4M3 else {}
    words = f"{T} tokens, {str(dtype).removeprefix('torch.')} cache"
    kv_bytes = 2 * T * KV_HEADS * DIM * (2 + dtype.itemsize)
    blocks = slots_of("shuffled blocks", num_blocks)
    few = [x[:9].clone() for x in parts[0]]
    small = [c[:9].clone() for c in caches]
    near = torch.arange(9, device="cuda") * BLOCK + 3
    agrees("reshape_and_cache", [2, 3], *few[1:], *small, near, **scales)
    agrees("rotary_embedding", [1, 2], positions[:9], *few[:2], table)
    agrees(
        "fused_rotary_reshape_and_cache",
        [1, 5, 6],
        positions[:9],
        *few,
        table,
        *small,
        near,
        **scales,
    )
    made = [
        row(
            "reshape_and_cache",
            f"{words}, {kind}",
            kv_bytes,
            [
                lambda p=p, s=s: ops.reshape_and_cache(*p[1:], *caches, s, **scales)
                for p, s in zip(parts, slots, strict=True)
            ],
            ceilings,
            limit=dtype != E4M3 and kind == "shuffled blocks",
        )
        for kind, slots in (
            ("shuffled blocks", blocks),
            ("shuffled tokens", slots_of("shuffled tokens", num_blocks)),
        )
    ]
    rotary = row(
        "rotary_embedding",
        f"{T} x ({HEADS} + {KV_HEADS}) x {DIM}",
        2 * T * (HEADS + KV_HEADS) * DIM * 2,
        [lambda p=p: ops.rotary_embedding(positions, *p[:2], table) for p in parts],
        ceilings,
    )
    fused = row(
        "fused_rotary_reshape_and_cache",
        f"{words}, {HEADS} query heads",
        kv_bytes + 2 * T * HEADS * DIM * 2,
        [
            lambda p=p, s=s: ops.fused_rotary_reshape_and_cache(
                positions, *p, table, *caches, s, **scales
            )
            for p, s in zip(parts, blocks, strict=True)
        ],
        ceilings,
    )
    fused = dataclasses.replace(fused, baseline=(made[0].us + rotary.us) / fused.us)
    starts = torch.arange(0, T + 1, T // 8, device="cuda", dtype=torch.int32)
    gathered = [[random(T, KV_HEADS, DIM) for _ in range(2)] for _ in range(SETS)]
    every = [(s // BLOCK)[::BLOCK].int().view(8, -1) for s in blocks]
    agrees("gather_blocks", [0, 1], *gathered[0], *caches, every[0], starts, **scales)
    gather = row(
        "gather_blocks",
        f"8 x {T // 8} tokens, {str(dtype).removeprefix('torch.')} cache",
        kv_bytes,
        [
            lambda g=g, e=e: ops.gather_blocks(*g, *caches, e, starts, **scales)
            for g, e in zip(gathered, every, strict=True)
        ],
        ceilings,
    )
    return [*made, *([] if dtype == E4M3 else [rotary]), fused, gather]


def copy_rows(ceilings: Ceilings) -> list[rows.Row]:
    made = []
    for count in (8, 512):
        pool = torch.zeros(
            32, 2, 2 * count * SETS, KV_HEADS, BLOCK, DIM, device="cuda", dtype=torch.bfloat16
        )
        order = torch.randperm(2 * count * SETS).reshape(SETS, count, 2)
        made.append(
            row(
                "copy_blocks",
                f"{count} blocks, 32 layers",
                2 * count * pool[:, :, 0].numel() * 2,
                [lambda p=p, c=pool: ops.copy_blocks(c, p) for p in order.contiguous().unbind()],  # type: ignore[misc]
                ceilings,
                limit=count == 512,
            )
        )
    return made


def main() -> int:
    options = rows.parser(__doc__.splitlines()[0]).parse_args()
    ceilings = measure_ceilings()
    made = layer_rows(ceilings)
    for dtype in (torch.bfloat16, E4M3):
        made += cache_rows(dtype, ceilings)
    made += copy_rows(ceilings)
    notes = [f"Measured copy rate {ceilings.copy / 1e12:.2f} TB/s."]
    return rows.report("gpu-ops", made, save=options.save, notes=notes)


if __name__ == "__main__":
    sys.exit(main())
