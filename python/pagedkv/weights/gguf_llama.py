"""GGUF's `llama` architecture in Hugging Face's words: configuration, tensor names, and the rows of
Q and K in their own order. Used by gguf_checkpoint.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch

# GGUF's name inside a block -> Hugging Face's name inside a layer.
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OTHER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK = re.compile(r"blk\.(0|[1-9][0-9]{0,5})\.([a-z_]+)\.(weight|bias)")
# Factors of llama3-style rotary scaling: they enter the configuration, not the model's tensors.
ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True, slots=True)
class Metadata:
    """A GGUF file's metadata, read with the checks that every value needs."""

    values: Mapping[str, object]

    def positive(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"GGUF metadata: {key} is {value!r}, not a positive whole number")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"GGUF metadata: {key} is {value!r}, not a number")
        return float(value)


def hf_name(name: str) -> str | None:
    """Hugging Face's name of a GGUF tensor, or None if llama has no such tensor."""
    if name in _OTHER_NAMES:
        return _OTHER_NAMES[name]
    match = _BLOCK.fullmatch(name)
    if match is None or match[2] not in _BLOCK_NAMES:
        return None
    return f"model.layers.{match[1]}.{_BLOCK_NAMES[match[2]]}.{match[3]}"


def config_of(
    values: Mapping[str, object], names: frozenset[str], rope_factors: torch.Tensor | None
) -> dict[str, object]:
    """The config.json that this file would have had.

    Args:
        names: the GGUF names of the tensors. rope_factors: fp32 [head_dim / 2], where the file has
            them.

    Raises:
        ValueError: a value is missing, malformed, or asks for what is not supported.
    """
    metadata = Metadata(values)
    if values.get("llama.expert_count", 0):
        raise ValueError(
            f"GGUF metadata: llama.expert_count is {values['llama.expert_count']!r}, "
            "but mixtures of experts are not supported"
        )
    hidden_size = metadata.positive("llama.embedding_length")
    num_heads = metadata.positive("llama.attention.head_count")
    if hidden_size % num_heads and "llama.attention.key_length" not in values:
        raise ValueError(
            f"GGUF metadata: llama.embedding_length {hidden_size} is not a multiple of "
            f"llama.attention.head_count {num_heads}, and there is no llama.attention.key_length"
        )
    head_dim = metadata.positive("llama.attention.key_length", hidden_size // num_heads)
    for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
        if metadata.positive(key, head_dim) != head_dim:
            raise ValueError(
                f"GGUF metadata: {key} is {values[key]!r}, but only the head_dim {head_dim} "
                "is supported"
            )
    max_len = metadata.positive("llama.context_length")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden_size,
        "intermediate_size": metadata.positive("llama.feed_forward_length"),
        "num_hidden_layers": metadata.positive("llama.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.positive("llama.attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "vocab_size": _vocab_size(values),
        "max_position_embeddings": max_len,
        "rms_norm_eps": metadata.number("llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": metadata.number("llama.rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(metadata, max_len, rope_factors),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in names,
        "attention_bias": "blk.0.attn_q.bias" in names,
        "mlp_bias": "blk.0.ffn_gate.bias" in names,
        "bos_token_id": values.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": values.get("tokenizer.ggml.eos_token_id"),
    }


def _vocab_size(values: Mapping[str, object]) -> int:
    if "llama.vocab_size" in values:
        return Metadata(values).positive("llama.vocab_size")
    tokens = values.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise ValueError("GGUF metadata: neither llama.vocab_size nor tokenizer.ggml.tokens")
    return len(tokens)


def _rope_scaling(
    metadata: Metadata, max_len: int, factors: torch.Tensor | None
) -> dict[str, object] | None:
    kind = metadata.values.get("llama.rope.scaling.type", "none")
    if factors is not None:
        # Llama 3.1 and later: the file holds the divisor of each frequency. That is longrope with
        # one list for every length and no scaling of the amplitude.
        if kind not in ("none", "longrope"):
            raise ValueError(
                f"GGUF metadata: llama.rope.scaling.type is {kind!r}, "
                f"but the file also holds {ROPE_FACTORS}"
            )
        return {
            "rope_type": "longrope",
            "short_factor": factors.tolist(),
            "long_factor": factors.tolist(),
            "attention_factor": 1.0,
            "original_max_position_embeddings": max_len,
        }
    if kind == "none":
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": metadata.number("llama.rope.scaling.factor")}
    if kind == "yarn":
        return {
            "rope_type": "yarn",
            "factor": metadata.number("llama.rope.scaling.factor"),
            "original_max_position_embeddings": metadata.positive(
                "llama.rope.scaling.original_context_length"
            ),
        }
    raise ValueError(
        f"GGUF metadata: llama.rope.scaling.type is {kind!r}; supported are none, linear, yarn"
    )


def in_hf_order(
    name: str, tensor: torch.Tensor, *, num_heads: int, num_kv_heads: int
) -> torch.Tensor:
    """Undo the row order that llama.cpp gives Q and K.

    Hugging Face rotates the two halves of a head against each other, llama.cpp neighbouring rows:
    row 2 i + j of a head in the file is row j * head_dim / 2 + i here, j in {0, 1}.

    Args:
        name: the GGUF name. tensor: [rows, ...], rows = heads * head_dim for Q and K.
    """
    match = _BLOCK.fullmatch(name)
    heads = {"attn_q": num_heads, "attn_k": num_kv_heads}.get(match[2]) if match else None
    if heads is None:
        return tensor
    rows = tensor.shape[0]
    if rows % (2 * heads):
        raise ValueError(f"tensor {name!r} has {rows} rows, not {heads} heads of an even size")
    pairs = tensor.reshape(heads, rows // heads // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)
