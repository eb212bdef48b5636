"""Tiny random Llamas, made and saved by transformers itself."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = {
    "vocab_size": 97,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "use_cache": False,
}


def tiny_llama(seed: int = 0, **changes: object) -> LlamaForCausalLM:
    """A model whose every tensor matters: biases and norms are random too, and not small."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**{**SIZES, **changes})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 2)
            elif "norm" in name:
                parameter.uniform_(0.5, 2)
    return model


def saved(model: LlamaForCausalLM, folder: Path, **options: object) -> Path:
    model.save_pretrained(folder, **options)
    return folder


def reference_logits(model: LlamaForCausalLM, ids: list[int]) -> torch.Tensor:
    """fp32 [len(ids), vocab_size] of one forward pass over the whole sequence."""
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([ids])).logits[0]
    return logits
