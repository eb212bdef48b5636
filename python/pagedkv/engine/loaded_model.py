"""LoadedModel: what an engine's parts know of a model, whoever loaded it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from pagedkv.engine.model import Model
from pagedkv.kv_cache import CacheShape
from pagedkv.models import CausalLM
from pagedkv.text import Tokenizer


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model and the numbers that the engine's parts are sized by.

    vocab_size: rows of the embedding, which bounds the ids of a prompt. sampled_vocab_size: ids
    that may be generated; smaller where the embedding is padded beyond the tokenizer's vocabulary.
    window: tokens that every layer sees at most, the newest included; 0: some layer sees all.
    num_heads: of queries. cache_shape: of K and V as the model computes them. kv_scales: fp32
    [num_layers, 2, num_kv_heads], the checkpoint's scales of an fp8 cache, if it has any. device:
    where the model's tensors are, and all that it works on.
    """

    model: Model
    tokenizer: Tokenizer | None
    eos_token_ids: frozenset[int]
    cache_shape: CacheShape
    vocab_size: int
    sampled_vocab_size: int
    max_model_len: int
    window: int = 0
    num_heads: int = 1
    kv_scales: torch.Tensor | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))


def describe(
    model: CausalLM,
    dtype: torch.dtype,
    device: torch.device,
    *,
    tokenizer: Tokenizer | None = None,
    eos_token_ids: frozenset[int] = frozenset(),
    max_model_len: int | None = None,
) -> LoadedModel:
    """A model with what an engine must know of it. max_model_len: as it was loaded with."""
    shape = model.config
    num_sampled = shape.vocab_size if tokenizer is None else tokenizer.vocab_size
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        # Ids that the model does not have cannot be generated.
        eos_token_ids=frozenset(one for one in eos_token_ids if one < shape.vocab_size),
        cache_shape=CacheShape(shape.num_layers, shape.num_kv_heads, shape.head_dim, dtype),
        vocab_size=shape.vocab_size,
        sampled_vocab_size=min(shape.vocab_size, num_sampled),
        max_model_len=max_model_len or shape.max_position_embeddings,
        window=shape.window,
        num_heads=shape.num_heads,
        kv_scales=model.kv_scales,
        device=device,
    )
