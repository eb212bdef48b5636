"""GGUF's `gemma2` and `gemma3` in Hugging Face's words: as Llama's (gguf_llama.py) but for the
norms, their weights and what the configuration says beside. Used by gguf_checkpoint.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from pagedkv.weights.gguf_llama import QK_NORMS, LlamaArchitecture
from pagedkv.weights.gguf_metadata import Metadata

_NORMS = (
    ("post_attention_norm", "post_attention_layernorm"),
    ("ffn_norm", "pre_feedforward_layernorm"),
    ("post_ffw_norm", "post_feedforward_layernorm"),
)
_LLAMA = {
    "gemma2": LlamaArchitecture("gemma2", "Gemma2ForCausalLM", other_names=_NORMS),
    "gemma3": LlamaArchitecture("gemma3", "Gemma3ForCausalLM", other_names=_NORMS + QK_NORMS),
}
# The models of 27 billion weights scale attention by hidden_size / num_heads; the files do not say
# so, and llama.cpp, whose files they are, knows these models by their layers.
_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}
# Where a file has none: those of the first Gemma 2 were written before they had one.
_WINDOWS = {"gemma2": 4096, "gemma3": None}


@dataclass(frozen=True, slots=True)
class GemmaArchitecture:
    """Gemma 2 or the text model of Gemma 3. Norm weights in its files are larger by one."""

    name: str

    def hf_name(self, name: str) -> str | None:
        """Hugging Face's name of a GGUF tensor, or None if the architecture has no such tensor."""
        return _LLAMA[self.name].hf_name(name)

    def config_of(
        self,
        values: Mapping[str, object],
        names: frozenset[str],
        rope_factors: torch.Tensor | None,
    ) -> dict[str, object]:
        """The config.json that this file would have had; as LlamaArchitecture has it."""
        metadata = Metadata(values, f"{self.name}.")
        config = _LLAMA[self.name].config_of(values, names, rope_factors)
        is_27b = metadata.positive("block_count") == _LAYERS_OF_27B[self.name]
        per_head = metadata.positive("embedding_length") // metadata.positive(
            "attention.head_count"
        )
        config |= {
            "model_type": {"gemma2": "gemma2", "gemma3": "gemma3_text"}[self.name],
            "hidden_activation": "gelu_pytorch_tanh",
            "sliding_window": metadata.positive("attention.sliding_window", _WINDOWS[self.name]),
            "query_pre_attn_scalar": per_head if is_27b else config["head_dim"],
        }
        if self.name == "gemma2":
            return config | {
                "attn_logit_softcapping": metadata.number("attn_logit_softcapping", 50.0),
                "final_logit_softcapping": metadata.number("final_logit_softcapping", 30.0),
            }
        theta = metadata.number("rope.freq_base", 1e6)
        return config | {"rope_theta": theta, "rope_local_base_freq": 1e4}

    def in_hf_form(
        self, name: str, tensor: torch.Tensor, config: Mapping[str, object]
    ) -> torch.Tensor:
        """The tensor as Hugging Face's files have it."""
        return tensor - 1 if name.endswith("norm.weight") else tensor
