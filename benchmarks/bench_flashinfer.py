"""FlashInfer beside pagedkv: rows of bench_paged_attention.py, with its shapes, caches and timing.

FlashInfer is not needed by pagedkv: where it is not installed, there are none. It compiles its
kernels at the first call (nvcc), which takes minutes. Its outputs are compared with pagedkv's
before they are timed; planning is left out of its time, as its users plan once a step.
`x baseline` of a pagedkv row is FlashInfer's time over pagedkv's.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import rows
from bench_paged_attention import DIM, Pool, Shape, decode, operands
from gpu_timing import L2_BYTES, graph_us
from pagedkv import ops

SHAPES = (
    decode(8, 2048, 0),
    decode(32, 1024, 0),
    decode(32, 4096, 0),
    decode(128, 1024, 0),
    Shape(8, 2048, 0),
    Shape(2, 8192, 0),
)


def planned(shape: Shape, call: dict[str, Any], workspace: Tensor) -> Any:
    """FlashInfer's wrapper, planned for the call: its run(query, caches, out=...) attends."""
    import flashinfer

    blocks = -(-shape.length // shape.block_size)
    starts = torch.arange(0, shape.batch + 1, dtype=torch.int32, device="cuda")
    last = torch.full_like(starts[1:], (shape.length - 1) % shape.block_size + 1)
    pages = (starts * blocks, call["block_tables"].flatten().contiguous(), last)
    sizes = (shape.num_heads, shape.num_kv_heads, DIM, shape.block_size)
    types = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
    if shape.new == 1:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "HND", use_tensor_cores=True
        )
        wrapper.plan(*pages, *sizes, sm_scale=call["scale"], **types)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
        wrapper.plan(
            call["query_start_loc"], *pages, *sizes, causal=True, sm_scale=call["scale"], **types
        )
    return wrapper


def shape_rows(shape: Shape) -> list[rows.Row]:
    needed = shape.batch * -(-shape.length // shape.block_size)
    sets = max(2, -(-4 * L2_BYTES // shape.kv_bytes))
    pool = Pool(shape, sets * needed + 64)
    ids = torch.randperm(pool.num_blocks, device="cuda")[: sets * needed].int()
    mine: list[Callable[[], object]] = []
    theirs: list[Callable[[], object]] = []
    for blocks in ids.split(needed):
        call: dict[str, Any] = operands(shape, pool, blocks)
        workspace = torch.zeros(2**27, dtype=torch.uint8, device="cuda")  # it wants zeros
        wrapper = planned(shape, call, workspace)
        outs = [torch.empty_like(call["query"]) for _ in range(2)]
        mine.append(lambda c=call, o=outs[0]: ops.paged_attention(o, None, **c))  # type: ignore[misc]
        theirs.append(
            lambda w=wrapper, c=call, o=outs[1]: w.run(c["query"], tuple(pool.caches), out=o)  # type: ignore[misc]
        )
        if len(mine) == 1:
            mine[0]()
            theirs[0]()
            torch.testing.assert_close(outs[0], outs[1], atol=0.02, rtol=0.02)
    repeats = max(1, 64 // sets) if shape.new == 1 else 1
    us = {
        name: graph_us(calls, repeats=repeats)
        for name, calls in (("FlashInfer", theirs), ("pagedkv", mine))
    }

    def rate(time: float) -> str:
        if shape.new == 1:
            return f"{shape.kv_bytes / time * 1e6 / 1e12:.2f} TB/s"
        return f"{shape.flops / time * 1e6 / 1e12:.0f} TFLOP/s"

    kind = "decode" if shape.new == 1 else "prefill"
    return [
        rows.Row(
            f"{kind}, {name}",
            shape.words,
            time,
            rate(time),
            baseline=us["FlashInfer"] / time if name == "pagedkv" else None,
        )
        for name, time in us.items()
    ]


def comparison() -> list[rows.Row]:
    """All rows, or none where FlashInfer is not installed."""
    if importlib.util.find_spec("flashinfer") is None:
        print("FlashInfer is not installed: nothing to compare with")
        return []
    return [row for shape in SHAPES for row in shape_rows(shape)]
