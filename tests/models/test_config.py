"""Reading config.json: what is refused, and by which message."""

from __future__ import annotations

import dataclasses

import pytest

from pagedkv.models import ModelConfig

GOOD: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}


def test_absent_and_null_values_have_llamas_defaults() -> None:
    nulls = {"head_dim": None, "num_key_value_heads": None, "rope_scaling": None, "mlp_bias": None}
    config = ModelConfig.from_dict({**GOOD, **nulls})
    assert config == ModelConfig.from_dict(GOOD)
    assert (config.num_kv_heads, config.head_dim) == (4, 10)
    assert (config.max_position_embeddings, config.norm_eps) == (2048, 1e-6)
    assert (config.hidden_act, config.tie_word_embeddings) == ("silu", False)
    assert (config.attention_bias, config.mlp_bias) == (False, False)


def test_a_stated_head_dim_wins_over_the_quotient() -> None:
    assert ModelConfig.from_dict({**GOOD, "head_dim": 16}).head_dim == 16
    assert ModelConfig.from_dict({**GOOD, "hidden_size": 42, "head_dim": 16}).head_dim == 16


def test_a_config_is_immutable() -> None:
    config = ModelConfig.from_dict(GOOD)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.num_layers = 4  # type: ignore[misc]


def test_the_model_type_serves_where_no_architecture_is_named() -> None:
    without = {key: value for key, value in GOOD.items() if key != "architectures"}
    assert ModelConfig.from_dict(without) == ModelConfig.from_dict(GOOD)


def test_one_supported_architecture_of_several_is_enough() -> None:
    names = ["SomethingElse", "LlamaForCausalLM"]
    assert ModelConfig.from_dict({**GOOD, "architectures": names}) == ModelConfig.from_dict(GOOD)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["FooForCausalLM"]},
         "architecture FooForCausalLM is not supported; supported are LlamaForCausalLM, Mistral"),
        ({"architectures": []}, "architecture without a name is not supported; supported are"),
        ({"architectures": None, "model_type": "foo"}, "model_type 'foo' is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantised safetensors are not supported"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0, not a whole number from 1"),
        ({"num_hidden_layers": 2.0}, "num_hidden_layers is 2.0, not a whole number"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True, not a whole number"),
        ({"num_hidden_layers": 5000}, "num_hidden_layers is 5000, not a .* from 1 to 4096"),
        ({"hidden_size": 2**63}, "hidden_size is 9223372036854775808, not a whole number"),
        ({"intermediate_size": "56"}, "intermediate_size is '56', not a whole number"),
        ({"num_attention_heads": 3}, "hidden_size is 40, not a multiple of num_attention_heads"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0, not a whole number"),
        ({"num_key_value_heads": 3}, "is 4, not a multiple of num_key_value_heads, which is 3"),
        ({"num_attention_heads": 2**17}, "num_attention_heads is 131072, not a .* from 1 to 65536"),
        ({"head_dim": 258}, "head_dim is 258; heads of more than 256 elements are not supported"),
        ({"head_dim": 5}, "5 rotated elements of a head; it must be even"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0, not a positive number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan, not a positive number"),
        ({"hidden_act": "relu2"}, "hidden_act is 'relu2'; supported are silu, gelu, gelu_pytorch"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes', neither true nor false"),
        ({"partial_rotary_factor": 0.6}, "6 of 10 elements of a head is not supported for Llama"),
    ],
)  # fmt: skip
def test_a_config_that_cannot_be_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_dict({**GOOD, **changes})
