"""Families of Llama's shape with sliding windows: what their config.json says of them."""

from __future__ import annotations

from collections.abc import Mapping

from pagedkv.models.config import LAYER_TYPES, ConfigReader, ModelConfig
from pagedkv.models.llama import read_decoder


def read_mistral(values: Mapping[str, object]) -> ModelConfig:
    """Mistral 7B and others (`MistralForCausalLM`): sliding_window holds in every layer, or is null
    (from v0.2 on). Raises ValueError for what is missing, wrong or not supported.
    """
    read = ConfigReader(values)
    # Absent, it is what the architecture began with; null says that there is none.
    has_window = values.get("sliding_window", 4096) is not None
    window = read.size("sliding_window", 4096) if has_window else 0
    read.refuse("layer_types", (), "which only Ministral has; it is not supported")
    windows = (window,) * read.layers("num_hidden_layers")
    return read_decoder(values, "MistralForCausalLM", max_len=131072, layer_windows=windows)


def read_qwen2(values: Mapping[str, object]) -> ModelConfig:
    """Qwen2 and Qwen2.5 (`Qwen2ForCausalLM`): with use_sliding_window the layers from
    max_window_layers on have a window, or those that layer_types names. Raises ValueError for what
    is missing, wrong or not supported.
    """
    return read_decoder(
        values,
        "Qwen2ForCausalLM",
        attention_bias=True,
        max_len=32768,
        layer_windows=_qwen_windows(values),
    )


def read_qwen3(values: Mapping[str, object]) -> ModelConfig:
    """Qwen3 (`Qwen3ForCausalLM`): windows as Qwen2, norms of queries and keys, heads of 128 where
    the file does not say. Raises ValueError for what is missing, wrong or not supported.
    """
    attention_bias = ConfigReader(values).flag("attention_bias", False)
    return read_decoder(
        values,
        "Qwen3ForCausalLM",
        attention_bias=attention_bias,
        output_bias=attention_bias,
        max_len=32768,
        layer_windows=_qwen_windows(values),
        head_dim=128,
        qk_norm=True,
    )


def read_phi3(values: Mapping[str, object]) -> ModelConfig:
    """Phi-3, 3.5 and 4 (`Phi3ForCausalLM`): fused projections, part of each head rotated where the
    file says so, and sliding_window in every layer or null. Raises ValueError for what is missing,
    wrong or not supported.
    """
    read = ConfigReader(values)
    window = 0 if values.get("sliding_window") is None else read.size("sliding_window")
    return read_decoder(
        values,
        "Phi3ForCausalLM",
        max_len=4096,
        layer_windows=(window,) * read.layers("num_hidden_layers"),
        fused_weights=True,
        partial_rotary=True,
    )


def _qwen_windows(values: Mapping[str, object]) -> tuple[int, ...]:
    """The window of each layer, if the model uses any."""
    read = ConfigReader(values)
    num_layers = read.layers("num_hidden_layers")
    if not read.flag("use_sliding_window", False):
        return (0,) * num_layers
    window = read.size("sliding_window", 4096)
    kinds = _layer_types(values, num_layers)
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def _layer_types(values: Mapping[str, object], num_layers: int) -> list[str]:
    given = ConfigReader(values).layer_types(num_layers)
    if given is not None:
        return given
    first = values.get("max_window_layers")
    first = 28 if first is None else first
    if isinstance(first, bool) or not isinstance(first, int) or first < 0:
        raise ValueError(f"config: max_window_layers is {first!r:.200}, not a whole number from 0")
    return [LAYER_TYPES[index >= first] for index in range(num_layers)]
