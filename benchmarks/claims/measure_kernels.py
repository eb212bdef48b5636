"""What a block's size does on a GPU: decode and prefill attention by block size, and the whole
engine, what comes out in the first seconds (ShareGPT-like, all queued). Llama-3.1-8B's heads, bf16.
"""

from __future__ import annotations

import gc
import json
import tempfile
from pathlib import Path

import torch

from bench_paged_attention import Pool, Shape, decode, time_shape
from bench_throughput import SHAPES
from claims.engines import make_engine, run_window
from claims.measure_gpu import config_of
from claims.simulated import Setting
from claims.systems import PAGED
from claims.workloads import Job, jobs_of
from pagedkv.engine.loading import load
from rows import Row

BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
ENGINE_SIZES = (1, 4, 8, 16, 32, 128)
SECONDS = 5.0


def decode_of(block_size: int) -> Shape:
    return decode(64, 1024, 0.0, block_size=block_size)


def prefill_of(block_size: int) -> Shape:
    return Shape(4, 2048, 0, block_size=block_size)


def measure(*, quick: bool) -> list[Row]:
    """Needs a GPU with 30 GB."""
    sizes = (1, 16) if quick else BLOCK_SIZES
    return [
        *by_block_size(sizes),
        *whole_engine((16,) if quick else ENGINE_SIZES, 1.0 if quick else SECONDS),
    ]


def by_block_size(sizes: tuple[int, ...]) -> list[Row]:
    """x baseline: the time at block size 16 over this."""
    made = []
    for kind, shape_of in (("decode", decode_of), ("prefill", prefill_of)):
        times = {}
        for size in sizes:
            shape = shape_of(size)
            pool = Pool(shape, 3 * shape.batch * -(-shape.length // size))
            times[size] = time_shape(shape, pool)
            del pool
        for size, us in times.items():
            shape = shape_of(size)
            rate = f"{shape.kv_bytes / us / 1e6:.2f} TB/s"
            if kind == "prefill":
                rate = f"{shape.flops / us / 1e6:.0f} TFLOP/s"
            words = f"{shape.batch} x {shape.length}, block {size}"
            made.append(Row(kind, words, us, rate, baseline=times[16] / us))
    return made


def whole_engine(sizes: tuple[int, ...], seconds: float) -> list[Row]:
    """x baseline: tokens over those at block size 16."""
    jobs = jobs_of("ShareGPT-like", 500)
    windows = {}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPES["Llama-3.1-8B"]))
        loaded = load(config_of(folder, Setting(80_000)))
        for size in sizes:
            setting = Setting(80_000, block_size=size)
            engine = make_engine(PAGED, loaded, config_of(folder, setting))
            run_window(engine, PAGED, [Job(0.0, job.prompt, 4) for job in jobs[:40]], 60.0)
            windows[size] = run_window(engine, PAGED, jobs, seconds)
            print(size, windows[size], flush=True)
            del engine
            gc.collect()
            torch.cuda.empty_cache()
    return [
        Row(
            "whole engine",
            f"ShareGPT-like, 80,000 tokens, {seconds:g} s, block {size}",
            window.seconds * 1e6,
            f"{window.tokens_per_s:,.0f} tok/s out, {window.mean_running:.0f} sequences at once",
            baseline=window.tokens_per_s / windows[16].tokens_per_s,
        )
        for size, window in windows.items()
    ]
