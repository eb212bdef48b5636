"""How large a GPU's pool may be: a step of the largest size is run once, and what it leaves of
gpu_memory_utilization is for the cache.
"""

from __future__ import annotations

import logging

import torch

from pagedkv.config import EngineConfig
from pagedkv.engine.device import bytes_left
from pagedkv.engine.layer_caches import layer_caches
from pagedkv.engine.loading import LoadedModel
from pagedkv.kv_cache import KVCache
from pagedkv.models import AttentionMetadata
from pagedkv.records import RunFacts
from pagedkv.sampling import Kinds, RowTensors, choose

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
    kept = _RESERVE_BYTES
    if not config.enforce_eager:
        kept += _GRAPH_COPIES * 4 * config.scheduler.max_num_seqs * loaded.sampled_vocab_size
    left = bytes_left(loaded.device, cache.gpu_memory_utilization, peak + kept)
    logger.info(
        "a step of %d tokens takes %.2f GiB with the weights, %.2f GiB are left for the pool",
        config.scheduler.max_num_batched_tokens,
        peak / 2**30,
        left / 2**30,
    )
    return max(left, 0)


@torch.inference_mode()
def run_largest_step(loaded: LoadedModel, config: EngineConfig) -> None:
    """One chunk of max_num_batched_tokens tokens, at most max_model_len each, and the choice of
    max_num_seqs tokens with all filters. It writes no K/V.
    """
    num_tokens, num_seqs = config.scheduler.max_num_batched_tokens, config.scheduler.max_num_seqs
    device, block_size = loaded.device, config.cache.block_size
    shape = loaded.cache_shape.stored_as(config.cache.kv_cache_dtype)
    scales = torch.ones(shape.num_layers, 2, shape.num_kv_heads) if shape.is_fp8 else None
    cache = KVCache(shape, 1, block_size, device=device, scales=scales)
    cache.tensor.zero_()
    length = min(num_tokens, loaded.max_model_len)
    starts = [*range(0, num_tokens, length), num_tokens]
    lens = torch.tensor(starts, dtype=torch.int32).diff()
    hidden = loaded.model.forward(
        torch.zeros(num_tokens, dtype=torch.int64, device=device),
        torch.zeros(num_tokens, dtype=torch.int64, device=device),
        layer_caches(cache),
        AttentionMetadata(
            block_tables=torch.zeros(
                lens.numel(), -(-length // block_size), dtype=torch.int32, device=device
            ),
            seq_lens=lens.to(device),
            query_start_loc=torch.tensor(starts, dtype=torch.int32, device=device),
            slot_mapping=torch.full((num_tokens,), -1, dtype=torch.int64, device=device),
            max_query_len=length,
        ),
    )
    ones = torch.ones(num_seqs, device=device)
    rows = RowTensors(ones, ones.long(), ones.double() / 2, ones.double() / 2)
    logits = loaded.model.compute_logits(hidden[:num_seqs])[:, : loaded.sampled_vocab_size]
    choose(logits, rows, Kinds(draws=True, has_top_k=True, has_top_p=True))


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
