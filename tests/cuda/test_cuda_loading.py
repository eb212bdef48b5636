"""Weights streamed to a GPU: the bytes of the file, also through chunks, several tensors at once
and memory that is used again while the device still reads it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from small_llama import CONFIG, seeded_tensors

from pagedkv.models import load_model
from pagedkv.weights import open_checkpoint, streaming
from pagedkv.weights.streaming import spans_in, stream


@pytest.mark.parametrize("chunk_bytes", [4096, 2**20])
def test_tensors_on_the_gpu_are_the_files(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int
) -> None:
    monkeypatch.setattr(streaming, "_CHUNK_BYTES", chunk_bytes)
    tensors = {f"t{i}": torch.randn(300 + 40_001 * i) for i in range(20)}
    save_file(tensors, tmp_path / "model.safetensors")
    spans = spans_in(tmp_path / "model.safetensors", list(tensors))
    sums: dict[str, torch.Tensor] = {}
    scratch = torch.randn(4096, 4096, device=device)
    for name, tensor in stream(spans, device, num_threads=6, ahead_bytes=2**20):
        assert tensor.device == device
        for _ in range(4):
            scratch = scratch @ scratch * 1e-2  # the device is busy when the tensor is freed
        sums[name] = tensor.clone()
        del tensor
    for name, right in tensors.items():
        assert torch.equal(sums[name].cpu(), right), name


def test_a_model_that_was_streamed_is_that_of_the_tensors(
    device: torch.device, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file(seeded_tensors(), tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    streamed = load_model(
        checkpoint.config, checkpoint.tensors(device), dtype=torch.bfloat16, device=device
    )
    right = load_model(CONFIG, seeded_tensors().items(), dtype=torch.bfloat16, device=device)
    hidden = torch.randn(5, 256, device=device).bfloat16()
    assert torch.equal(streamed.compute_logits(hidden), right.compute_logits(hidden))
