"""Layer-major or block-major storage of the cache: what each costs a decode and a swap.

Layer-major: [layers, 2, blocks, ...], a layer's blocks are neighbours. Block-major:
[blocks, layers, 2, ...], a block's layers are neighbours. To the kernels both are only strides. 32
layers of Llama-3.1-8B: bf16, 8 KV heads of 128, blocks of 16 tokens, 2 MiB over all layers.

decode: one layer's attention, shuffled blocks, several sets in rotation; percentage of the measured
read rate. swap_blocks: 64 blocks of all layers between the device and pinned memory, alone; of the
measured rate of pinned memory. overlap: the same swap on a side stream beside matrix products on
the main stream; the percentage is the longer of the two alone over both together, 100 if the
shorter costs nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor

import rows
from bench_paged_attention import Shape, check, decode, operands
from gpu_timing import L2_BYTES, Ceilings, graph_us, measure_ceilings, stream_us
from pagedkv import ops

LAYERS, KV_HEADS, BLOCK, DIM = 32, 8, 16, 128
LAYOUTS = ("layer-major", "block-major")
DECODE = (decode(8, 2048, 0), decode(32, 1024, 0), decode(32, 4096, 0), decode(128, 1024, 0))
SWAPPED = 64  # blocks
AT_LEAST = 90.0  # percent of the pinned memory's rate, and of the longer one of an overlap


def empty_pool(layout: str, num_blocks: int, device: str, kv_heads: int = KV_HEADS) -> Tensor:
    """[layers, 2, num_blocks, KV heads, block, dim] in the layout; pinned on the CPU."""
    inner = (kv_heads, BLOCK, DIM)
    pinned = device == "cpu"
    if layout == "layer-major":
        shape = (LAYERS, 2, num_blocks, *inner)
        return torch.empty(shape, dtype=torch.bfloat16, device=device, pin_memory=pinned)
    shape = (num_blocks, LAYERS, 2, *inner)
    pool = torch.empty(shape, dtype=torch.bfloat16, device=device, pin_memory=pinned)
    return pool.permute(1, 2, 0, 3, 4, 5)


class Layer:
    """One layer's caches in a pool of all layers; what bench_paged_attention takes as a pool."""

    def __init__(self, layout: str, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.caches = list(empty_pool(layout, num_blocks, "cuda")[LAYERS // 2])
        for cache in self.caches:
            for piece in cache.split(1024):
                piece.copy_(torch.randn(piece.shape, device="cuda", dtype=torch.bfloat16))


def decode_row(shape: Shape, layout: str, ceilings: Ceilings) -> rows.Row:
    needed = shape.batch * -(-shape.length // BLOCK)
    sets = max(2, -(-4 * L2_BYTES // shape.kv_bytes))
    layer = Layer(layout, sets * needed + 64)
    ids = torch.randperm(layer.num_blocks, device="cuda")[: sets * needed].int()
    calls: list[Callable[[], object]] = []
    for mine in ids.split(needed):
        call = operands(shape, layer, mine)  # type: ignore[arg-type]
        out = torch.empty_like(call["query"])  # type: ignore[call-overload]
        if not calls:
            ops.paged_attention(out, None, **call)  # type: ignore[arg-type]
            check(shape, call, out)
        calls.append(lambda c=call, o=out: ops.paged_attention(o, None, **c))  # type: ignore[misc]
    us = graph_us(calls, repeats=max(1, 64 // len(calls)))
    rate = shape.kv_bytes / us * 1e6
    return rows.Row(
        "decode",
        f"{shape.words}, {layout}",
        us,
        f"{rate / 1e12:.2f} TB/s",
        100 * rate / ceilings.read,
    )


def swap_calls(layout: str, kv_heads: int = KV_HEADS) -> dict[str, Callable[[], object]]:
    """Swapping in and out, checked once against what should have moved."""
    pools = {place: empty_pool(layout, 256, place, kv_heads) for place in ("cuda", "cpu")}
    made: dict[str, Callable[[], object]] = {}
    for way, source, target in (("in", "cpu", "cuda"), ("out", "cuda", "cpu")):
        pairs = torch.stack([torch.randperm(256)[:SWAPPED] for _ in range(2)], dim=1)
        pools[source].copy_(torch.randn(kv_heads, BLOCK, DIM))
        ops.swap_blocks(pools[source], pools[target], pairs)
        torch.cuda.synchronize()
        sent, arrived = (pools[p][:, :, pairs[:, i]].cpu() for i, p in ((0, source), (1, target)))
        assert torch.equal(sent, arrived), f"swap {way}, {layout}: wrong blocks"
        made[way] = lambda s=source, t=target, p=pairs: ops.swap_blocks(pools[s], pools[t], p)
    return made


def swap_row(
    way: str, swap: Callable[[], object], shape: str, num_bytes: int, ceilings: Ceilings
) -> rows.Row:
    """A swap alone, on a stream of its own."""
    rate = ceilings.to_device if way == "in" else ceilings.to_cpu
    with torch.cuda.stream(torch.cuda.Stream()):
        us = stream_us(swap)
    percent = 100 * num_bytes / us * 1e6 / rate
    return rows.Row(
        f"swap_blocks {way}",
        f"{SWAPPED} blocks, {LAYERS} layers, {shape}",
        us,
        f"{num_bytes / us * 1e6 / 1e9:.1f} GB/s",
        percent,
        limit=f">= {AT_LEAST:g} %",
        holds=percent >= AT_LEAST,
    )


def swap_rows(layout: str, ceilings: Ceilings) -> list[rows.Row]:
    num_bytes = SWAPPED * LAYERS * 2 * KV_HEADS * BLOCK * DIM * 2
    side = torch.cuda.Stream()
    a, b = (torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    c = torch.empty_like(a)
    made = []

    def products() -> None:
        for _ in range(24):
            torch.mm(a, b, out=c)

    def together(swap: Callable[[], object]) -> None:
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            swap()
        products()
        main.wait_stream(side)

    compute = stream_us(products)
    for way, swap in swap_calls(layout).items():
        made.append(swap_row(way, swap, layout, num_bytes, ceilings))
        both = stream_us(lambda s=swap: together(s))  # type: ignore[misc]
        longer = max(made[-1].us, compute)
        made.append(
            rows.Row(
                f"overlap, swap {way}",
                f"24 products of 4096^3 ({compute:.0f} us) and the swap, {layout}",
                both,
                f"{(made[-1].us + compute) / both:.2f} x of one after the other",
                100 * longer / both,
                limit=f">= {AT_LEAST:g} %" if layout == "block-major" else "",
                holds=100 * longer / both >= AT_LEAST or layout != "block-major",
            )
        )
    return made


def small_swap_rows(ceilings: Ceilings) -> list[rows.Row]:
    """The smallest pieces with a threshold: 16 KB, those of 4 KV heads in one layer."""
    num_bytes = SWAPPED * LAYERS * 2 * (KV_HEADS // 2) * BLOCK * DIM * 2
    return [
        swap_row(way, swap, "layer-major, pieces of 16 KB", num_bytes, ceilings)
        for way, swap in swap_calls("layer-major", KV_HEADS // 2).items()
    ]


def main() -> int:
    options = rows.parser(__doc__.splitlines()[0]).parse_args()
    ceilings = measure_ceilings()
    made = []
    for shape in DECODE:
        made += [decode_row(shape, layout, ceilings) for layout in LAYOUTS]
        torch.cuda.empty_cache()
    for layout in LAYOUTS:
        made += swap_rows(layout, ceilings)
    made += small_swap_rows(ceilings)
    notes = [
        f"Measured read rate {ceilings.read / 1e12:.2f} TB/s; pinned memory "
        f"{ceilings.to_device / 1e9:.0f} GB/s in, {ceilings.to_cpu / 1e9:.0f} GB/s out."
    ]
    return rows.report("cache-layout", made, save=options.save, notes=notes)


if __name__ == "__main__":
    sys.exit(main())
