"""GPT-2 (`GPT2LMHeadModel`): learned positions, layer norms and biases everywhere, no gate.

Its checkpoints hold weights transposed, queries, keys and values in one, and, those of the first
release, names without the leading "transformer.".
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from pagedkv.models.attention import Attention, AttentionWeights
from pagedkv.models.config import ConfigReader, ModelConfig
from pagedkv.models.layers import MLP, Embedding, LayerNorm, OutputHead
from pagedkv.models.parameters import Parameters, Piece, Split, fused
from pagedkv.models.plain import PlainDecoder, PlainLayer

ACTIVATIONS = ("gelu_new", "gelu_pytorch_tanh", "gelu")


def read_config(values: Mapping[str, object]) -> ModelConfig:
    """A GPT-2's config.json. Raises ValueError for what is missing, wrong or not supported."""
    read = ConfigReader(values)
    read.refuse("scale_attn_weights", (True,), "but only scaled attention is supported")
    for key in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        read.refuse(key, (False,), "which is not supported")
    hidden_size, num_heads = read.size("n_embd", 768), read.heads("n_head", 12)
    if hidden_size % num_heads:
        raise ValueError(
            f"config: n_embd is {hidden_size}, not a multiple of n_head, which is {num_heads}"
        )
    num_layers = read.layers("n_layer", 12)
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


def build(config: ModelConfig, parameters: Parameters, max_model_len: int) -> PlainDecoder:
    """The model, its parameters to be filled; what is computed does not depend on max_model_len."""
    size = config.hidden_size
    embedding = Embedding(parameters, "transformer.wte", config.vocab_size, size)
    return PlainDecoder(
        config,
        # Causal masks that old checkpoints carry.
        derived=re.compile(r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias"),
        base_prefix="transformer.",
        embedding=embedding,
        positions=Embedding(
            parameters, "transformer.wpe", config.max_position_embeddings, size, Split.WHOLE
        ),
        layers=[_layer(config, parameters, index) for index in range(config.num_layers)],
        norm=LayerNorm(parameters, "transformer.ln_f", size, config.norm_eps),
        head=OutputHead(parameters, embedding, config),
    )


def _layer(config: ModelConfig, parameters: Parameters, index: int) -> PlainLayer:
    name, size, inner = f"transformer.h.{index}", config.hidden_size, config.intermediate_size

    def transposed(piece: str, rows: int, columns: int, split: Split, unit: int = 1) -> Piece:
        return Piece(f"{name}.{piece}", (rows, columns), split, unit, transposed=True)

    dim, heads = config.head_dim, config.num_heads * config.head_dim
    one = transposed("attn.c_attn", heads, size, Split.COLUMN, dim)
    weights = AttentionWeights(
        fused((one, one, one), one.name), transposed("attn.c_proj", size, heads, Split.ROW, dim)
    )
    return PlainLayer(
        LayerNorm(parameters, f"{name}.ln_1", size, config.norm_eps),
        Attention(parameters, weights, config, cos_sin_table=None, window=0),
        LayerNorm(parameters, f"{name}.ln_2", size, config.norm_eps),
        MLP(
            parameters,
            transposed("mlp.c_fc", inner, size, Split.COLUMN),
            transposed("mlp.c_proj", size, inner, Split.ROW),
            config.hidden_act,
            has_bias=config.mlp_bias,
        ),
    )
