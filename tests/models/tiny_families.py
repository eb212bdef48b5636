"""Tiny random models of each architecture, made and saved by transformers itself: FAMILIES names
them with what an architecture lets vary. Used by test_families.py here and in tests/engine.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers

SIZES: dict[str, Any] = {
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": None,
}
WINDOWS = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}

# Name: (architecture of transformers, what differs from SIZES).
MPT = {"d_model": 40, "n_layers": 3, "n_heads": 4, "max_seq_len": 128}
CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}  # caps that matter
SIX = {"num_hidden_layers": 6}  # the sixth layer has no window
MODEL_CLASSES = {"GPT2": "GPT2LMHeadModel"}
CONFIG_CLASSES = {"Gemma3": "Gemma3TextConfig"}
GPT2 = {
    "n_embd": 40,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 128,
    "bos_token_id": None,
    "eos_token_id": None,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    # All seven projections have biases.
    "llama": ("Llama", {"head_dim": 16, "attention_bias": True, "mlp_bias": True}),
    "llama, scaled": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "smollm": (
        "Llama",
        {
            "hidden_size": 36,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "tie_word_embeddings": True,
        },
    ),
    "mistral": ("Mistral", {"head_dim": 16, "sliding_window": 9}),
    "mistral, no window": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen2, windows": ("Qwen2", WINDOWS),
    "qwen2, head_dim of its own": ("Qwen2", {"head_dim": 16}),
    "phi3, head_dim of its own": ("Phi3", {"head_dim": 16}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3, biases, tied": (
        "Qwen3",
        {"head_dim": 10, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "qwen3, windows": ("Qwen3", {"head_dim": 16, **WINDOWS}),
    "phi3": ("Phi3", {}),
    "phi3, window": ("Phi3", {"sliding_window": 9}),
    "phi3, part of each head rotated, tied": (
        "Phi3",
        {
            "hidden_size": 64,
            "rope_parameters": {"rope_theta": 1000.0, "partial_rotary_factor": 0.75},
            "tie_word_embeddings": True,
        },
    ),
    "phi3, long": (
        "Phi3",
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1000.0,
                "short_factor": [1.0 + 0.1 * i for i in range(5)],
                "long_factor": [2.0 + 0.5 * i for i in range(5)],
            },
            "original_max_position_embeddings": 128,
        },
    ),
    "gpt2": ("GPT2", GPT2),
    "gpt2, another width, gelu, not tied": (
        "GPT2",
        {**GPT2, "n_inner": 56, "activation_function": "gelu", "tie_word_embeddings": False},
    ),
    "gemma2": (
        "Gemma2",
        {"head_dim": 16, "query_pre_attn_scalar": 20, "sliding_window": 9, **CAPS},
    ),
    "gemma2, no caps, biases, not tied": (
        "Gemma2",
        {
            "head_dim": 16,
            "sliding_window": 9,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "gemma3": ("Gemma3", {"head_dim": 16, "query_pre_attn_scalar": 20, "sliding_window": 9, **SIX}),
    "gemma3, scaled": (
        "Gemma3",
        {
            "head_dim": 16,
            "sliding_window": 9,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "final_logit_softcapping": 3.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "mpt": ("Mpt", MPT),
    "mpt, heads no power of two, clipped, scaled, not tied": (
        "Mpt",
        {
            **MPT,
            "n_heads": 5,
            "attn_config": {"clip_qkv": 1.5, "softmax_scale": 0.2},
            "tie_word_embeddings": False,
        },
    ),
}


# One of each architecture, and what a window changes: what the engine is run on.
IN_ENGINES = [name for name in FAMILIES if "," not in name or name.endswith(("window", "windows"))]


def config_of(name: str) -> dict[str, Any]:
    """The config.json that transformers would save."""
    made = _config(name)
    architecture = FAMILIES[name][0]
    found: dict[str, Any] = made.to_dict() | {
        "architectures": [MODEL_CLASSES.get(architecture, f"{architecture}ForCausalLM")]
    }
    return found


def _config(name: str, **changes: Any) -> Any:
    architecture, options = FAMILIES[name]
    sizes = {} if architecture in ("GPT2", "Mpt") else SIZES  # they have names of their own
    shared = {"vocab_size": 97, "initializer_range": 0.2, "use_cache": False}
    config_class = getattr(transformers, CONFIG_CLASSES.get(architecture, f"{architecture}Config"))
    return config_class(**{**shared, **sizes, **options, **changes})


def tiny_family(name: str, seed: int = 0, **changes: Any) -> Any:
    """A model whose every tensor matters: biases and norms are random too, and not small."""
    architecture = FAMILIES[name][0]
    torch.manual_seed(seed)
    model_class = MODEL_CLASSES.get(architecture, f"{architecture}ForCausalLM")
    model = getattr(transformers, model_class)(_config(name, **changes)).eval()
    with torch.no_grad():
        for tensor_name, parameter in model.named_parameters():
            if tensor_name.endswith("bias"):
                parameter.normal_(0, 1)
            elif "norm" in tensor_name or ".ln_" in tensor_name:
                parameter.uniform_(-0.5, 1) if "Gemma" in architecture else parameter.uniform_(
                    0.5, 2
                )
    return model
