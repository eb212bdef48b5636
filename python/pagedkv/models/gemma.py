"""Gemma 2 and the text models of Gemma 3 (`Gemma2ForCausalLM`, `Gemma3ForCausalLM`): norms before
and behind each half of a layer, whose weights are stored less one; layers with and without a
window; scaled embeddings; soft caps (2), norms of queries and keys and two rotary embeddings (3).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

import torch

from pagedkv.models.attention import Attention, AttentionWeights
from pagedkv.models.config import ConfigReader, ModelConfig
from pagedkv.models.layers import Embedding, GatedMLP, OutputHead, RMSNorm
from pagedkv.models.llama import read_decoder
from pagedkv.models.metadata import AttentionMetadata, LayerCache
from pagedkv.models.parameters import Parameters
from pagedkv.models.residual import ResidualDecoder
from pagedkv.models.rope import cos_sin_table, read_rope

ACTIVATIONS = ("gelu_pytorch_tanh", "gelu", "silu")
_DEFAULTS = {"num_key_value_heads": 4, "query_pre_attn_scalar": 256, "tie_word_embeddings": True}
_PLAIN: dict[str, object] = {"rope_type": "default"}


def read_gemma2(values: Mapping[str, object]) -> ModelConfig:
    """A Gemma 2's config.json: every other layer has a window, from the first on. Raises ValueError
    for what is missing, wrong or not supported.
    """
    config = _read(values, "Gemma2ForCausalLM", max_len=8192, full_every=2)
    return replace(
        config,
        attention_soft_cap=_soft_cap(values, "attn_logit_softcapping", 50.0),
        logit_soft_cap=_soft_cap(values, "final_logit_softcapping", 30.0),
    )


def read_gemma3(values: Mapping[str, object]) -> ModelConfig:
    """The config.json of a Gemma 3 for text: every sixth layer has no window. Raises ValueError for
    what is missing, wrong or not supported.
    """
    read = ConfigReader(values)
    read.refuse("attn_logit_softcapping", (), "which Gemma 3 does not apply")
    every = read.size("sliding_window_pattern", 6)
    full, local = _ropes(values)
    config = _read(full, "Gemma3ForCausalLM", max_len=131072, full_every=every)
    return replace(
        config,
        qk_norm=True,
        logit_soft_cap=_soft_cap(values, "final_logit_softcapping", None),
        local_rope=read_rope(
            local, head_dim=config.head_dim, max_len=config.max_position_embeddings
        ),
    )


def _ropes(values: Mapping[str, object]) -> tuple[dict[str, object], dict[str, object]]:
    """The configuration as layers without a window see it, and as those with one do: apart in
    rope_parameters (transformers 5), or as rope_theta, rope_scaling and rope_local_base_freq.
    """
    bare = {key: value for key, value in values.items() if not key.startswith("rope_")}
    both = values.get("rope_parameters")
    if both is None:
        scaling = values.get("rope_scaling") or _PLAIN
        theta, local_theta = values.get("rope_theta"), values.get("rope_local_base_freq")
        full, local = scaling, _PLAIN
    elif isinstance(both, Mapping):
        theta, local_theta = None, None
        full, local = both.get("full_attention") or _PLAIN, both.get("sliding_attention") or _PLAIN
    else:
        raise ValueError(f"config: rope_parameters is {both!r:.200}, not an object")
    return (
        {**bare, "rope_theta": 1e6 if theta is None else theta, "rope_parameters": full},
        {
            **bare,
            "rope_theta": 1e4 if local_theta is None else local_theta,
            "rope_parameters": local,
        },
    )


def _read(
    values: Mapping[str, object], architecture: str, *, max_len: int, full_every: int
) -> ModelConfig:
    """What both have. full_every: of so many layers one has no window, unless layer_types says."""
    values = {**_DEFAULTS, **values}
    read = ConfigReader(values)
    read.refuse("use_bidirectional_attention", (False,), "which is not supported")
    num_layers, window = read.layers("num_hidden_layers"), read.size("sliding_window", 4096)
    kinds = read.layer_types(num_layers)
    if kinds is None:
        kinds = [
            "sliding_attention" if (index + 1) % full_every else "full_attention"
            for index in range(num_layers)
        ]
    attention_bias = read.flag("attention_bias", False)
    config = read_decoder(
        values,
        architecture,
        attention_bias=attention_bias,
        output_bias=attention_bias,
        max_len=max_len,
        layer_windows=tuple(window if kind == "sliding_attention" else 0 for kind in kinds),
        head_dim=256,
        hidden_act=read.activation("hidden_activation", ACTIVATIONS),
    )
    return replace(config, attention_scale=read.positive("query_pre_attn_scalar", 256) ** -0.5)


def _soft_cap(values: Mapping[str, object], key: str, default: float | None) -> float:
    """The cap, or 0 where there is none; null is none, absent the default."""
    value = values.get(key, default)
    return 0.0 if value is None else ConfigReader({key: value}).positive(key, 1.0)


def gemma_norm(parameters: Parameters, name: str, size: int, config: ModelConfig) -> RMSNorm:
    """A norm whose weight is stored less one."""
    return RMSNorm(parameters, name, size, config.norm_eps, offset=1.0)


class GemmaLayer:
    """x <- x + norm(attention(norm(x))); x <- x + norm(mlp(norm(x))), the sum kept apart as the
    residual.
    """

    __slots__ = ("_attention", "_mlp", "_mlp_norm", "_post_attention", "_post_mlp", "first_norm")

    def __init__(
        self, parameters: Parameters, index: int, config: ModelConfig, table: torch.Tensor
    ) -> None:
        name, size = f"model.layers.{index}", config.hidden_size
        attention = f"{name}.self_attn"
        self.first_norm = gemma_norm(parameters, f"{name}.input_layernorm", size, config)
        norms = None
        if config.qk_norm:
            norms = (
                gemma_norm(parameters, f"{attention}.q_norm", config.head_dim, config),
                gemma_norm(parameters, f"{attention}.k_norm", config.head_dim, config),
            )
        weights, window = AttentionWeights.of(attention, config), config.layer_windows[index]
        self._attention = Attention(parameters, weights, config, table, window, norms)
        self._post_attention = gemma_norm(
            parameters, f"{name}.post_attention_layernorm", size, config
        )
        self._mlp_norm = gemma_norm(parameters, f"{name}.pre_feedforward_layernorm", size, config)
        self._mlp = GatedMLP(parameters, f"{name}.mlp", config)
        self._post_mlp = gemma_norm(parameters, f"{name}.post_feedforward_layernorm", size, config)

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
        self._post_attention.apply_(x)
        self._mlp_norm.add_(x, residual)
        x = self._mlp(x)
        self._post_mlp.apply_(x)
        return x


def build(config: ModelConfig, parameters: Parameters, max_model_len: int) -> ResidualDecoder:
    """The model, its parameters to be filled, for at most max_model_len tokens a sequence."""
    assert config.rope is not None
    full = cos_sin_table(config.rope, max_model_len, parameters.device)
    local = full
    if config.local_rope is not None:
        local = cos_sin_table(config.local_rope, max_model_len, parameters.device)
    embedding = Embedding(parameters, "model.embed_tokens", config.vocab_size, config.hidden_size)
    return ResidualDecoder(
        config,
        derived=re.compile(r"model\.rotary_emb(_local)?\.inv_freq"),
        embedding=embedding,
        # Rounded as the embeddings are, before it multiplies them.
        scale=torch.tensor(config.hidden_size**0.5, dtype=parameters.dtype).item(),
        layers=[
            GemmaLayer(parameters, index, config, local if window else full)
            for index, window in enumerate(config.layer_windows)
        ],
        norm=gemma_norm(parameters, "model.norm", config.hidden_size, config),
        head=OutputHead(parameters, embedding, config),
    )
