"""GGUF files for tests: tiny models of Llama's shape written with the gguf package, Llama's Q and K
in llama.cpp's order of rows.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

GEMMA_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
Model = TypeVar("Model", bound=PreTrainedModel)

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "rms_norm_eps": 1e-5,
}
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def tiny_llama(**changes: object) -> LlamaForCausalLM:
    torch.manual_seed(3)
    return _wild(LlamaForCausalLM(LlamaConfig(**{**SIZES, **changes})))


def tiny_qwen2(**changes: object) -> Qwen2ForCausalLM:
    torch.manual_seed(3)
    return _wild(Qwen2ForCausalLM(Qwen2Config(**{**SIZES, **changes})))


def tiny_qwen3(**changes: object) -> Qwen3ForCausalLM:
    torch.manual_seed(3)
    return _wild(Qwen3ForCausalLM(Qwen3Config(**{**SIZES, **changes})))


def _wild(model: Model) -> Model:
    """Biases and norms that matter."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 2)
            elif "norm" in name:
                parameter.uniform_(0.5, 2)
    return model.eval()


def llama_cpp_rows(tensor: np.ndarray, heads: int) -> np.ndarray:
    """The order in which llama.cpp stores Q and K: pairs that are rotated together are neighbours.

    Written row by row on purpose, as the plainest statement of it.
    """
    size = tensor.shape[0] // heads
    out = np.empty_like(tensor)
    for head in range(heads):
        for i in range(size // 2):
            out[head * size + 2 * i] = tensor[head * size + i]
            out[head * size + 2 * i + 1] = tensor[head * size + size // 2 + i]
    return out


def gguf_name(name: str, names: dict[str, str] = NAMES) -> str:
    whole = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in whole:
        return whole[name]
    _, _, layer, rest = name.split(".", 3)
    stem, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{names[stem]}.{kind}"


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    *,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    metadata: dict[str, object] | None = None,
    extra: dict[str, np.ndarray] | None = None,
    drop: tuple[str, ...] = (),
) -> Path:
    """Write a model. metadata: further keys, or None values to leave standard ones out."""
    config = model.config
    arch = config.model_type.removesuffix("_text")
    theta = config.rope_parameters.get("full_attention", config.rope_parameters)["rope_theta"]
    names = NAMES | (GEMMA_NORMS if arch.startswith("gemma") else {})
    values: dict[str, object] = {
        f"{arch}.block_count": config.num_hidden_layers,
        f"{arch}.context_length": config.max_position_embeddings,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.attention.head_count": config.num_attention_heads,
        f"{arch}.attention.head_count_kv": config.num_key_value_heads,
        f"{arch}.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        f"{arch}.rope.freq_base": float(theta),
        f"{arch}.vocab_size": config.vocab_size,
        **(metadata or {}),
    }
    writer = gguf.GGUFWriter(path, str(values.pop("general.architecture", arch)))
    for key, value in values.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        else:
            assert value is None
    tied = config.tie_word_embeddings
    for name, tensor in model.state_dict().items():
        if (tied and name == "lm_head.weight") or gguf_name(name, names) in drop:
            continue
        array = tensor.float().numpy()
        if arch == "llama" and "q_proj" in name:
            array = llama_cpp_rows(array, config.num_attention_heads)
        if arch == "llama" and "k_proj" in name:
            array = llama_cpp_rows(array, config.num_key_value_heads)
        if arch.startswith("gemma") and "norm" in name:
            array = array + 1
        used = kind if array.ndim == 2 else GGMLQuantizationType.F32
        writer.add_tensor(gguf_name(name, names), gguf.quantize(array, used), raw_dtype=used)
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def assert_tensors_are(path: Path, found: dict[str, torch.Tensor], model: Model) -> None:
    """The tensors found in a file are the model's, and what transformers reads from it."""
    theirs = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    assert set(found) == set(theirs)
    for name, tensor in found.items():
        assert torch.equal(tensor, model.state_dict()[name]), name
        assert torch.equal(tensor, torch.as_tensor(theirs[name])), name
