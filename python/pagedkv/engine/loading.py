"""From a model's name to what an engine runs: weights, tokenizer, sizes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import torch

from pagedkv.config import EngineConfig
from pagedkv.engine.device import resolve_device
from pagedkv.engine.loaded_model import LoadedModel, describe
from pagedkv.engine.loading_progress import shown
from pagedkv.engine.memory_plan import log_prediction
from pagedkv.models import ModelConfig, load_model, random_model
from pagedkv.text import load_tokenizer
from pagedkv.weights import open_checkpoint, read_json

__all__ = ["LoadedModel", "describe", "load", "named_eos", "resolve_dtype"]

logger = logging.getLogger(__name__)

_MAX_EOS_IDS = 256  # of each running sequence they are a row in one array
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load(config: EngineConfig) -> LoadedModel:
    """Open the checkpoint that config names and load it.

    Raises:
        ValueError: a device that is not there, no such model, malformed files, an architecture or
            dtype that is not supported, or max_model_len above what the model allows.
    """
    device = resolve_device(config.device)
    if config.load_format == "dummy":
        return _load_dummy(config, device)
    # First of all: a model that is not supported is told as such, whatever else it lacks.
    checkpoint = open_checkpoint(config.model, check_config=ModelConfig.from_dict)
    dtype = resolve_dtype(config.dtype, checkpoint.config)
    tokenizer = load_tokenizer(checkpoint.tokenizer_source)
    log_prediction(config, checkpoint.config, dtype, device)
    model = load_model(
        checkpoint.config,
        shown(checkpoint.tensors(device), len(checkpoint.tensor_names)),
        dtype=dtype,
        device=device,
        max_model_len=config.max_model_len,
    )
    return describe(
        model,
        dtype,
        device,
        tokenizer=tokenizer,
        eos_token_ids=tokenizer.eos_token_ids | named_eos(checkpoint.generation_config),
        max_model_len=config.max_model_len,
    )


def _load_dummy(config: EngineConfig, device: torch.device) -> LoadedModel:
    """Random weights of the shape that a config.json describes; no tokenizer."""
    path = Path(config.model)
    shape = read_json(path / "config.json" if path.is_dir() else path)
    dtype = resolve_dtype(config.dtype, shape)
    log_prediction(config, shape, dtype, device)
    model = random_model(shape, dtype=dtype, device=device, max_model_len=config.max_model_len)
    return describe(model, dtype, device, max_model_len=config.max_model_len)


def resolve_dtype(option: str, checkpoint_config: Mapping[str, object]) -> torch.dtype:
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
            f"the checkpoint's dtype is {named!r:.200}; supported are {', '.join(_DTYPES)}: "
            "choose one of them with the option dtype"
        )
    return _DTYPES[name]


def named_eos(generation_config: Mapping[str, object]) -> frozenset[int]:
    """The end-of-sequence ids that a generation_config.json names: one, several or none.

    Raises:
        ValueError: it names something else.
    """
    named = generation_config.get("eos_token_id")
    ids = [] if named is None else named if isinstance(named, list) else [named]
    if not all(type(one) is int and one >= 0 for one in ids) or len(ids) > _MAX_EOS_IDS:
        raise ValueError(
            f"generation_config: eos_token_id must be at most {_MAX_EOS_IDS} ids of tokens, got "
            f"{named!r:.200}"
        )
    return frozenset(ids)
