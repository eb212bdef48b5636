"""What an engine takes from a checkpoint's configuration files."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from pagedkv import LLM
from pagedkv.engine.loading import describe, named_eos, resolve_dtype
from pagedkv.models import random_model


@pytest.mark.parametrize(
    ("option", "config", "dtype"),
    [
        ("auto", {"torch_dtype": "bfloat16"}, torch.bfloat16),
        ("auto", {"dtype": "float16"}, torch.float16),
        ("auto", {"torch_dtype": "torch.float32"}, torch.float32),
        ("auto", {"torch_dtype": torch.bfloat16}, torch.bfloat16),
        ("float32", {"torch_dtype": "bfloat16"}, torch.float32),
        ("bfloat16", {"torch_dtype": "junk"}, torch.bfloat16),
    ],
)
def test_the_dtype_is_the_option_or_the_checkpoints(
    option: str, config: dict[str, Any], dtype: torch.dtype
) -> None:
    assert resolve_dtype(option, config) == dtype


@pytest.mark.parametrize("config", [{}, {"torch_dtype": None}])
def test_without_a_dtype_float32_is_used_and_logged(
    config: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert resolve_dtype("auto", config) == torch.float32
    assert "names no dtype; using float32" in caplog.text


@pytest.mark.parametrize("named", ["int8", "float64", 7, ["float32"]])
def test_a_junk_dtype_is_refused(named: Any) -> None:
    with pytest.raises(ValueError, match="supported are float32, bfloat16, float16"):
        resolve_dtype("auto", {"torch_dtype": named})


def test_generation_config_may_name_one_end_token_several_or_none() -> None:
    assert named_eos({}) == frozenset()
    assert named_eos({"eos_token_id": None}) == frozenset()
    assert named_eos({"eos_token_id": 7}) == {7}
    assert named_eos({"eos_token_id": [0, 9]}) == {0, 9}
    for junk in ("7", [1, None], -1, True, 1.5, list(range(257))):
        with pytest.raises(ValueError, match="eos_token_id must be at most 256 ids of tokens, got"):
            named_eos({"eos_token_id": junk})


def test_end_tokens_that_the_model_does_not_have_end_nothing() -> None:
    shape = {"vocab_size": 97, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    config = {"architectures": ["LlamaForCausalLM"], **shape, "num_attention_heads": 2}
    model = random_model(config, dtype=torch.float32, device="cpu")
    named = frozenset([5, 96, 97, 2**70])
    loaded = describe(model, torch.float32, torch.device("cpu"), eos_token_ids=named)
    assert loaded.eos_token_ids == {5, 96}


@pytest.mark.parametrize("weights", ["model.safetensors", "pytorch_model.bin", None])
def test_an_unsupported_architecture_is_named_before_anything_else_is_missed(
    tmp_path: Path, weights: str | None
) -> None:
    config = {"architectures": ["MambaForCausalLM"], "torch_dtype": "int8"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    if weights is not None:
        save_file({"a": torch.zeros(2)}, tmp_path / weights)
    with pytest.raises(ValueError, match=r"MambaForCausalLM is not supported; .* LlamaForCausalLM"):
        LLM(str(tmp_path))
