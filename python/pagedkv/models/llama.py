"""Llama 1 to 3.x, SmolLM and others of its shape (`LlamaForCausalLM`). Mistral, Qwen2, Qwen3 and
Phi-3, which differ in biases, norms, sliding windows and names, are built from it too (sliding.py
reads their configurations).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

from pagedkv.models.attention import Attention, AttentionWeights
from pagedkv.models.config import ConfigReader, ModelConfig
from pagedkv.models.layers import Embedding, GatedMLP, OutputHead, RMSNorm
from pagedkv.models.metadata import AttentionMetadata, LayerCache
from pagedkv.models.parameters import Parameters
from pagedkv.models.residual import ResidualDecoder
from pagedkv.models.rope import cos_sin_table, read_rope


def read_config(values: Mapping[str, object]) -> ModelConfig:
    """A Llama's config.json. Raises ValueError for what is missing, wrong or not supported."""
    read = ConfigReader(values)
    attention_bias = read.flag("attention_bias", False)
    return read_decoder(
        values,
        "LlamaForCausalLM",
        attention_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=read.flag("mlp_bias", False),
    )


def read_decoder(
    values: Mapping[str, object],
    architecture: str,
    *,
    attention_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    max_len: int = 2048,
    layer_windows: tuple[int, ...] | None = None,
    head_dim: int | None = None,
    qk_norm: bool = False,
    fused_weights: bool = False,
    partial_rotary: bool = False,
    hidden_act: str | None = None,
) -> ModelConfig:
    """A config.json of Llama's shape, but for what its family has its own ways to say.

    Args:
        max_len: max_position_embeddings where the file has none. layer_windows: None: no layer has
            one. head_dim: where the file has none; None: hidden_size / num_attention_heads.
            partial_rotary: only the beginning of each head may be rotated.
    """
    read = ConfigReader(values)
    hidden_size, num_heads = read.size("hidden_size"), read.heads("num_attention_heads")
    if head_dim is None and values.get("head_dim") is None and hidden_size % num_heads:
        raise ValueError(
            f"config: hidden_size is {hidden_size}, not a multiple of num_attention_heads, "
            f"which is {num_heads}, and there is no head_dim"
        )
    head_dim = read.size("head_dim", head_dim or hidden_size // num_heads or 1)
    max_len = read.size("max_position_embeddings", max_len)
    num_layers = read.layers("num_hidden_layers")
    rope = read_rope(values, head_dim=head_dim, max_len=max_len)
    if rope.rotary_dim != head_dim and not partial_rotary:
        raise ValueError(
            f"config: rotary embedding of {rope.rotary_dim} of {head_dim} elements of a head "
            f"is not supported for {architecture}"
        )
    return ModelConfig(
        architecture=architecture,
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=read.size("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=read.heads("num_key_value_heads", num_heads),
        head_dim=head_dim,
        vocab_size=read.size("vocab_size"),
        max_position_embeddings=max_len,
        norm_eps=read.positive("rms_norm_eps", 1e-6),
        hidden_act=hidden_act or read.activation("hidden_act"),
        rope=rope,
        tie_word_embeddings=read.flag("tie_word_embeddings", False),
        attention_bias=attention_bias,
        output_bias=output_bias,
        mlp_bias=mlp_bias,
        layer_windows=(0,) * num_layers if layer_windows is None else layer_windows,
        qk_norm=qk_norm,
        fused_weights=fused_weights,
    )


class LlamaLayer:
    """x <- x + attention(norm(x)); x <- x + mlp(norm(x)), the sum kept apart as the residual.

    With folded norms there is add_to_ alone: the norms' weights are in the products behind them,
    and the kernels that read these multiply by the norms' scales.
    """

    __slots__ = ("_attention", "_mlp", "_mlp_norm", "first_norm")

    def __init__(
        self, parameters: Parameters, index: int, config: ModelConfig, table: torch.Tensor
    ) -> None:
        name, window = f"model.layers.{index}", config.layer_windows[index]
        size, epsilon = config.hidden_size, config.norm_eps
        folds = parameters.folds_norms and not config.mlp_bias
        self.first_norm = RMSNorm(parameters, f"{name}.input_layernorm", size, epsilon)
        norms = None
        if config.qk_norm:
            norms = (
                RMSNorm(parameters, f"{name}.self_attn.q_norm", config.head_dim, epsilon),
                RMSNorm(parameters, f"{name}.self_attn.k_norm", config.head_dim, epsilon),
            )
        weights = AttentionWeights.of(f"{name}.self_attn", config)
        folded_norm = self.first_norm if folds else None
        self._attention = Attention(parameters, weights, config, table, window, norms, folded_norm)
        self._mlp_norm = RMSNorm(parameters, f"{name}.post_attention_layernorm", size, epsilon)
        folded_norm = self._mlp_norm if folds else None
        self._mlp = GatedMLP(parameters, f"{name}.mlp", config, folded_norm)

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: LayerCache,
        attn_metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Takes the normed x and the sum so far; returns what is to be added to it next."""
        x = self._attention(x, positions, kv_cache, attn_metadata)
        self._mlp_norm.add_(x, residual)
        return self._mlp(x)

    def adds(self, num_rows: int) -> bool:
        return self._attention.adds(num_rows) and self._mlp.adds(num_rows)

    def add_to_(
        self,
        residual: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: LayerCache,
        attn_metadata: AttentionMetadata,
    ) -> None:
        """The same by products that add behind themselves, and norm before or have the norms
        folded in.
        """
        self._attention.add_to_(residual, self.first_norm, positions, kv_cache, attn_metadata)
        self._mlp.add_to_(residual, self._mlp_norm)


def build(config: ModelConfig, parameters: Parameters, max_model_len: int) -> ResidualDecoder:
    """The model, its parameters to be filled, for at most max_model_len tokens a sequence."""
    assert config.rope is not None
    table = cos_sin_table(config.rope, max_model_len, parameters.device)
    embedding = Embedding(parameters, "model.embed_tokens", config.vocab_size, config.hidden_size)
    layers = [LlamaLayer(parameters, index, config, table) for index in range(config.num_layers)]
    return ResidualDecoder(
        config,
        # Buffers that old checkpoints carry; they are computed here.
        derived=re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"),
        embedding=embedding,
        layers=layers,
        adding=layers,
        norm=RMSNorm(parameters, "model.norm", config.hidden_size, config.norm_eps),
        head=OutputHead(parameters, embedding, config),
    )
