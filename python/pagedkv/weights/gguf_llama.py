"""GGUF's architectures of Llama's shape in Hugging Face's words: configuration, tensor names, and,
where llama.cpp changes it, the rows of Q and K in their own order. Used by gguf_checkpoint.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from pagedkv.weights.gguf_metadata import BLOCK, Metadata, hugging_face_name

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
# Beside these, where an architecture has them.
QK_NORMS = (("attn_q_norm", "self_attn.q_norm"), ("attn_k_norm", "self_attn.k_norm"))
# Factors of llama3-style rotary scaling: they enter the configuration, not the model's tensors.
ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True, slots=True)
class LlamaArchitecture:
    """One of Llama's shape: its name in Hugging Face's files, and what is special about its own.

    interleaves: Q and K rows that are rotated together are neighbours. other_names: (GGUF's,
    Hugging Face's) of tensors in a block, beside Llama's or instead of them.
    """

    name: str
    hf_architecture: str
    interleaves: bool = False
    other_names: tuple[tuple[str, str], ...] = ()

    def hf_name(self, name: str) -> str | None:
        """Hugging Face's name of a GGUF tensor, or None if the architecture has no such tensor."""
        names = {**_BLOCK_NAMES, **dict(self.other_names)}
        return hugging_face_name(name, _OTHER_NAMES, names, "model.layers")

    def config_of(
        self,
        values: Mapping[str, object],
        names: frozenset[str],
        rope_factors: torch.Tensor | None,
    ) -> dict[str, object]:
        """The config.json that this file would have had.

        Args:
            names: the GGUF names of the tensors. rope_factors: fp32 [head_dim / 2], where the file
                has them.

        Raises:
            ValueError: a value is missing, malformed, or asks for what is not supported.
        """
        return _config_of(self, values, names, rope_factors)

    def in_hf_form(
        self, name: str, tensor: torch.Tensor, config: Mapping[str, object]
    ) -> torch.Tensor:
        """The tensor as Hugging Face's files have it."""
        if not self.interleaves:
            return tensor
        num_heads, num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        assert isinstance(num_heads, int)
        assert isinstance(num_kv_heads, int)
        return in_hf_order(name, tensor, num_heads=num_heads, num_kv_heads=num_kv_heads)


def _config_of(
    architecture: LlamaArchitecture,
    values: Mapping[str, object],
    names: frozenset[str],
    rope_factors: torch.Tensor | None,
) -> dict[str, object]:
    prefix = f"{architecture.name}."
    metadata = Metadata(values, prefix)
    if num_experts := metadata.get("expert_count", 0):
        raise ValueError(
            f"GGUF metadata: {prefix}expert_count is {num_experts!r:.200}, "
            "but mixtures of experts are not supported"
        )
    hidden_size = metadata.positive("embedding_length")
    num_heads = metadata.positive("attention.head_count")
    if hidden_size % num_heads and metadata.get("attention.key_length") is None:
        raise ValueError(
            f"GGUF metadata: {prefix}embedding_length {hidden_size} is not a multiple of "
            f"{prefix}attention.head_count {num_heads}, and there is no "
            f"{prefix}attention.key_length"
        )
    head_dim = metadata.positive("attention.key_length", hidden_size // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if metadata.positive(key, head_dim) != head_dim:
            raise ValueError(
                f"GGUF metadata: {prefix}{key} is {metadata.get(key)!r:.200}, "
                f"but only the head_dim {head_dim} is supported"
            )
    max_len = metadata.positive("context_length")
    return {
        "architectures": [architecture.hf_architecture],
        "model_type": architecture.name,
        "hidden_size": hidden_size,
        "intermediate_size": metadata.positive("feed_forward_length"),
        "num_hidden_layers": metadata.positive("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.positive("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "vocab_size": metadata.vocab_size(),
        "max_position_embeddings": max_len,
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": metadata.number("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(metadata, max_len, rope_factors),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in names,
        "attention_bias": "blk.0.attn_q.bias" in names,
        "mlp_bias": "blk.0.ffn_gate.bias" in names,
        "bos_token_id": values.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": values.get("tokenizer.ggml.eos_token_id"),
    }


def _rope_scaling(
    metadata: Metadata, max_len: int, factors: torch.Tensor | None
) -> dict[str, object] | None:
    kind = metadata.text("rope.scaling.type", "none")
    name = f"{metadata.prefix}rope.scaling.type"
    if factors is not None:
        # Llama 3.1 and later: the file holds the divisor of each frequency. That is longrope with
        # one list for every length and no scaling of the amplitude.
        if kind not in ("none", "longrope"):
            raise ValueError(
                f"GGUF metadata: {name} is {kind!r:.200}, but the file also holds {ROPE_FACTORS}"
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
        return {"rope_type": "linear", "factor": metadata.number("rope.scaling.factor")}
    if kind == "yarn":
        for key in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor"):
            if metadata.number(f"rope.scaling.{key}", 1.0) != 1:
                raise ValueError(
                    f"GGUF metadata: {metadata.prefix}rope.scaling.{key} is "
                    f"{metadata.get(f'rope.scaling.{key}')!r}, but only 1 is supported"
                )
        return {
            "rope_type": "yarn",
            "factor": metadata.number("rope.scaling.factor"),
            "beta_fast": metadata.number("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": metadata.number("rope.scaling.yarn_beta_slow", 1.0),
            "original_max_position_embeddings": metadata.positive(
                "rope.scaling.original_context_length"
            ),
        }
    raise ValueError(f"GGUF metadata: {name} is {kind!r:.200}; supported are none, linear, yarn")


def in_hf_order(
    name: str, tensor: torch.Tensor, *, num_heads: int, num_kv_heads: int
) -> torch.Tensor:
    """Undo the row order that llama.cpp gives Q and K.

    Hugging Face rotates the two halves of a head against each other, llama.cpp neighbouring rows:
    row 2 i + j of a head in the file is row j * head_dim / 2 + i here, j in {0, 1}.

    Args:
        name: the GGUF name. tensor: [rows, ...], rows = heads * head_dim for Q and K.
    """
    match = BLOCK.fullmatch(name)
    heads = {"attn_q": num_heads, "attn_k": num_kv_heads}.get(match[2]) if match else None
    if heads is None:
        return tensor
    rows = tensor.shape[0]
    if rows % (2 * heads):
        raise ValueError(f"tensor {name!r:.200} has {rows} rows, not {heads} heads of an even size")
    pairs = tensor.reshape(heads, rows // heads // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)
