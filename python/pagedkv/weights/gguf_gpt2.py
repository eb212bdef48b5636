"""GGUF's `gpt2` architecture in Hugging Face's words: configuration, tensor names, and weights
transposed as its checkpoints have them. Used by gguf_checkpoint.py.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from pagedkv.weights.gguf_metadata import BLOCK, Metadata, hugging_face_name

# GGUF's name inside a block -> Hugging Face's name inside a layer.
_BLOCK_NAMES = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
_OTHER_NAMES = {
    "token_embd.weight": "transformer.wte.weight",
    "position_embd.weight": "transformer.wpe.weight",
    "output_norm.weight": "transformer.ln_f.weight",
    "output_norm.bias": "transformer.ln_f.bias",
    "output.weight": "lm_head.weight",
}
_TRANSPOSED = ("attn_qkv", "attn_output", "ffn_up", "ffn_down")


class GPT2Architecture:
    """GPT-2, whose weights lie the other way round in Hugging Face's files."""

    name = "gpt2"

    def hf_name(self, name: str) -> str | None:
        """Hugging Face's name of a GGUF tensor, or None if the architecture has no such tensor."""
        return hugging_face_name(name, _OTHER_NAMES, _BLOCK_NAMES, "transformer.h")

    def config_of(
        self,
        values: Mapping[str, object],
        names: frozenset[str],
        rope_factors: torch.Tensor | None,
    ) -> dict[str, object]:
        """The config.json that this file would have had. Raises ValueError for what is missing or
        malformed.
        """
        if rope_factors is not None:
            raise ValueError("GGUF: gpt2 has no rotary embedding, but the file scales one")
        metadata = Metadata(values, "gpt2.")
        return {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "n_embd": metadata.positive("embedding_length"),
            "n_inner": metadata.positive("feed_forward_length"),
            "n_layer": metadata.positive("block_count"),
            "n_head": metadata.positive("attention.head_count"),
            "n_positions": metadata.positive("context_length"),
            "layer_norm_epsilon": metadata.number("attention.layer_norm_epsilon"),
            "vocab_size": metadata.vocab_size(),
            "tie_word_embeddings": "output.weight" not in names,
            "bos_token_id": values.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": values.get("tokenizer.ggml.eos_token_id"),
        }

    def in_hf_form(
        self, name: str, tensor: torch.Tensor, config: Mapping[str, object]
    ) -> torch.Tensor:
        """The tensor as Hugging Face's files have it."""
        match = BLOCK.fullmatch(name)
        if match is not None and match[2] in _TRANSPOSED and tensor.ndim == 2:
            return tensor.T
        return tensor
