"""How large a GPU's pool may be: a step of the largest size is run once, and what it leaves of
gpu_memory_utilization is for the cache.
"""

from __future__ import annotations

import logging

import torch

from pagedkv.config import EngineConfig
from pagedkv.engine.device import bytes_left
from pagedkv.engine.largest_step import run_largest_step
from pagedkv.engine.loaded_model import LoadedModel
from pagedkv.records import RunFacts

logger = logging.getLogger(__name__)

# What a step may take beyond the profiled one: its arrays, and memory in pieces of other sizes.
_RESERVE_BYTES = 256 * 2**20
# What CUDA graphs keep for themselves, in fp32 copies of the largest step's logits.
_GRAPH_COPIES = 8


def free_bytes(loaded: LoadedModel, config: EngineConfig) -> int | None:
    """Bytes for the pool under gpu_memory_utilization; None on a CPU, or where another option sizes
    the pool.
    """
    cache = config.cache
    is_sized = cache.num_gpu_blocks_override is not None or cache.kv_cache_memory_bytes is not None
    if loaded.device.type == "cpu" or is_sized:
        return None
    torch.cuda.reset_peak_memory_stats(loaded.device)
    run_largest_step(loaded, config)
    torch.cuda.synchronize(loaded.device)
    peak = torch.cuda.max_memory_allocated(loaded.device)
    kept = kept_bytes(config, loaded.sampled_vocab_size)
    left = bytes_left(loaded.device, cache.gpu_memory_utilization, peak + kept)
    logger.info(
        "a step of %d tokens takes %.2f GiB with the weights, %.2f GiB are left for the pool",
        config.scheduler.max_num_batched_tokens,
        peak / 2**30,
        left / 2**30,
    )
    return max(left, 0)


def kept_bytes(config: EngineConfig, vocab_size: int) -> int:
    """What the pool leaves free beyond the largest step."""
    if config.enforce_eager:
        return _RESERVE_BYTES
    return _RESERVE_BYTES + _GRAPH_COPIES * 4 * config.scheduler.max_num_seqs * vocab_size


def log_pool(facts: RunFacts, block_size: int, device: torch.device) -> None:
    """What the pool holds, in the words that users of other engines search their logs for."""
    num_tokens = facts.num_blocks * block_size
    per_request = -(-facts.max_model_len // block_size)
    logger.info(
        "the pool on %s has %d blocks: %d tokens, %.2f GiB",
        device,
        facts.num_blocks,
        num_tokens,
        num_tokens * facts.bytes_per_token / 2**30,
    )
    logger.info(
        "Maximum concurrency for %d tokens per request: %.2fx",
        facts.max_model_len,
        facts.num_blocks / per_request,
    )
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        logger.info("of %s %.2f GiB are in use", device, (total - free) / 2**30)
