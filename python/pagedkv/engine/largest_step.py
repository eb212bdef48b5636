"""A step of the largest size that the options allow: what its memory is measured or counted on."""

from __future__ import annotations

import numpy as np
import torch

from pagedkv.config import EngineConfig
from pagedkv.engine.layer_caches import layer_caches
from pagedkv.engine.loaded_model import LoadedModel
from pagedkv.kv_cache import KVCache
from pagedkv.models import AttentionMetadata
from pagedkv.sampling import RowTensors, SlotParams, choose


def run_largest_step(loaded: LoadedModel, config: EngineConfig) -> None:
    """One chunk of max_num_batched_tokens tokens, at most max_model_len each, and the choice of
    max_num_seqs tokens. It writes no K/V.
    """
    run_step(loaded, config, config.scheduler.max_num_batched_tokens)


@torch.inference_mode()
def run_step(loaded: LoadedModel, config: EngineConfig, num_tokens: int) -> None:
    """Chunks of num_tokens tokens together, and the choice of max_num_seqs tokens.

    REQUIRES num_tokens >= max_num_seqs.
    """
    num_seqs = config.scheduler.max_num_seqs
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
    rows = RowTensors.of(SlotParams(num_seqs), np.zeros(num_seqs, dtype=np.int64))
    logits = loaded.model.compute_logits(hidden[:num_seqs])[:, : loaded.sampled_vocab_size]
    choose(logits, rows.to(device))
