"""GPT-2 (`GPT2LMHeadModel`): learned positions, layer norms and biases everywhere, no gate.

Its checkpoints hold weights transposed, queries, keys and values in one, and, those of the first
release, names without the leading "transformer.".
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

from pagedkv.models.attention import Attention, AttentionWeights
from pagedkv.models.config import ConfigReader, ModelConfig
from pagedkv.models.layers import MLP, Embedding, LayerNorm, OutputHead
from pagedkv.models.metadata import AttentionMetadata
from pagedkv.models.parameters import Parameters, Piece, Split, fused

ACTIVATIONS = ("gelu_new", "gelu_pytorch_tanh", "gelu")


def read_config(values: Mapping[str, object]) -> ModelConfig:
    """A GPT-2's config.json. Raises ValueError for what is missing, wrong or not supported."""
    read = ConfigReader(values)
    read.refuse("scale_attn_weights", (True,), "but only scaled attention is supported")
    for key in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        read.refuse(key, (False,), "which is not supported")
    hidden_size, num_heads = read.size("n_embd", 768), read.size("n_head", 12)
    if hidden_size % num_heads:
        raise ValueError(
            f"config: n_embd is {hidden_size}, not a multiple of n_head, which is {num_heads}"
        )
    num_layers = read.size("n_layer", 12)
    return ModelConfig(
        architecture="GPT2LMHeadModel",
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=read.size("n_inner", 4 * hidden_size),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        vocab_size=read.size("vocab_size"),
        max_position_embeddings=read.size("n_positions", 1024),
        norm_eps=read.positive("layer_norm_epsilon", 1e-5),
        hidden_act=read.activation("activation_function", ACTIVATIONS),
        rope=None,
        tie_word_embeddings=read.flag("tie_word_embeddings", True),
        attention_bias=True,
        output_bias=True,
        mlp_bias=True,
        layer_windows=(0,) * num_layers,
    )


class GPT2Layer:
    """x <- x + attention(norm(x)); x <- x + mlp(norm(x))."""

    __slots__ = ("_attention", "_attention_norm", "_mlp", "_mlp_norm")

    def __init__(self, parameters: Parameters, index: int, config: ModelConfig) -> None:
        name, size, inner = f"transformer.h.{index}", config.hidden_size, config.intermediate_size

        def transposed(piece: str, rows: int, columns: int, split: Split, unit: int = 1) -> Piece:
            return Piece(f"{name}.{piece}", (rows, columns), split, unit, transposed=True)

        dim = config.head_dim
        one = transposed("attn.c_attn", size, size, Split.COLUMN, dim)
        weights = AttentionWeights(
            fused((one, one, one), one.name),
            transposed("attn.c_proj", size, size, Split.ROW, dim),
        )
        self._attention_norm = LayerNorm(parameters, f"{name}.ln_1", size, config.norm_eps)
        self._attention = Attention(parameters, weights, config, cos_sin_table=None, window=0)
        self._mlp_norm = LayerNorm(parameters, f"{name}.ln_2", size, config.norm_eps)
        self._mlp = MLP(
            parameters,
            transposed("mlp.c_fc", inner, size, Split.COLUMN),
            transposed("mlp.c_proj", size, inner, Split.ROW),
            config.hidden_act,
        )

    def __call__(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: tuple[torch.Tensor, torch.Tensor],
        attn_metadata: AttentionMetadata,
    ) -> torch.Tensor:
        x = x + self._attention(self._attention_norm(x), positions, kv_cache, attn_metadata)
        return x + self._mlp(self._mlp_norm(x))


class GPT2LMHeadModel:
    """The whole model: hidden states of a step, and logits of chosen ones."""

    # Causal masks that old checkpoints carry.
    derived = re.compile(r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias")
    base_prefix = "transformer."

    def __init__(self, config: ModelConfig, parameters: Parameters, max_model_len: int) -> None:
        self.config = config
        size = config.hidden_size
        self._embed = Embedding(parameters, "transformer.wte", config.vocab_size, size)
        self._positions = Embedding(
            parameters, "transformer.wpe", config.max_position_embeddings, size, Split.WHOLE
        )
        self._layers = [GPT2Layer(parameters, index, config) for index in range(config.num_layers)]
        self._norm = LayerNorm(parameters, "transformer.ln_f", size, config.norm_eps)
        self._head = OutputHead(parameters, self._embed, config)
        self.tied = self._head.tied

    @torch.inference_mode()
    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: list[tuple[torch.Tensor, torch.Tensor]],
        attn_metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Hidden states [num_tokens, hidden_size] of one step; arguments as LlamaForCausalLM's."""
        x = self._embed(input_ids) + self._positions(positions)
        for layer, kv_cache in zip(self._layers, kv_caches, strict=True):
            x = layer(x, positions, kv_cache, attn_metadata)
        return self._norm(x)

    @torch.inference_mode()
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [n, hidden_size] -> logits [n, vocab_size]."""
        return self._head(hidden)
