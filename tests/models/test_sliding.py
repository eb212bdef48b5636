"""Models with sliding windows against transformers: logits through paged blocks whose table entries
behind the window are absurd ids, and what of a config.json decides the windows.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from paged_run import PagedRun, cosine
from tiny_llama import reference_logits, saved
from tiny_mistral import tiny_mistral, tiny_qwen2

from pagedkv.models import ModelConfig, load_model
from pagedkv.weights import open_checkpoint

MISTRAL: dict[str, object] = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "vocab_size": 97,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
QWEN2 = {**MISTRAL, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN2_WINDOWS = {**QWEN2, "use_sliding_window": True, "sliding_window": 9}


def ids_of(length: int, seed: int = 1) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(97) for _ in range(length)]


def paged(reference: Any, folder: Path, **options: Any) -> PagedRun:
    checkpoint = open_checkpoint(saved(reference, folder))
    model = load_model(checkpoint.config, checkpoint.tensors(), dtype=torch.float32, device="cpu")
    return PagedRun(model, num_seqs=3, max_len=120, **options)


CASES = {
    "mistral": lambda: tiny_mistral(sliding_window=9),
    "window of one block": lambda: tiny_mistral(sliding_window=4),
    "window of one token": lambda: tiny_mistral(sliding_window=1),
    "window over all": lambda: tiny_mistral(sliding_window=500),
    "no window": lambda: tiny_mistral(sliding_window=None),
    "head_dim of its own": lambda: tiny_mistral(sliding_window=9, head_dim=16),
    "qwen2 without": lambda: tiny_qwen2(),
    "qwen2, all layers": lambda: tiny_qwen2(
        use_sliding_window=True, sliding_window=9, max_window_layers=0
    ),
    "qwen2, last layer": lambda: tiny_qwen2(
        use_sliding_window=True, sliding_window=9, max_window_layers=2
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("chunks", [[40], [1, 7, 4, 13, 15], [39, 1]], ids=str)
def test_logits_equal_those_of_transformers(name: str, chunks: list[int], tmp_path: Path) -> None:
    reference = CASES[name]()
    ids = ids_of(40)
    expected = reference_logits(reference, ids)
    logits = paged(reference, tmp_path).logits(1, ids, chunks)
    assert cosine(logits, expected) > 0.9999
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)


def windows(config: dict[str, object]) -> tuple[int, ...]:
    return ModelConfig.from_dict(config).layer_windows


def test_a_mistrals_window_is_that_of_all_layers_and_null_is_none() -> None:
    assert windows({**MISTRAL, "sliding_window": 9}) == (9, 9, 9)
    assert windows({**MISTRAL, "sliding_window": None}) == (0, 0, 0)
    assert windows(MISTRAL) == (4096, 4096, 4096)
    config = ModelConfig.from_dict({**MISTRAL, "sliding_window": 9})
    assert config.window == 9
    assert not config.attention_bias
    assert not config.output_bias


def test_a_qwen2s_windows_begin_at_max_window_layers_if_it_uses_them() -> None:
    assert windows({**QWEN2, "sliding_window": 9, "max_window_layers": 0}) == (0, 0, 0)
    assert windows({**QWEN2_WINDOWS, "max_window_layers": 1}) == (0, 9, 9)
    assert windows(QWEN2_WINDOWS) == (0, 0, 0)  # from layer 28 on
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    assert windows({**QWEN2_WINDOWS, "layer_types": kinds}) == (9, 0, 9)
    config = ModelConfig.from_dict(QWEN2)
    assert config.attention_bias
    assert not config.output_bias


def test_where_one_layer_sees_all_tokens_the_cache_keeps_all() -> None:
    assert ModelConfig.from_dict({**QWEN2_WINDOWS, "max_window_layers": 1}).window == 0
    assert ModelConfig.from_dict({**QWEN2_WINDOWS, "max_window_layers": 0}).window == 9


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**MISTRAL, "sliding_window": 0}, "sliding_window is 0, not a whole number from 1"),
        ({**MISTRAL, "sliding_window": "9"}, "sliding_window is '9', not a whole number"),
        ({**MISTRAL, "layer_types": ["full_attention"] * 3}, "layer_types is .* Ministral"),
        ({**QWEN2_WINDOWS, "max_window_layers": -1}, "max_window_layers is -1, not a whole number"),
        ({**QWEN2_WINDOWS, "layer_types": ["full_attention"]}, "not a list of 3 kinds"),
        ({**QWEN2_WINDOWS, "layer_types": ["chunked_attention"] * 3},
         "layer_types has 'chunked_attention'; supported are full_attention, sliding_attention"),
        ({**QWEN2, "use_sliding_window": 1}, "use_sliding_window is 1, neither true nor false"),
    ],
)  # fmt: skip
def test_windows_that_cannot_be_are_refused(config: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_dict(config)
