"""The architectures that can be loaded, by the names that config.json gives them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from pagedkv.models import gemma, gpt2, llama, mpt, sliding
from pagedkv.models.config import ModelConfig
from pagedkv.models.metadata import AttentionMetadata, LayerCache
from pagedkv.models.parameters import Parameter, Parameters


class CausalLM(Protocol):
    """What every model offers. derived: checkpoint tensors to skip, as the model computes them;
    tied: checkpoint tensors that stand for a parameter loaded under another name; base_prefix: what
    names of some checkpoints lack. kv_scales: fp32 [num_layers, 2, num_kv_heads], the checkpoint's
    scales of an fp8 cache; None: it has none."""

    config: ModelConfig
    derived: re.Pattern[str]
    base_prefix: str
    tied: dict[str, Parameter]
    kv_scales: torch.Tensor | None

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: Sequence[LayerCache],
        attn_metadata: AttentionMetadata,
    ) -> torch.Tensor: ...

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture: its name, its model_type, and how it is read and built."""

    architecture: str
    model_type: str
    read_config: Callable[[Mapping[str, object]], ModelConfig]
    build: Callable[[ModelConfig, Parameters, int], CausalLM]


FAMILIES = (
    Family("LlamaForCausalLM", "llama", llama.read_config, llama.build),
    Family("MistralForCausalLM", "mistral", sliding.read_mistral, llama.build),
    Family("Qwen2ForCausalLM", "qwen2", sliding.read_qwen2, llama.build),
    Family("Qwen3ForCausalLM", "qwen3", sliding.read_qwen3, llama.build),
    Family("Phi3ForCausalLM", "phi3", sliding.read_phi3, llama.build),
    Family("GPT2LMHeadModel", "gpt2", gpt2.read_config, gpt2.build),
    Family("MptForCausalLM", "mpt", mpt.read_config, mpt.build),
    Family("MPTForCausalLM", "mpt", mpt.read_config, mpt.build),  # as its first files have it
    Family("Gemma2ForCausalLM", "gemma2", gemma.read_gemma2, gemma.build),
    Family("Gemma3ForCausalLM", "gemma3_text", gemma.read_gemma3, gemma.build),
)


def family_of(config: Mapping[str, object]) -> Family:
    """The family that a config.json names.

    Raises:
        ValueError: it names none that is supported; the message lists those that are.
    """
    _check_quantization(config.get("quantization_config"))
    names = config.get("architectures")
    if names is None:
        for family in FAMILIES:
            if config.get("model_type") == family.model_type:
                return family
        named = f"model_type {config.get('model_type')!r:.200}"
    else:
        listed = names if isinstance(names, list) else [names]
        for family in FAMILIES:
            if family.architecture in listed:
                return family
        named = f"architecture {', '.join(map(str, listed))[:200] or 'without a name'}"
    supported = ", ".join(family.architecture for family in FAMILIES)
    raise ValueError(f"config: the {named} is not supported; supported are {supported}")


def family_of_architecture(architecture: str) -> Family:
    """The family of ModelConfig.architecture."""
    return next(family for family in FAMILIES if family.architecture == architecture)


def _check_quantization(quantization: object) -> None:
    """Weights must be plain. What is said of the cache alone is no hindrance: its scales are
    tensors of the checkpoint, and used or left by the option kv_cache_dtype.
    """
    if quantization is None:
        return
    stated: dict[str, object] = quantization if isinstance(quantization, dict) else {}
    scheme = stated.get("kv_cache_scheme")
    if not isinstance(scheme, dict) or stated.get("config_groups"):
        raise ValueError(
            "config: quantization_config is given, but quantised safetensors are not supported; "
            "plain weights and GGUF files are"
        )
    if (scheme.get("type"), scheme.get("num_bits")) != ("float", 8):
        raise ValueError(
            f"config: kv_cache_scheme has type {scheme.get('type')!r} and num_bits "
            f"{scheme.get('num_bits')!r}; supported are 'float' and 8"
        )
