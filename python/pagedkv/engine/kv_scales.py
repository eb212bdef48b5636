"""Scales of an fp8 cache: the checkpoint's, or measured once when the engine starts.

Measured: the model computes a fixed prompt into a cache of its own dtype. Each scale is the power
of two with which the largest number that is found there comes to lie between a quarter and half of
what fp8 can hold, so that others may be twice as large. A power of two rounds nothing by itself,
and fp8 is a floating-point format: room at the top costs no precision. It depends on the model
alone, so the same requests have the same answers after every start.
"""

from __future__ import annotations

import logging

import torch

from pagedkv.engine.layer_caches import layer_caches
from pagedkv.engine.loaded_model import LoadedModel
from pagedkv.kv_cache import CacheShape, KVCache
from pagedkv.models import AttentionMetadata

logger = logging.getLogger(__name__)

_NUM_TOKENS = 256
_BLOCK_SIZE = 16


def scales_for(loaded: LoadedModel, shape: CacheShape) -> torch.Tensor | None:
    """fp32 [num_layers, 2, num_kv_heads] for a pool of this shape; None where it needs none."""
    if not shape.is_fp8:
        return None
    if loaded.kv_scales is not None:
        logger.info("keys and values are stored as %s with the checkpoint's scales", shape.dtype)
        return loaded.kv_scales
    scales = measured_scales(loaded, shape)
    logger.info(
        "keys and values are stored as %s; the checkpoint has no scales, those measured are "
        "%.3g to %.3g",
        shape.dtype,
        scales.min(),
        scales.max(),
    )
    return scales


@torch.inference_mode()
def measured_scales(loaded: LoadedModel, shape: CacheShape) -> torch.Tensor:
    """fp32 [num_layers, 2, num_kv_heads], on the CPU."""
    length = min(_NUM_TOKENS, loaded.max_model_len)
    device = loaded.device
    num_blocks = -(-length // _BLOCK_SIZE)
    cache = KVCache(loaded.cache_shape, num_blocks, _BLOCK_SIZE, device=device)
    cache.tensor.zero_()
    places = torch.arange(length, device=device)
    loaded.model.forward(
        _prompt(loaded, length).to(device),
        places,
        layer_caches(cache),
        AttentionMetadata(
            block_tables=torch.arange(num_blocks, dtype=torch.int32, device=device)[None],
            seq_lens=torch.tensor([length], dtype=torch.int32, device=device),
            query_start_loc=torch.tensor([0, length], dtype=torch.int32, device=device),
            slot_mapping=places,
            max_query_len=length,
        ),
    )
    largest = cache.tensor.abs().amax((2, 4, 5)).to("cpu", torch.float64)
    scales = torch.exp2(torch.ceil(torch.log2(2 * largest / torch.finfo(shape.dtype).max)))
    # Nothing to go by: a head that is always 0, or a model that computes no finite numbers.
    return torch.where((largest > 0) & largest.isfinite(), scales, 1.0).float()


def _prompt(loaded: LoadedModel, length: int) -> torch.Tensor:
    """int64 [length]: what prompts begin with, then tokens drawn from the whole vocabulary."""
    source = torch.Generator().manual_seed(0)
    token_ids = torch.randint(loaded.sampled_vocab_size, (length,), generator=source)
    begin = [] if loaded.tokenizer is None else loaded.tokenizer.encode("")[:length]
    token_ids[: len(begin)] = torch.tensor(begin, dtype=torch.int64)
    return token_ids
