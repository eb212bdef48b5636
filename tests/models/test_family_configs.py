"""What the config.json of each architecture says, what is meant where it says nothing, and what is
refused. Llama's: test_config.py; windows: test_sliding.py.
"""

from __future__ import annotations

from typing import Any

import pytest

from pagedkv.models import ModelConfig

BARE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}


def test_a_qwen3_that_does_not_say_has_heads_of_128_and_no_biases() -> None:
    config = ModelConfig.from_dict({"architectures": ["Qwen3ForCausalLM"], **BARE})
    assert config.head_dim == 128
    assert config.qk_norm
    assert not config.attention_bias
    assert not config.output_bias
    assert config.max_position_embeddings == 32768
    assert config.layer_windows == (0, 0, 0)


def test_a_phi3s_first_files_name_longrope_otherwise() -> None:
    scaling = {"short_factor": [1.0] * 5, "long_factor": [2.0] * 5}
    config = {
        "architectures": ["Phi3ForCausalLM"],
        "original_max_position_embeddings": 128,
        **BARE,
    }
    old = ModelConfig.from_dict({**config, "rope_scaling": {"type": "su", **scaling}})
    new = ModelConfig.from_dict({**config, "rope_scaling": {"rope_type": "longrope", **scaling}})
    assert old == new
    assert old.rope.kind == "longrope"


GEMMA3: dict[str, Any] = {"architectures": ["Gemma3ForCausalLM"], **BARE, "num_hidden_layers": 7}


def test_both_ways_to_say_a_gemma3s_rotary_embeddings_are_the_same() -> None:
    old = {
        "rope_theta": 500.0,
        "rope_local_base_freq": 100.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window_pattern": 3,
    }
    new = {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 500.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
        "layer_types": [f"{'full' if i in (2, 5) else 'sliding'}_attention" for i in range(7)],
    }
    config = ModelConfig.from_dict({**GEMMA3, **old})
    assert config == ModelConfig.from_dict({**GEMMA3, **new})
    assert config.rope is not None
    assert config.local_rope is not None
    assert (config.rope.kind, config.rope.factor, config.rope.theta) == ("linear", 8.0, 500.0)
    assert (config.local_rope.kind, config.local_rope.theta) == ("default", 100.0)


def test_a_gemma_that_does_not_say_is_as_its_family_began() -> None:
    config = ModelConfig.from_dict(GEMMA3)
    assert config.rope is not None
    assert config.local_rope is not None
    assert (config.rope.theta, config.local_rope.theta) == (1e6, 1e4)
    assert config.layer_windows == (4096,) * 5 + (0, 4096)
    assert (config.head_dim, config.num_kv_heads, config.attention_scale) == (256, 4, 1 / 16)
    assert (config.attention_soft_cap, config.logit_soft_cap) == (0.0, 0.0)
    assert (config.hidden_act, config.tie_word_embeddings) == ("gelu_pytorch_tanh", True)
    gemma2 = ModelConfig.from_dict({**GEMMA3, "architectures": ["Gemma2ForCausalLM"]})
    assert gemma2.layer_windows == (4096, 0) * 3 + (4096,)
    assert (gemma2.attention_soft_cap, gemma2.logit_soft_cap) == (50.0, 30.0)
    assert gemma2.local_rope is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0, which Gemma 3 does"),
        ({"final_logit_softcapping": -1}, "final_logit_softcapping is -1, not a positive number"),
        ({"use_bidirectional_attention": True}, "bidirectional_attention is True, which is not"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0, not a positive number"),
        ({"hidden_activation": "relu"}, "hidden_activation is 'relu'; supported are gelu_pytorch"),
        ({"rope_parameters": 5}, "rope_parameters is 5, not an object"),
        ({"rope_parameters": {"full_attention": 5}}, "rope_scaling is 5, not an object"),
        ({"sliding_window_pattern": 0}, "sliding_window_pattern is 0, not a whole number from 1"),
    ],
)
def test_a_gemma_that_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_dict({**GEMMA3, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scale_attn_weights": False}, "scale_attn_weights is False, but only scaled attention"),
        ({"scale_attn_by_inverse_layer_idx": True}, "inverse_layer_idx is True, which is not supp"),
        ({"add_cross_attention": True}, "add_cross_attention is True, which is not supported"),
        ({"n_head": 7}, "n_embd is 768, not a multiple of n_head, which is 7"),
        ({"activation_function": "relu"}, "activation_function is 'relu'; supported are gelu_new"),
        ({"vocab_size": None}, "vocab_size is missing"),
    ],
)
def test_a_gpt2_that_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_dict({"architectures": ["GPT2LMHeadModel"], "vocab_size": 97, **changes})


