"""Gemma 2 and 3 in GGUF files: values and configuration as transformers has them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import SIZES, assert_tensors_are, write_gguf
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
)

from pagedkv.models import ModelConfig, load_model
from pagedkv.weights import open_checkpoint

MODELS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "gemma2": (
        Gemma2Config,
        Gemma2ForCausalLM,
        {"attn_logit_softcapping": 7.0, "final_logit_softcapping": 5.0},
    ),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM, {"num_hidden_layers": 6}),
}


def tiny_gemma(name: str, **changes: Any) -> Any:
    config_class, model_class, options = MODELS[name]
    torch.manual_seed(3)
    sizes = {**SIZES, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 9}
    model = model_class(config_class(**{**sizes, **options, **changes})).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" in key:
                parameter.copy_(torch.randint(-32, 64, parameter.shape) / 64)  # exact plus one
    return model


def metadata_of(name: str, model: Any) -> dict[str, Any]:
    config = model.config
    made: dict[str, Any] = {
        f"{name}.attention.key_length": config.head_dim,
        f"{name}.attention.value_length": config.head_dim,
        f"{name}.attention.sliding_window": config.sliding_window,
    }
    if name == "gemma2":
        made["gemma2.attn_logit_softcapping"] = config.attn_logit_softcapping
        made["gemma2.final_logit_softcapping"] = config.final_logit_softcapping
    return made


@pytest.mark.parametrize("name", MODELS)
def test_a_file_gives_back_the_model_that_was_written(name: str, tmp_path: Path) -> None:
    model = tiny_gemma(name)
    path = write_gguf(tmp_path / "m.gguf", model, metadata=metadata_of(name, model))
    checkpoint = open_checkpoint(path)
    found = dict(checkpoint.tensors())
    assert_tensors_are(path, found, model)
    config = model.config.to_dict() | {"architectures": [type(model).__name__]}
    ours, expected = ModelConfig.from_dict(checkpoint.config), ModelConfig.from_dict(config)
    assert replace(ours, norm_eps=expected.norm_eps) == expected
    load_model(checkpoint.config, checkpoint.tensors(), dtype=torch.float32, device="cpu")


@pytest.mark.parametrize(("name", "num_layers"), [("gemma2", 46), ("gemma3", 62)])
def test_the_largest_models_scale_attention_by_the_hidden_size(
    name: str, num_layers: int, tmp_path: Path
) -> None:
    """Of 64 hidden elements and 4 heads, whose own size is 32."""
    model = tiny_gemma(name)
    for count, scalar in ((num_layers, 16), (num_layers - 1, 32)):
        metadata = {**metadata_of(name, model), f"{name}.block_count": count}
        path = write_gguf(tmp_path / f"{count}.gguf", model, metadata=metadata)
        assert open_checkpoint(path).config["query_pre_attn_scalar"] == scalar


def test_a_scaled_gemma3_scales_only_layers_without_a_window(tmp_path: Path) -> None:
    model = tiny_gemma("gemma3")
    scaling = {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0}
    metadata = metadata_of("gemma3", model) | scaling
    path = write_gguf(tmp_path / "m.gguf", model, metadata=metadata)
    config = ModelConfig.from_dict(open_checkpoint(path).config)
    assert config.rope is not None
    assert config.local_rope is not None
    assert (config.rope.kind, config.rope.factor, config.rope.theta) == ("linear", 8.0, 1e6)
    assert (config.local_rope.kind, config.local_rope.theta) == ("default", 1e4)


@pytest.mark.parametrize("name", MODELS)
def test_a_file_without_a_window_is_a_first_gemma2_or_refused(name: str, tmp_path: Path) -> None:
    model = tiny_gemma(name)
    metadata = metadata_of(name, model) | {f"{name}.attention.sliding_window": None}
    path = write_gguf(tmp_path / "m.gguf", model, metadata=metadata)
    if name == "gemma2":
        assert open_checkpoint(path).config["sliding_window"] == 4096
        return
    with pytest.raises(ValueError, match=f"{name}.attention.sliding_window is None, not a pos"):
        open_checkpoint(path)
