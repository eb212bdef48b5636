"""MPT (`MptForCausalLM`): ALiBi in place of position embeddings, no biases."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from pagedkv.models.attention import Attention, AttentionWeights
from pagedkv.models.config import ConfigReader, ModelConfig
from pagedkv.models.layers import MLP, Embedding, LayerNorm, OutputHead
from pagedkv.models.parameters import Parameters, Piece, Split, fused
from pagedkv.models.plain import PlainDecoder, PlainLayer


def read_config(values: Mapping[str, object]) -> ModelConfig:
    """An MPT's config.json. Raises ValueError for what is missing, wrong or not supported."""
    read = ConfigReader(values)
    for key, allowed in (("expansion_ratio", (4,)), ("no_bias", (True,)), ("logit_scale", ())):
        read.refuse(key, allowed, "which is not supported")
    given = values.get("attn_config") or {}
    if not isinstance(given, Mapping):
        raise ValueError(f"config: attn_config is {given!r:.200}, not an object")
    attention = ConfigReader(given)
    attention.refuse("attn_type", ("multihead_attention",), "which is not supported")
    attention.refuse("alibi", (True,), "but only ALiBi is supported")
    attention.refuse("alibi_bias_max", (8,), "but only 8 is supported")
    for key in ("prefix_lm", "qk_ln", "attn_uses_sequence_id"):
        attention.refuse(key, (False,), "which is not supported")
    hidden_size, num_heads = read.size("d_model", 2048), read.heads("n_heads", 16)
    if hidden_size % num_heads:
        raise ValueError(
            f"config: d_model is {hidden_size}, not a multiple of n_heads, which is {num_heads}"
        )
    num_layers, has_clip = read.layers("n_layers", 24), given.get("clip_qkv") is not None
    has_scale = given.get("softmax_scale") is not None
    return ModelConfig(
        architecture="MptForCausalLM",
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=4 * hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        vocab_size=read.size("vocab_size"),
        max_position_embeddings=read.size("max_seq_len", 2048),
        norm_eps=read.positive("layer_norm_epsilon", 1e-5),
        hidden_act="gelu",
        rope=None,
        tie_word_embeddings=read.flag("tie_word_embeddings", True),
        attention_bias=False,
        output_bias=False,
        mlp_bias=False,
        layer_windows=(0,) * num_layers,
        attention_scale=attention.positive("softmax_scale", 1.0) if has_scale else None,
        alibi_slopes=alibi_slopes(num_heads),
        clip_qkv=attention.positive("clip_qkv", 1.0) if has_clip else 0.0,
    )


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """2 ** -(8 k / n) for k = 1 .. n, where n is num_heads; where that is no power of two,
    of the next one's slopes every second from the second on, then every second from the first on.

    Source: Press, Smith and Lewis, "Train Short, Test Long", 2022; the order is MPT's.

    >>> alibi_slopes(3)
    (0.0625, 0.00390625, 0.25)
    """
    power = 2 ** math.ceil(math.log2(num_heads))
    slopes = [2.0 ** -(8 * k / power) for k in range(1, power + 1)]
    if power != num_heads:
        slopes = [*slopes[1::2], *slopes[::2]][:num_heads]
    return tuple(slopes)


def build(config: ModelConfig, parameters: Parameters, max_model_len: int) -> PlainDecoder:
    """The model, its parameters to be filled; what is computed does not depend on max_model_len."""
    size = config.hidden_size
    embedding = Embedding(parameters, "transformer.wte", config.vocab_size, size)
    return PlainDecoder(
        config,
        derived=re.compile(r"(?!)"),  # none
        base_prefix="",
        embedding=embedding,
        positions=None,
        layers=[_layer(config, parameters, index) for index in range(config.num_layers)],
        norm=_norm(config, parameters, "transformer.norm_f"),
        head=OutputHead(parameters, embedding, config),
    )


def _norm(config: ModelConfig, parameters: Parameters, name: str) -> LayerNorm:
    return LayerNorm(parameters, name, config.hidden_size, config.norm_eps, has_bias=False)


def _layer(config: ModelConfig, parameters: Parameters, index: int) -> PlainLayer:
    name, size, inner = f"transformer.blocks.{index}", config.hidden_size, config.intermediate_size
    heads = config.num_heads * config.head_dim
    one = Piece(f"{name}.attn.Wqkv", (heads, size), Split.COLUMN, config.head_dim)
    output = Piece(f"{name}.attn.out_proj", (size, heads), Split.ROW, config.head_dim)
    weights = AttentionWeights(fused((one, one, one), one.name), output)
    return PlainLayer(
        _norm(config, parameters, f"{name}.norm_1"),
        Attention(parameters, weights, config, cos_sin_table=None, window=0),
        _norm(config, parameters, f"{name}.norm_2"),
        MLP(
            parameters,
            Piece(f"{name}.ffn.up_proj", (inner, size), Split.COLUMN),
            Piece(f"{name}.ffn.down_proj", (size, inner), Split.ROW),
            config.hidden_act,
            has_bias=config.mlp_bias,
        ),
    )
