"""Throughput at equal memory on one GPU: Llama-3.1-8B with random weights, bf16, the same engine
with its pipelined steps and CUDA graphs on each system; ShareGPT-like requests, all queued at the
beginning; what comes out in the first seconds counts. Beside it what the replay simulator says of
the same seconds.
"""

from __future__ import annotations

import gc
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench_throughput import SHAPES
from claims.engines import make_engine, run_window
from claims.simulated import Setting, Window, simulate_window
from claims.systems import MAX, ORACLE, PAGED, STATIC, System
from claims.workloads import Job, jobs_of
from pagedkv.config import EngineConfig
from pagedkv.engine.loading import LoadedModel, load
from rows import Row

SETTING = Setting(80_000)
SECONDS = 14.0
NUM_JOBS = 700
SYSTEMS = (PAGED, ORACLE, MAX, STATIC)
AT_LEAST = 2.0  # paged over contiguous, by the paper 2 to 4


def measure(*, quick: bool) -> list[Row]:
    """Needs a GPU with 30 GB."""
    seconds, num_jobs = (3.0, 200) if quick else (SECONDS, NUM_JOBS)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPES["Llama-3.1-8B"]))
        config = config_of(folder, SETTING)
        loaded = load(config)
        return compare(loaded, config, SETTING, jobs_of("ShareGPT-like", num_jobs), seconds)


def config_of(folder: str, setting: Setting, **options: Any) -> EngineConfig:
    return EngineConfig.from_options(
        folder,
        load_format="dummy",
        max_model_len=setting.max_model_len,
        max_num_batched_tokens=setting.max_num_batched_tokens,
        max_num_seqs=setting.max_num_seqs,
        num_gpu_blocks_override=setting.pool_tokens // setting.block_size,
        block_size=setting.block_size,
        enable_prefix_caching=setting.enable_prefix_caching,
        preemption_mode="recompute",
        **options,
    )


def compare(
    loaded: LoadedModel,
    config: EngineConfig,
    setting: Setting,
    jobs: Sequence[Job],
    seconds: float,
) -> list[Row]:
    """A row for each system; x baseline: paged over it."""
    made: list[tuple[System, Window, Window]] = []
    for system in SYSTEMS:
        engine = make_engine(system, loaded, config)
        run_window(engine, system, [Job(0.0, job.prompt, 4) for job in jobs[:40]], 60.0)  # warm-up
        measured = run_window(engine, system, jobs, seconds)
        engine.check_invariants()
        made.append((system, measured, simulate_window(system, jobs, setting, seconds)))
        print(made[-1], flush=True)
        del engine
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return [_row(made[0][1], *one, seconds, setting) for one in made]


def _row(
    paged: Window,
    system: System,
    measured: Window,
    simulated: Window,
    seconds: float,
    setting: Setting,
) -> Row:
    factor = paged.tokens_per_s / measured.tokens_per_s
    is_claimed = system is not PAGED and system is not ORACLE
    return Row(
        system.name,
        f"ShareGPT-like, {setting.pool_tokens:,} tokens, {seconds:g} s",
        measured.seconds * 1e6,
        f"{measured.tokens_per_s:,.0f} tok/s out, {measured.requests_per_s:.1f} requests/s, "
        f"{measured.mean_running:.0f} sequences at once; simulated {simulated.tokens_per_s:,.0f} "
        f"tok/s, {simulated.mean_running:.0f} at a time",
        baseline=factor,
        limit=f"paged >= {AT_LEAST:g} x" if is_claimed else "",
        holds=factor >= AT_LEAST or not is_claimed,
    )
