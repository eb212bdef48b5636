"""What an engine will take of a GPU, from a model's config.json and the options alone, before
anything is loaded: weights, the largest step, CUDA graphs, what CUDA and its libraries keep, and
the pool that the rest is for.

The model is built, and the largest step run, on the meta device, where tensors have shapes and no
memory; the bytes alive at once are counted (live_memory.py). So the prediction follows whatever the
model's code does. What CUDA takes is measured (benchmarks/results).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch

from pagedkv.config import EngineConfig
from pagedkv.engine.largest_step import run_step
from pagedkv.engine.live_memory import LiveMemory
from pagedkv.engine.loaded_model import LoadedModel, describe
from pagedkv.engine.pool_size import kept_bytes
from pagedkv.engine.step_graphs import sizes_for, token_sizes_for
from pagedkv.kv_cache import num_blocks_for, num_cpu_blocks_for
from pagedkv.models import ModelConfig, shape_model
from pagedkv.records import MemoryPlan

logger = logging.getLogger(__name__)

# Measured on an H200 (benchmarks/results/2026-11-30-memory.md). CUDA's context and the code of all
# kernels that a step launches; what streams and pinned memory take when the engine runs.
_CONTEXT_BYTES = 687 * 2**20
_RUNNING_BYTES = 70 * 2**20
# cuBLAS's workspace of each stream that computes: the default one, and the engine's.
_WORKSPACE_BYTES = 33 * 2**20
# What CUDA keeps of one graph; the memory that it computes in is shared by all, and the allocator's
# pieces of it are twice as large as what is alive at once.
_GRAPH_BYTES = 650 * 2**10
_GRAPH_POOL_FACTOR = 2


def predict(
    config: EngineConfig,
    model_config: Mapping[str, object] | ModelConfig,
    dtype: torch.dtype,
    *,
    gpu_bytes: int | None,
    others_bytes: int = 0,
) -> MemoryPlan:
    """What an engine will take. Nothing is loaded, and no GPU need be there.

    Args:
        config: its options. model_config: a config.json, or what was read from it. dtype: of
            weights and activations.
        gpu_bytes: of the whole GPU. None: the engine runs on a CPU, where no graphs are and the
            pool is sized by options alone. others_bytes: what others hold there all the time.

    Raises:
        ValueError: the model is not supported, or no block fits.

    Example: Llama-3.1-8B in bf16 with max_model_len 32,768 on an H200 of 139.8 GiB: 14.97 GiB of
    weights, 0.72 GiB for a step of 8,192 tokens, and a pool of 108.19 GiB.
    """
    resident = LiveMemory("meta")
    runs_on = "cpu" if gpu_bytes is None else "cuda"
    with resident:
        model = shape_model(
            model_config, dtype=dtype, runs_on=runs_on, max_model_len=config.max_model_len
        )
    weights = resident.now
    loaded = describe(model, dtype, torch.device("meta"), max_model_len=config.max_model_len)
    step = _peak_bytes(loaded, config, config.scheduler.max_num_batched_tokens)
    graphs = libraries = 0
    left: int | None = None
    if gpu_bytes is not None:
        libraries = _CONTEXT_BYTES + _RUNNING_BYTES + 2 * _WORKSPACE_BYTES
        left = int(config.cache.gpu_memory_utilization * gpu_bytes) - others_bytes
        left -= _CONTEXT_BYTES + weights + step + _WORKSPACE_BYTES
        left = max(left - kept_bytes(config, loaded.sampled_vocab_size), 0)
        if not config.enforce_eager:
            num_seqs = config.scheduler.max_num_seqs
            alive = _peak_bytes(loaded, config, max(num_seqs, config.max_captured_tokens))
            sizes = [*sizes_for(num_seqs), *token_sizes_for(config.max_captured_tokens)]
            graphs = _GRAPH_POOL_FACTOR * alive + _GRAPH_BYTES * len(sizes)
    shape = loaded.cache_shape.stored_as(config.cache.kv_cache_dtype)
    num_blocks = num_blocks_for(
        config.cache,
        shape,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_model_len=loaded.max_model_len,
        num_free_bytes=left,
    )
    num_cpu_blocks = num_cpu_blocks_for(config.cache, shape)
    bytes_per_block = shape.bytes_per_token * config.cache.block_size
    return MemoryPlan(
        weights_bytes=weights,
        step_bytes=step,
        graphs_bytes=graphs,
        libraries_bytes=libraries,
        num_blocks=num_blocks,
        pool_bytes=num_blocks * bytes_per_block,
        num_cpu_blocks=num_cpu_blocks,
        cpu_pool_bytes=num_cpu_blocks * bytes_per_block,
    )


def _peak_bytes(loaded: LoadedModel, config: EngineConfig, num_tokens: int) -> int:
    memory = LiveMemory("meta")
    with memory:
        run_step(loaded, config, num_tokens)
    return memory.peak


def log_prediction(
    config: EngineConfig,
    model_config: Mapping[str, object],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """What loading on a GPU will take; a warning where it cannot fit. Nothing on a CPU."""
    if device.type == "cpu":
        return
    free, total = torch.cuda.mem_get_info(device)
    own = torch.cuda.memory_reserved(device) + _CONTEXT_BYTES
    others = max(0, total - free - own)
    try:
        plan = predict(config, model_config, dtype, gpu_bytes=total, others_bytes=others)
    except ValueError as error:
        logger.warning("this will not fit on %s: %s", device, error)
        return
    logger.info(
        "predicted for %s: weights %.2f GiB, a step %.2f, graphs %.2f, CUDA %.2f, the pool %.2f "
        "(%d blocks): %.2f of %.2f GiB",
        device,
        *(
            number / 2**30
            for number in (
                plan.weights_bytes,
                plan.step_bytes,
                plan.graphs_bytes,
                plan.libraries_bytes,
                plan.pool_bytes,
            )
        ),
        plan.num_blocks,
        plan.used_bytes / 2**30,
        total / 2**30,
    )
    if plan.used_bytes + others > total:
        logger.warning("this will not fit on %s, which has %.2f GiB", device, total / 2**30)
