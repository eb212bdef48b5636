"""From a model's name to what an engine runs: weights, tokenizer, sizes."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from pagedkv.config import EngineConfig
from pagedkv.engine.model_runner import Model
from pagedkv.kv_cache import CacheShape
from pagedkv.models import load_model
from pagedkv.text import Tokenizer, load_tokenizer
from pagedkv.weights import open_checkpoint

logger = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model and the numbers that the engine's parts are sized by.

    vocab_size: rows of the embedding, which bounds the ids of a prompt. sampled_vocab_size: ids
    that may be generated; smaller where the embedding is padded beyond the tokenizer's vocabulary.
    """

    model: Model
    tokenizer: Tokenizer | None
    cache_shape: CacheShape
    vocab_size: int
    sampled_vocab_size: int
    max_model_len: int


def load(config: EngineConfig) -> LoadedModel:
    """Open the checkpoint that config names and load it.

    Raises:
        ValueError: max_model_len above what the model allows, or a dtype that is not supported.
    """
    checkpoint = open_checkpoint(config.model)
    dtype = resolve_dtype(config.dtype, checkpoint.config)
    tokenizer = load_tokenizer(checkpoint.path)
    model = load_model(checkpoint.config, checkpoint.tensors(), dtype=dtype, device="cpu")
    shape = model.config
    limit = shape.max_position_embeddings
    max_model_len = limit if config.max_model_len is None else config.max_model_len
    if max_model_len > limit:
        raise ValueError(
            f"max_model_len is {max_model_len}, but the model has positions for {limit} tokens"
        )
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        cache_shape=CacheShape(shape.num_layers, shape.num_kv_heads, shape.head_dim, dtype),
        vocab_size=shape.vocab_size,
        sampled_vocab_size=min(shape.vocab_size, tokenizer.vocab_size),
        max_model_len=max_model_len,
    )


def resolve_dtype(option: str, checkpoint_config: dict[str, object]) -> torch.dtype:
    """The dtype to compute in. auto: the checkpoint's, or float32 (logged) if it names none.

    Raises:
        ValueError: the checkpoint names a dtype that is not supported.
    """
    if option != "auto":
        return _DTYPES[option]
    named = checkpoint_config.get("torch_dtype") or checkpoint_config.get("dtype")
    if named is None:
        logger.info("the checkpoint names no dtype; using float32")
        return torch.float32
    name = str(named).removeprefix("torch.")
    if name not in _DTYPES:
        raise ValueError(
            f"the checkpoint's dtype is {named!r}; supported are {', '.join(_DTYPES)}: "
            "choose one of them with the option dtype"
        )
    return _DTYPES[name]
