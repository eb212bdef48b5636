"""What is counted of a model from its configuration alone: the numbers in its layers' matrices, and
what one of several tensor-parallel ranks holds."""

from __future__ import annotations

import pytest
import torch
from tiny_families import FAMILIES, config_of, tiny_family

from pagedkv.engine.live_memory import LiveMemory
from pagedkv.models import ModelConfig, count_weights, shape_model
from pagedkv.models.parameters import Parameters
from pagedkv.models.registry import family_of

LLAMA: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}


@pytest.mark.parametrize("name", FAMILIES)
def test_weights_are_counted_as_transformers_has_them(name: str) -> None:
    """Every matrix but the tables and the head. What is fused counts the same."""
    expected = sum(
        parameter.numel()
        for key, parameter in tiny_family(name).named_parameters()
        if parameter.ndim == 2
        and not any(part in key for part in ("embed", "lm_head", "wte", "wpe"))
    )
    assert count_weights(ModelConfig.from_dict(config_of(name))) == expected


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_rank_holds_what_its_parts_of_the_weights_are(name: str, num_ranks: int) -> None:
    values = config_of(name)
    config = ModelConfig.from_dict(values)
    if config.num_heads % num_ranks:
        with pytest.raises(ValueError, match=f"cannot be divided among {num_ranks} ranks"):
            config.share(num_ranks)
        return
    share = config.share(num_ranks)
    assert share.num_heads * num_ranks == config.num_heads
    with torch.inference_mode(), LiveMemory("meta") as parts:
        parameters = Parameters(
            dtype=torch.bfloat16, device=torch.device("meta"), rank=0, num_ranks=num_ranks
        )
        model = family_of(values).build(config, parameters, 64)
        parameters.leave_empty()
        parameters.finish()
    with LiveMemory("meta") as whole:
        alone = shape_model(share, dtype=torch.bfloat16, max_model_len=64)
    assert parts.now == whole.now > 0
    assert model.config.num_layers == alone.config.num_layers


def test_what_cannot_be_divided_is_named() -> None:
    config = ModelConfig.from_dict(LLAMA)
    assert (config.share(16).num_kv_heads, config.share(16).num_heads) == (1, 2)
    assert config.share(1) == config
    for num_ranks, name in ((3, "num_attention_heads is 32"), (64, "num_attention_heads is 32")):
        with pytest.raises(ValueError, match=f"{name}, which cannot be divided among {num_ranks}"):
            config.share(num_ranks)
    odd = ModelConfig.from_dict({**LLAMA, "intermediate_size": 1001})
    with pytest.raises(ValueError, match="intermediate_size is 1001, which cannot be"):
        odd.share(2)
    six = ModelConfig.from_dict(
        {**LLAMA, "num_attention_heads": 24, "num_key_value_heads": 6, "head_dim": 128}
    )
    with pytest.raises(ValueError, match="num_key_value_heads is 6, which cannot be"):
        six.share(4)
