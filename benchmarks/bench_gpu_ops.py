"""The cache ops and the layers on the GPU, at 8,192 tokens of a Llama-3.1-8B layer.

Bytes: reshape_and_cache reads and writes 2 * T * KV heads * head_dim elements; copy_blocks reads
and writes its blocks; rms_norm 2 and fused_add_rms_norm 4 streams of T * hidden; silu_and_mul 3 of
T * intermediate; rotary_embedding 2 of T * (heads + KV heads) * head_dim. A percentage is of the
measured copy rate; of swap_blocks, of the measured rate of pinned memory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

import rows
from gpu_timing import Ceilings, graph_us, measure_ceilings, stream_us
from pagedkv import ops

T, HEADS, KV_HEADS, DIM, HIDDEN, FEATURES, BLOCK = 8192, 32, 8, 128, 4096, 14336, 16
SETS = 3  # of inputs, in rotation: each is larger than the L2
AT_LEAST = 85.0  # percent of the copy rate


def row(
    name: str,
    shape: str,
    num_bytes: float,
    calls: list[Callable[[], object]],
    rate: float,
    limit: bool = True,
) -> rows.Row:
    us = graph_us(calls)
    percent = 100 * num_bytes / us * 1e6 / rate
    return rows.Row(
        name,
        shape,
        us,
        f"{num_bytes / us * 1e6 / 1e12:.2f} TB/s",
        percent,
        limit=f">= {AT_LEAST:g} %" if limit else "",
        holds=percent >= AT_LEAST or not limit,
    )


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def layer_rows(ceilings: Ceilings) -> list[rows.Row]:
    weight = random(HIDDEN)
    wide = [random(T, HIDDEN) for _ in range(2 * SETS)]
    pairs = list(zip(wide[:SETS], wide[SETS:], strict=True))
    gates = [random(T, 2 * FEATURES) for _ in range(2)]
    out = random(T, FEATURES)
    heads = [(random(T, HEADS, DIM), random(T, KV_HEADS, DIM)) for _ in range(SETS)]
    positions = torch.randint(0, 8192, (T,), device="cuda")
    table = torch.randn(8192, DIM, device="cuda")
    return [
        row(
            "rms_norm",
            f"{T} x {HIDDEN}",
            2 * T * HIDDEN * 2,
            [lambda a=a, b=b: ops.rms_norm(a, b, weight, 1e-5) for a, b in pairs],
            ceilings.copy,
        ),
        row(
            "fused_add_rms_norm",
            f"{T} x {HIDDEN}",
            4 * T * HIDDEN * 2,
            [lambda a=a, b=b: ops.fused_add_rms_norm(a, b, weight, 1e-5) for a, b in pairs],
            ceilings.copy,
            limit=False,
        ),
        row(
            "silu_and_mul",
            f"{T} x {FEATURES}",
            3 * T * FEATURES * 2,
            [lambda g=g: ops.silu_and_mul(out, g) for g in gates],
            ceilings.copy,
        ),
        row(
            "rotary_embedding",
            f"{T} x ({HEADS} + {KV_HEADS}) x {DIM}",
            2 * T * (HEADS + KV_HEADS) * DIM * 2,
            [lambda q=q, k=k: ops.rotary_embedding(positions, q, k, table, True) for q, k in heads],
            ceilings.copy,
            limit=False,
        ),
    ]


def cache_rows(ceilings: Ceilings) -> list[rows.Row]:
    blocks = SETS * T // BLOCK + 64
    made = []
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        caches = [
            torch.zeros(blocks, KV_HEADS, BLOCK, DIM, device="cuda").to(dtype) for _ in range(2)
        ]
        slots = torch.randperm(blocks * BLOCK, device="cuda")[: SETS * T].split(T)
        wide = [random(T, HEADS + 2 * KV_HEADS, DIM) for _ in range(SETS)]
        one = torch.ones(1, device="cuda")
        scales = {} if dtype == torch.bfloat16 else {"k_scale": one, "v_scale": one}
        made.append(
            row(
                "reshape_and_cache",
                f"{T} tokens, {str(dtype).removeprefix('torch.')} cache",
                2 * T * KV_HEADS * DIM * (2 + dtype.itemsize),
                [
                    lambda w=w, s=s, c=caches, k=scales: ops.reshape_and_cache(  # type: ignore[misc]
                        w[:, HEADS : HEADS + KV_HEADS],
                        w[:, HEADS + KV_HEADS :],
                        *c,
                        s,
                        **k,
                    )
                    for w, s in zip(wide, slots, strict=True)
                ],
                ceilings.copy,
                limit=dtype == torch.bfloat16,
            )
        )
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
                [lambda p=p, c=pool: ops.copy_blocks(c, p) for p in order.contiguous().unbind()],
                ceilings.copy,
                limit=count == 512,
            )
        )
    return made


def swap_rows(ceilings: Ceilings) -> list[rows.Row]:
    """64 blocks of 32 layers, layer-major (pieces of 32 KB) and block-major (2 MB)."""
    made = []
    count = 64
    side = torch.cuda.Stream()
    for layout, order in (("layer-major", None), ("block-major", (1, 2, 0, 3, 4, 5))):
        shape = [32, 2, 256, KV_HEADS, BLOCK, DIM]
        pools = []
        for place in ("cuda", "cpu"):
            sizes = shape if order is None else [shape[2], *shape[:2], *shape[3:]]
            pool = torch.zeros(sizes, dtype=torch.bfloat16, device=place)
            pool = pool.pin_memory() if place == "cpu" else pool
            pools.append(pool if order is None else pool.permute(*order))
        num_bytes = count * pools[0][:, :, 0].numel() * 2
        pairs = torch.stack([torch.randperm(256)[:count], torch.randperm(256)[:count]], dim=1)
        for way, (source, target), rate in (
            ("in", (pools[1], pools[0]), ceilings.to_device),
            ("out", pools, ceilings.to_cpu),
        ):
            for stream_name, stream in (("side stream", side), ("default stream", None)):
                with torch.cuda.stream(stream):
                    us = stream_us(lambda a=source, b=target, p=pairs: ops.swap_blocks(a, b, p))
                percent = 100 * num_bytes / us * 1e6 / rate
                made.append(
                    rows.Row(
                        f"swap_blocks {way}",
                        f"{count} blocks, 32 layers, {layout}, {stream_name}",
                        us,
                        f"{num_bytes / us * 1e6 / 1e9:.1f} GB/s",
                        percent,
                        limit=">= 90 %" if stream else "",
                        holds=percent >= 90 or not stream,
                    )
                )
    return made


def main() -> int:
    options = rows.parser(__doc__.splitlines()[0]).parse_args()
    ceilings = measure_ceilings()
    made = layer_rows(ceilings) + cache_rows(ceilings) + swap_rows(ceilings)
    notes = [
        f"Measured copy rate {ceilings.copy / 1e12:.2f} TB/s; pinned memory "
        f"{ceilings.to_device / 1e9:.0f} GB/s in, {ceilings.to_cpu / 1e9:.0f} GB/s out."
    ]
    return rows.report("gpu-ops", made, save=options.save, notes=notes)


if __name__ == "__main__":
    sys.exit(main())
