"""Swap against recompute: the time to move a sequence's blocks to the CPU and back, and the time to
compute its tokens again, alone on one H200, by length and block size; what the engine's automatic
choice would take, and what it loses to the better one. Llama-3.1-8B, and Qwen3-0.6B, which computes
a token about as fast as it moves.
"""

from __future__ import annotations

import gc
import json
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from bench_throughput import SHAPES
from claims.measure_gpu import config_of
from claims.simulated import Setting
from gpu_timing import stream_us
from pagedkv.engine import Engine
from pagedkv.engine.loading import load
from pagedkv.engine.rate_meter import RateMeter
from pagedkv.kv_cache import CacheShape, KVCache
from pagedkv.sampling_params import SamplingParams
from pagedkv.scheduler.cost_model import choose
from rows import Row

LENGTHS = (16, 64, 256, 512, 1024, 2048, 4096, 8192)
BLOCK_SIZES = (1, 4, 16, 64, 256)
MIN_LEN = 256  # of the requests that the choice is summed up for
RATED_LEN = 2048  # the link's rate is taken from a swap of this many tokens


@dataclass(frozen=True, slots=True)
class Times:
    """Microseconds to move length tokens out and back, and to compute them again."""

    length: int
    block_size: int
    swap_us: float
    recompute_us: float


def measure(*, quick: bool) -> list[Row]:
    """Needs a GPU with 30 GB, and 3 GB of CPU memory to pin."""
    lengths, sizes = ((64, 2048), (16,)) if quick else (LENGTHS, BLOCK_SIZES)
    made: list[Row] = []
    for name in ("Llama-3.1-8B", "Qwen3-0.6B"):
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(SHAPES[name]))
            config = config_of(folder, Setting(20_000, max_model_len=8200, max_num_seqs=16))
            loaded = load(config)
            shape = loaded.cache_shape
            engine = Engine(loaded, config)
            recompute = {length: _recompute_us(engine, length) for length in lengths}
        del engine, loaded
        gc.collect()
        torch.cuda.empty_cache()
        times = [
            Times(length, size, us, recompute[length])
            for size in sizes
            for length, us in _swap_us(shape, size, lengths).items()
        ]
        made += rows_of(name, shape.bytes_per_token, times)
    return made


def _recompute_us(engine: Engine, length: int) -> float:
    """The step that computes a prompt of this length, from its arrival to its first token."""
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    prompt = np.random.default_rng(0).integers(0, 10_000, length).tolist()
    times = []
    for i in range(4):
        begin = time.perf_counter()
        engine.add_request(str(i), prompt, params)
        while engine.has_work:
            engine.step()
        times.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(times[1:])


def _swap_us(shape: CacheShape, size: int, lengths: tuple[int, ...]) -> dict[int, float]:
    num_blocks = -(-max(lengths) // size)
    cache = KVCache(shape, 2 * num_blocks, size, num_blocks, device="cuda")
    here, there = torch.randperm(2 * num_blocks), torch.randperm(num_blocks)
    found = {}
    for length in lengths:
        count = -(-length // size)
        out = torch.stack([here[:count], there[:count]], dim=1)
        found[length] = stream_us(partial(_out_and_back, cache, out))
    del cache
    gc.collect()
    torch.cuda.empty_cache()
    return found


def _out_and_back(cache: KVCache, pairs: torch.Tensor) -> None:
    cache.swap_out(pairs)
    cache.swap_in(pairs.flip(1).contiguous())


def rows_of(name: str, bytes_per_token: int, times: list[Times]) -> list[Row]:
    """x baseline: recomputing over swapping, so above 1 swapping is faster. The rates are what the
    engine measures: of a swap at the size at hand, and of steps of all these lengths.
    """
    made = []
    rates = RateMeter()
    for length, us in sorted({(one.length, one.recompute_us) for one in times}):
        rates.prefilled(length, us / 1e6)
    for one in times:
        rated = next(
            two for two in times if (two.block_size, two.length) == (one.block_size, RATED_LEN)
        )
        num_blocks = -(-one.length // one.block_size)
        bytes_per_block = bytes_per_token * one.block_size
        moved = 2 * -(-rated.length // one.block_size) * bytes_per_block
        choice = choose(
            "auto",
            num_blocks=num_blocks,
            num_cpu_free=num_blocks,
            num_tokens=one.length,
            bytes_per_block=bytes_per_block,
            rates=replace(rates.rates, link_bytes_per_s=moved / rated.swap_us * 1e6),
        )
        taken = one.swap_us if choice.swaps else one.recompute_us
        loss = 100 * (taken / min(one.swap_us, one.recompute_us) - 1)
        made.append(
            Row(
                f"{name}, block {one.block_size}",
                f"{one.length} tokens",
                one.swap_us,
                f"swap {one.swap_us:.0f} us, recompute {one.recompute_us:.0f} us; automatic: "
                f"{'swap' if choice.swaps else 'recompute'}, loses {loss:.1f} %",
                baseline=one.recompute_us / one.swap_us,
            )
        )
    sizes = sorted({one.block_size for one in times})
    return made + [_summary(name, size, times, made) for size in sizes]


def _summary(name: str, size: int, times: list[Times], made: list[Row]) -> Row:
    """Where the two lines cross, and the automatic choice over all lengths."""
    mine = [one for one in times if one.block_size == size]
    losses = [
        float(row.rate.rsplit("loses ", 1)[1].split()[0])
        for one, row in zip(times, made, strict=True)
        if one.block_size == size and one.length >= MIN_LEN
    ]
    words = f"swap is faster up to {mine[-1].length} tokens and may be beyond"
    for one, two in pairwise(mine):
        a, b = one.recompute_us - one.swap_us, two.recompute_us - two.swap_us
        if a > 0 > b:
            length = one.length + a / (a - b) * (two.length - one.length)
            words = f"the lines cross at {length:.0f} tokens, swap is faster below"
            break
    return Row(
        f"{name}, block {size}",
        "all lengths",
        0.0,
        f"{words}; automatic, from {MIN_LEN} tokens on: loses {statistics.mean(losses):.1f} % on "
        f"average, {max(losses):.1f} % at most",
    )
