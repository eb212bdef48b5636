"""GGUF files: values and configuration as transformers reads them, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf_files import assert_tensors_are, tiny_llama, tiny_qwen2, tiny_qwen3, write_gguf
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from pagedkv.models.config import ModelConfig
from pagedkv.models.rope import inverse_frequencies
from pagedkv.weights import open_checkpoint

# Kinds that the gguf package can also write.
WRITTEN = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4"]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        {"num_key_value_heads": 1},
        {"num_key_value_heads": 4},
        {"attention_bias": True, "mlp_bias": True},
        {"head_dim": 32},
        {"rope_theta": 1234.0, "rms_norm_eps": 1e-3},
    ],
    ids=str,
)
def test_a_file_gives_back_the_model_that_was_written(
    tmp_path: Path, changes: dict[str, object]
) -> None:
    model = tiny_llama(**changes)
    extra = {}
    if "head_dim" in changes:
        extra = dict.fromkeys(("llama.attention.key_length", "llama.attention.value_length"), 32)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", model, metadata=extra))
    expected = dict(model.state_dict())
    if changes.get("tie_word_embeddings"):
        del expected["lm_head.weight"]
    found = dict(checkpoint.tensors())
    assert set(found) == set(expected) == set(checkpoint.tensor_names)
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name
    # A model reads the same sizes from it as from transformers' own config.json.
    ours, theirs = (
        ModelConfig.from_dict(config) for config in (checkpoint.config, model.config.to_dict())
    )
    assert math.isclose(ours.norm_eps, theirs.norm_eps, rel_tol=1e-6)
    for name in ModelConfig.__slots__:
        if name != "norm_eps":
            assert getattr(ours, name) == getattr(theirs, name), name


@pytest.mark.parametrize(
    "make",
    [
        lambda: tiny_qwen2(),
        lambda: tiny_qwen2(tie_word_embeddings=True, rope_theta=1e6),
        lambda: tiny_qwen3(head_dim=32),
        lambda: tiny_qwen3(head_dim=32, attention_bias=True),
    ],
    ids=["qwen2", "qwen2, tied", "qwen3", "qwen3, biases"],
)
def test_qwens_keep_the_order_of_their_rows(tmp_path: Path, make: Callable[[], Any]) -> None:
    model = make()
    arch = model.config.model_type
    head_dim = getattr(model.config, "head_dim", 16)
    extra = {f"{arch}.attention.{which}_length": head_dim for which in ("key", "value")}
    path = write_gguf(tmp_path / "m.gguf", model, metadata=extra)
    checkpoint = open_checkpoint(path)
    found = dict(checkpoint.tensors())
    assert_tensors_are(path, found, model)
    config = model.config.to_dict() | {"architectures": [type(model).__name__]}
    ours, expected = ModelConfig.from_dict(checkpoint.config), ModelConfig.from_dict(config)
    assert replace(ours, norm_eps=expected.norm_eps) == expected
    assert math.isclose(ours.norm_eps, expected.norm_eps, rel_tol=1e-6)


def test_norms_of_queries_and_keys_are_qwen3s_alone(tmp_path: Path) -> None:
    extra = {"blk.0.attn_q_norm.weight": np.ones(16, np.float32)}
    path = write_gguf(tmp_path / "m.gguf", tiny_qwen2(), extra=extra)
    with pytest.raises(ValueError, match=r"qwen2 does not have: \['blk.0.attn_q_norm.weight'\]"):
        open_checkpoint(path)


@pytest.mark.parametrize("kind", WRITTEN)
def test_quantised_values_equal_those_that_transformers_reads(tmp_path: Path, kind: str) -> None:
    model = tiny_llama()
    path = write_gguf(tmp_path / "m.gguf", model, kind=GGMLQuantizationType[kind])
    theirs = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=tiny_llama())
    found = dict(open_checkpoint(path).tensors())
    assert set(found) == set(theirs["tensors"])
    for name, tensor in found.items():
        assert torch.equal(tensor, torch.as_tensor(theirs["tensors"][name])), name


def test_the_divisors_of_llama3_in_a_file_are_its_scaling(tmp_path: Path) -> None:
    """llama.cpp stores how much slower each frequency turns, not the parameters of the formula."""
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
        "rope_theta": 10000.0,
    }
    model = tiny_llama(rope_parameters=scaling)
    rope = ModelConfig.from_dict(model.config.to_dict()).rope
    exact, _ = inverse_frequencies(rope, 64)
    plain = 1.0 / 10000.0 ** (torch.arange(0, 16, 2) / 16)
    factors = {"rope_freqs.weight": (plain / exact).numpy()}
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", model, extra=factors))
    assert "rope_freqs.weight" not in checkpoint.tensor_names
    found, amplitude = inverse_frequencies(ModelConfig.from_dict(checkpoint.config).rope, 64)
    torch.testing.assert_close(found, exact)
    assert amplitude == 1.0


@pytest.mark.parametrize(
    ("metadata", "scaling"),
    [
        ({"llama.rope.scaling.type": "none"}, None),
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
            {"rope_type": "linear", "factor": 4.0},
        ),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 2.0,
                "llama.rope.scaling.original_context_length": 32,
            },
            {
                "rope_type": "yarn",
                "factor": 2.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "original_max_position_embeddings": 32,
            },
        ),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 2.0,
                "llama.rope.scaling.original_context_length": 32,
                "llama.rope.scaling.yarn_beta_fast": 16.0,
                "llama.rope.scaling.yarn_beta_slow": 2.0,
                "llama.rope.scaling.attn_factor": 1.0,
            },
            {
                "rope_type": "yarn",
                "factor": 2.0,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
                "original_max_position_embeddings": 32,
            },
        ),
    ],
)
def test_scaling_in_the_metadata(
    tmp_path: Path, metadata: dict[str, object], scaling: object
) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_llama(), metadata=metadata)
    assert open_checkpoint(path).config["rope_scaling"] == scaling


def test_the_vocabulary_is_counted_where_its_size_is_not_stated(tmp_path: Path) -> None:
    metadata = {"llama.vocab_size": None, "tokenizer.ggml.tokens": [str(i) for i in range(96)]}
    path = write_gguf(tmp_path / "m.gguf", tiny_llama(), metadata=metadata)
    assert open_checkpoint(path).config["vocab_size"] == 96


def test_both_end_tokens_end_generation(tmp_path: Path) -> None:
    metadata = {"tokenizer.ggml.eos_token_id": 5, "tokenizer.ggml.eot_token_id": 7}
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", tiny_llama(), metadata=metadata))
    assert checkpoint.generation_config == {"eos_token_id": [5, 7]}
    assert checkpoint.tokenizer_source["tokenizer.ggml.eos_token_id"] == 5  # type: ignore[index]
    bare = open_checkpoint(write_gguf(tmp_path / "n.gguf", tiny_llama()))
    assert bare.generation_config == {}


HEADS = "llama.attention.head_count"


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.architecture": "falcon"}, "architecture 'falcon' is not supported; .* llama"),
        ({HEADS: None}, f"{HEADS} is None, not a positive whole number"),
        ({HEADS: 0}, f"{HEADS} is 0, not a positive"),
        ({HEADS: "4"}, f"{HEADS} is '4', not a positive"),
        ({HEADS: [4, 4]}, f"{HEADS} is array"),
        ({HEADS: True}, f"{HEADS} is True, not a positive"),
        ({HEADS: 3}, "embedding_length 64 is not a multiple of llama.attention.head_count 3"),
        ({"llama.attention.value_length": 8}, "value_length is 8, but only the head_dim 16"),
        ({"llama.rope.dimension_count": 8}, "dimension_count is 8, but only the head_dim 16"),
        ({"llama.expert_count": 8}, "expert_count is 8, but mixtures of experts are not"),
        ({"llama.attention.layer_norm_rms_epsilon": "x"}, "rms_epsilon is 'x', not a number"),
        ({"llama.rope.scaling.type": "su"}, "type is 'su'; supported are none, linear, yarn"),
        ({"llama.rope.scaling.type": 5}, "type is 5, not a text"),
        (
            {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.attn_factor": 0.5},
            "attn_factor is 0.5, but only 1 is supported",
        ),
        ({"llama.vocab_size": None}, "neither llama.vocab_size nor tokenizer.ggml.tokens"),
    ],
)
def test_metadata_that_cannot_be_are_refused(
    tmp_path: Path, metadata: dict[str, object], message: str
) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_llama(), metadata=metadata)
    with pytest.raises(ValueError, match=f"m.gguf: .*{message}"):
        open_checkpoint(path)


def test_a_tensor_that_llama_does_not_have_is_named(tmp_path: Path) -> None:
    extra = {"blk.0.attn_q_norm.weight": np.ones(16, np.float32), "foo": np.ones(1, np.float32)}
    path = write_gguf(tmp_path / "m.gguf", tiny_llama(), extra=extra)
    with pytest.raises(
        ValueError, match=r"llama does not have: \['blk.0.attn_q_norm.weight', 'foo"
    ):
        open_checkpoint(path)


def test_divisors_beside_another_scaling_are_refused(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "m.gguf",
        tiny_llama(),
        metadata={"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0},
        extra={"rope_freqs.weight": np.ones(8, np.float32)},
    )
    with pytest.raises(ValueError, match="type is 'linear', but the file also holds rope_freqs"):
        open_checkpoint(path)


def test_rows_that_are_not_whole_heads_are_refused(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "m.gguf",
        tiny_llama(),
        drop=("blk.1.attn_k.weight",),
        extra={"blk.1.attn_k.weight": np.ones((30, 64), np.float32)},
    )
    with pytest.raises(ValueError, match=r"'blk.1.attn_k.weight' has 30 rows, not 2 heads of an"):
        list(open_checkpoint(path).tensors())


def test_a_type_that_nobody_can_dequantise_is_named(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "m.gguf",
        tiny_llama(),
        drop=("output_norm.weight",),
        extra={"output_norm.weight": np.ones(64, np.int8)},
    )
    with pytest.raises(ValueError, match=r"'output_norm\.weight' has the type I8, which"):
        list(open_checkpoint(path).tensors())


def test_values_do_not_alias_the_file(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_llama())
    before = path.read_bytes()
    for _, tensor in open_checkpoint(path).tensors():
        tensor.zero_()
    assert path.read_bytes() == before


def test_a_file_cut_after_it_was_opened_is_one_clear_error(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_llama())
    checkpoint = open_checkpoint(path)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)
    with pytest.raises(ValueError, match=r"m\.gguf has changed since it was opened"):
        list(checkpoint.tensors())


def test_a_file_cut_while_it_is_read_is_one_clear_error(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_llama())
    tensors = open_checkpoint(path).tensors()
    next(tensors)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)
    with pytest.raises(ValueError, match=r"m\.gguf: tensor .* it was cut while it was read"):
        list(tensors)


def test_the_header_equals_what_the_gguf_package_reads(tmp_path: Path) -> None:
    metadata = {
        "x.strings": ["a", "", "ü"],
        "x.ints": [1, 2, 3],
        "x.floats": [0.5, 1.5],
        "x.flags": [True, False],
        "x.text": "héllo",
        "x.flag": True,
    }
    path = write_gguf(tmp_path / "m.gguf", tiny_llama(), metadata=metadata)
    found = open_checkpoint(path).tokenizer_source
    fields = gguf.GGUFReader(path).fields
    keys = [key for key in fields if not key.startswith("GGUF.")]
    assert list(found) == keys  # type: ignore[call-overload]
    for key in keys:
        value = found[key]  # type: ignore[index]
        mine = value.tolist() if isinstance(value, np.ndarray) else value
        assert mine == fields[key].contents(), key
