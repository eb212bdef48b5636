"""Calls one op a few times, on inputs of its benchmark, for a profiler to look at:

    ncu --clock-control none --set full --kernel-name regex:reshape --launch-skip 8 \\
        --launch-count 2 python benchmarks/profile_ops.py reshape_and_cache

`decode` takes its shape as batch x length: `decode 8x2048`. Inputs rotate, none is in the L2.
"""

from __future__ import annotations

import argparse

import torch

import bench_gpu_ops
from bench_gpu_ops import BLOCK, DIM, KV_HEADS, SETS, T
from bench_paged_attention import Pool, decode, operands
from pagedkv import ops
from pagedkv.ops import paged_attention

ROUNDS = 6


def write_caches() -> None:
    num_blocks = SETS * T // BLOCK + 64
    shape = (num_blocks, KV_HEADS, BLOCK, DIM)
    caches = [torch.zeros(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    rows = [bench_gpu_ops.random(T, 6 * KV_HEADS, DIM) for _ in range(SETS)]
    slots = bench_gpu_ops.slots_of("shuffled blocks", num_blocks)
    for _ in range(ROUNDS):
        for row, slot in zip(rows, slots, strict=True):
            _, key, value = row.split([4 * KV_HEADS, KV_HEADS, KV_HEADS], 1)
            ops.reshape_and_cache(key, value, *caches, slot)


def attend(batch: int, length: int) -> None:
    shape = decode(batch, length, 0.0)
    needed = batch * -(-length // BLOCK)
    pool = Pool(shape, 4 * needed)
    ids = torch.randperm(pool.num_blocks, device="cuda").int()
    calls = [operands(shape, pool, mine) for mine in ids.split(needed)]
    out = torch.empty_like(calls[0]["query"])  # type: ignore[call-overload]
    for _ in range(ROUNDS):
        for call in calls:
            paged_attention(out, None, **call)  # type: ignore[arg-type]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("op", choices=["reshape_and_cache", "decode"])
    parser.add_argument("shape", nargs="?", default="8x2048", help="of decode: batch x length")
    options = parser.parse_args()
    if options.op == "decode":
        attend(*map(int, options.shape.split("x")))
    else:
        write_caches()
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
