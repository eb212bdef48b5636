"""The bar and the line about loading weights."""

from __future__ import annotations

import io
import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file

from pagedkv.config import EngineConfig
from pagedkv.engine import loading
from pagedkv.engine.loading_progress import shown

TENSORS = [(str(i), torch.zeros(1000, dtype=torch.float32)) for i in range(5)]


def test_tensors_pass_and_the_log_has_their_bytes(caplog: pytest.LogCaptureFixture) -> None:
    times = iter([10.0, 11.0, 11.0, 11.0, 11.0, 12.0, 12.0])
    console = Console(file=io.StringIO(), force_terminal=False)
    with caplog.at_level(logging.INFO):
        passed = list(shown(iter(TENSORS), 5, console=console, clock=lambda: next(times)))
    assert [name for name, _ in passed] == list("01234")
    assert "5 tensors of 0.00 GB in 2.00 s: 0.00 GB/s" in caplog.text
    assert console.file.getvalue().strip() == ""  # type: ignore[attr-defined]


def test_a_terminal_shows_a_bar() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    list(shown(iter(TENSORS), 5, console=console))
    assert "Loading weights: 100%" in console.file.getvalue()  # type: ignore[attr-defined]
    assert "5/5" in console.file.getvalue()  # type: ignore[attr-defined]


def test_an_error_in_the_middle_is_passed_on() -> None:
    def failing():  # type: ignore[no-untyped-def]
        yield TENSORS[0]
        raise ValueError("cut short")

    console = Console(file=io.StringIO(), force_terminal=True)
    with pytest.raises(ValueError, match="cut short"):
        list(shown(failing(), 5, console=console))


def test_loading_predicts_memory_first_and_shows_the_weights(
    tokenizer_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = Path(shutil.copytree(tokenizer_folder, tmp_path / "model"))
    shape = {"vocab_size": 260, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1}
    shape |= {"num_attention_heads": 2, "max_position_embeddings": 32}
    config = {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True, **shape}
    (folder / "config.json").write_text(json.dumps(config))
    layer = "model.layers.0"
    sizes = {"model.embed_tokens": (260, 8), "model.norm": (8,), f"{layer}.input_layernorm": (8,)}
    sizes |= {f"{layer}.post_attention_layernorm": (8,)}
    sizes |= {f"{layer}.self_attn.{name}_proj": (8, 8) for name in "qkvo"}
    sizes |= {f"{layer}.mlp.{name}_proj": (16, 8) for name in ("gate", "up")}
    sizes |= {f"{layer}.mlp.down_proj": (8, 16)}
    tensors = {f"{name}.weight": torch.ones(size) for name, size in sizes.items()}
    save_file(tensors, folder / "model.safetensors")
    told: list[int] = []  # lines of the log when the prediction was made
    monkeypatch.setattr(
        loading, "log_prediction", lambda *rest: told.append(caplog.text.count("tensors of"))
    )
    with caplog.at_level(logging.INFO):
        loading.load(EngineConfig.from_options(str(folder), device="cpu"))
    assert told == [0]
    assert f"{len(tensors)} tensors of 0.00 GB in " in caplog.text
    told.clear()
    loading.load(EngineConfig.from_options(str(folder), device="cpu", load_format="dummy"))
    assert told == [1]
