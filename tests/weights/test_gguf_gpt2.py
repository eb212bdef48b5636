"""GPT-2 in GGUF files: values, names and configuration as transformers has them; refusals."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf_files import assert_tensors_are
from transformers import GPT2Config, GPT2LMHeadModel

from pagedkv.models import ModelConfig, load_model
from pagedkv.weights import open_checkpoint

NAMES = {
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
    "wte": "token_embd",
    "wpe": "position_embd",
    "ln_f": "output_norm",
}


def tiny_gpt2(tied: bool) -> GPT2LMHeadModel:
    torch.manual_seed(3)
    sizes = {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    model = GPT2LMHeadModel(GPT2Config(**sizes, tie_word_embeddings=tied))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.5)
    return model.eval()


def gguf_name(name: str) -> str:
    if name == "lm_head.weight":
        return "output.weight"
    stem, kind = name.removeprefix("transformer.").rsplit(".", 1)
    if not stem.startswith("h."):
        return f"{NAMES[stem]}.{kind}"
    _, layer, inner = stem.split(".", 2)
    return f"blk.{layer}.{NAMES[inner]}.{kind}"


def write_gpt2(
    path: Path,
    model: GPT2LMHeadModel,
    changes: dict[str, object] | None = None,
    extra: dict[str, np.ndarray] | None = None,
) -> Path:
    """changes: further metadata, or None values to leave standard ones out."""
    config = model.config
    values: dict[str, object] = {
        "gpt2.block_count": config.n_layer,
        "gpt2.context_length": config.n_positions,
        "gpt2.embedding_length": config.n_embd,
        "gpt2.feed_forward_length": 4 * config.n_embd,
        "gpt2.attention.head_count": config.n_head,
        "gpt2.vocab_size": config.vocab_size,
        **(changes or {}),
    }
    writer = gguf.GGUFWriter(path, "gpt2")
    writer.add_float32("gpt2.attention.layer_norm_epsilon", config.layer_norm_epsilon)
    for key, value in values.items():
        if value is not None:
            writer.add_uint32(key, value)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        is_conv = ".c_" in name and name.endswith("weight")  # [in, out] there, [out, in] here
        writer.add_tensor(gguf_name(name), (tensor.T if is_conv else tensor).contiguous().numpy())
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("tied", [True, False])
def test_a_file_gives_back_the_model_that_was_written(tied: bool, tmp_path: Path) -> None:
    model = tiny_gpt2(tied)
    path = write_gpt2(tmp_path / "m.gguf", model)
    checkpoint = open_checkpoint(path)
    found = dict(checkpoint.tensors())
    assert set(found) == set(checkpoint.tensor_names)
    assert_tensors_are(path, found, model)
    config = model.config.to_dict() | {"architectures": ["GPT2LMHeadModel"]}
    ours, expected = ModelConfig.from_dict(checkpoint.config), ModelConfig.from_dict(config)
    assert replace(ours, norm_eps=expected.norm_eps) == expected
    assert math.isclose(ours.norm_eps, expected.norm_eps, rel_tol=1e-6)
    # Every tensor of the file is one of the model, and none is missing.
    load_model(checkpoint.config, checkpoint.tensors(), dtype=torch.float32, device="cpu")


@pytest.mark.parametrize(
    ("changes", "extra", "message"),
    [
        ({"gpt2.context_length": None}, {}, "gpt2.context_length is None, not a positive whole"),
        ({"gpt2.vocab_size": None}, {}, "neither gpt2.vocab_size nor tokenizer.ggml.tokens"),
        ({}, {"blk.0.attn_q.weight": np.ones((4, 4), np.float32)},
         r"gpt2 does not have: \['blk.0.attn_q.weight'\]"),
        ({}, {"rope_freqs.weight": np.ones(4, np.float32)}, "gpt2 has no rotary embedding"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_is_refused(
    changes: dict[str, object], extra: dict[str, np.ndarray], message: str, tmp_path: Path
) -> None:
    path = write_gpt2(tmp_path / "m.gguf", tiny_gpt2(True), changes, extra)
    with pytest.raises(ValueError, match=f"m.gguf: .*{message}"):
        open_checkpoint(path)
