"""Tiny random models with sliding windows, made and saved by transformers itself."""

from __future__ import annotations

from typing import TypeVar

import torch
from tiny_llama import SIZES
from transformers import MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM

Model = TypeVar("Model", bound=torch.nn.Module)


def tiny_mistral(seed: int = 0, **changes: object) -> MistralForCausalLM:
    torch.manual_seed(seed)
    return _with_wild_vectors(MistralForCausalLM(MistralConfig(**{**SIZES, **changes})))


def tiny_qwen2(seed: int = 0, **changes: object) -> Qwen2ForCausalLM:
    torch.manual_seed(seed)
    return _with_wild_vectors(Qwen2ForCausalLM(Qwen2Config(**{**SIZES, **changes})))


def _with_wild_vectors(model: Model) -> Model:
    """Biases and norms that matter."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 2)
            elif "norm" in name:
                parameter.uniform_(0.5, 2)
    return model.eval()