@pytest.mark.parametrize(
    ("num_heads", "slopes"),
    [
        (1, (2**-8,)),
        (2, (2**-4, 2**-8)),
        (3, (2**-4, 2**-8, 2**-2)),
        (4, (1 / 4, 1 / 16, 1 / 64, 1 / 256)),
    ],
)
def test_an_mpts_slopes(num_heads: int, slopes: tuple[float, ...]) -> None:
    config = {"architectures": ["MptForCausalLM"], "vocab_size": 97, "d_model": 12}
    assert ModelConfig.from_dict({**config, "n_heads": num_heads}).alibi_slopes == slopes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_heads": 7}, "d_model is 2048, not a multiple of n_heads, which is 7"),
        ({"expansion_ratio": 2}, "expansion_ratio is 2, which is not supported"),
        ({"no_bias": False}, "no_bias is False, which is not supported"),
        ({"logit_scale": 2.0}, "logit_scale is 2.0, which is not supported"),
        ({"attn_config": 5}, "attn_config is 5, not an object"),
        ({"attn_config": {"alibi": False}}, "alibi is False, but only ALiBi is supported"),
        ({"attn_config": {"alibi_bias_max": 4}}, "alibi_bias_max is 4, but only 8 is supported"),
        ({"attn_config": {"attn_type": "multiquery_attention"}}, "attn_type is 'multiquery_attent"),
        ({"attn_config": {"qk_ln": True}}, "qk_ln is True, which is not supported"),
        ({"attn_config": {"prefix_lm": True}}, "prefix_lm is True, which is not supported"),
        ({"attn_config": {"attn_uses_sequence_id": True}}, "attn_uses_sequence_id is True, which"),
        ({"attn_config": {"clip_qkv": -1}}, "clip_qkv is -1, not a positive number"),
    ],
)
def test_an_mpt_that_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_dict({"architectures": ["MptForCausalLM"], "vocab_size": 97, **changes})


def test_the_file_of_the_first_mpt_is_read() -> None:
    """Its architecture is spelled otherwise, and it names what transformers leaves out."""
    stated = {
        "architectures": ["MPTForCausalLM"],
        "model_type": "mpt",
        "attn_config": {
            "alibi": True,
            "alibi_bias_max": 8,
            "attn_impl": "torch",
            "attn_pdrop": 0,
            "attn_type": "multihead_attention",
            "attn_uses_sequence_id": False,
            "clip_qkv": None,
            "prefix_lm": False,
            "qk_ln": False,
            "softmax_scale": None,
        },
        "d_model": 4096,
        "n_heads": 32,
        "n_layers": 32,
        "expansion_ratio": 4,
        "learned_pos_emb": True,
        "logit_scale": None,
        "max_seq_len": 2048,
        "no_bias": True,
        "norm_type": "low_precision_layernorm",
        "vocab_size": 50432,
    }
    config = ModelConfig.from_dict(stated)
    assert (config.hidden_size, config.intermediate_size, config.head_dim) == (4096, 16384, 128)
    assert (config.alibi_slopes[0], config.alibi_slopes[-1]) == (2**-0.25, 2**-8)
    assert config.tie_word_embeddings
