"""What indirection costs: attention of the same kernels on shuffled blocks of 16, on blocks one
behind the other, and on a cache in which every head's keys are one run. Llama-3.1-8B's heads, bf16;
three rounds of each in turn, the median counts, and the spread of the contiguous times stands
beside.
"""

from __future__ import annotations

import gc
import statistics

import torch

from bench_paged_attention import DIM, Pool, Shape, decode, time_shape
from rows import Row

DECODES = ((1, 8192), (32, 1024), (128, 1024), (32, 4096))
PREFILLS = ((8, 2048), (2, 8192))
NUM_ROUNDS = 3


class HeadMajor(Pool):
    """Caches in which all blocks of a head are neighbours: with rising block ids a sequence's keys
    of one head are one run of memory, as in a cache without pages.
    """

    def __init__(self, shape: Shape, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        size = (shape.num_kv_heads, num_blocks, shape.block_size, DIM)
        self.caches = [
            torch.randn(size, device="cuda", dtype=torch.bfloat16).transpose(0, 1) for _ in range(2)
        ]


def measure(*, quick: bool) -> list[Row]:
    """Needs a GPU with 30 GB. x baseline: the time of a contiguous cache over this."""
    shapes = [decode(batch, length, 0.0) for batch, length in DECODES]
    shapes += [Shape(batch, length, 0) for batch, length in PREFILLS]
    made = []
    for shape in shapes[:1] if quick else shapes:
        needed = shape.batch * -(-shape.length // shape.block_size)
        num_blocks = max(3 * needed, 4 * 60 * 2**20 // (4096 * shape.block_size))
        pool, runs = Pool(shape, num_blocks), HeadMajor(shape, num_blocks)
        times: dict[str, list[float]] = {
            "contiguous": [],
            "blocks in order": [],
            "blocks shuffled": [],
        }
        for _ in range(NUM_ROUNDS):
            times["contiguous"].append(time_shape(shape, runs, shuffled=False))
            times["blocks in order"].append(time_shape(shape, pool, shuffled=False))
            times["blocks shuffled"].append(time_shape(shape, pool))
        made += rows_of("decode" if shape.new == 1 else "prefill", shape.words, times)
        del pool, runs
        gc.collect()
        torch.cuda.empty_cache()
    return made


def rows_of(kind: str, words: str, times: dict[str, list[float]]) -> list[Row]:
    base = times["contiguous"]
    contiguous = statistics.median(base)
    spread = 100 * (max(base) / min(base) - 1)
    made = []
    for name, all_us in times.items():
        us = statistics.median(all_us)
        rate = f"{100 * (us / contiguous - 1):+.1f} % of contiguous"
        if name == "contiguous":
            rate += f", spread of {len(base)} rounds {spread:.1f} %"
        made.append(Row(f"{kind}, {name}", words, us, rate, baseline=contiguous / us))
    return made
