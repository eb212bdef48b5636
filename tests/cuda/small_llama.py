"""A small Llama with seeded random weights, as an engine on any device has it."""

from __future__ import annotations

from typing import Any

import torch

from pagedkv.config import EngineConfig
from pagedkv.engine import Engine
from pagedkv.engine.loading import describe
from pagedkv.models import load_model

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1500,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
}


def seeded_tensors() -> dict[str, torch.Tensor]:
    """Large enough that answers differ from prompt to prompt and do not repeat themselves."""
    random = torch.Generator().manual_seed(11)
    hidden, inner, vocab = 256, 384, 1500
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }
    for layer in range(3):
        name = f"model.layers.{layer}"
        shapes |= {
            f"{name}.input_layernorm.weight": (hidden,),
            f"{name}.post_attention_layernorm.weight": (hidden,),
            f"{name}.self_attn.q_proj.weight": (512, hidden),
            f"{name}.self_attn.k_proj.weight": (128, hidden),
            f"{name}.self_attn.v_proj.weight": (128, hidden),
            f"{name}.self_attn.o_proj.weight": (hidden, 512),
            f"{name}.mlp.gate_proj.weight": (inner, hidden),
            f"{name}.mlp.up_proj.weight": (inner, hidden),
            f"{name}.mlp.down_proj.weight": (hidden, inner),
        }
    return {
        name: torch.randn(shape, generator=random) * 0.15 + (len(shape) == 1)
        for name, shape in shapes.items()
    }


def engine_on(device: torch.device | str, dtype: str = "float32", **options: Any) -> Engine:
    place = torch.device(device)
    config = EngineConfig.from_options("small", device=str(place), dtype=dtype, **options)
    kind = getattr(torch, dtype)
    model = load_model(CONFIG, seeded_tensors().items(), dtype=kind, device=place)
    return Engine(describe(model, kind, place, max_model_len=512), config)


def answers(engine: Engine, prompts: list[list[int]], params: Any) -> list[list[list[int]]]:
    """Token ids of every answer to each prompt; all in one batch, with the books checked."""
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, params[i] if isinstance(params, list) else params)
    outputs = {}
    while engine.has_work:
        for output in engine.step().finished:
            assert output.error is None
            outputs[output.request_id] = [one.token_ids for one in output.outputs]
        engine.check_invariants()
    return [outputs[str(i)] for i in range(len(prompts))]
