"""Configurations that plans are made of, and a plan with the engine's own prediction."""

from __future__ import annotations

from typing import Any

import torch

from pagedkv.config import EngineConfig
from pagedkv.engine.memory_plan import predict
from pagedkv.models import ModelConfig
from pagedkv.plan import Gpu, Plan, find_gpu, make_plan

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}
BYTES_PER_TOKEN = 2 * 3 * 2 * 32 * 2


def plan_of(
    shape: dict[str, Any] = LLAMA,
    gpu: Gpu | str = "h200",
    *,
    lengths: tuple[int, ...] = (),
    tensor_parallel_size: int = 1,
    **options: Any,
) -> Plan:
    config = EngineConfig.from_options("m", **{"max_num_seqs": 16, **options})
    return make_plan(
        config,
        ModelConfig.from_dict(shape),
        torch.bfloat16,
        find_gpu(gpu) if isinstance(gpu, str) else gpu,
        predict,
        lengths=lengths,
        tensor_parallel_size=tensor_parallel_size,
    )
