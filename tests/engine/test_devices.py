"""The option device, models without weights, and what sizes a pool; on a machine without a GPU."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedkv import LLM, SamplingParams
from pagedkv.config import CacheConfig, EngineConfig
from pagedkv.engine import device as devices
from pagedkv.engine.loading import describe
from pagedkv.engine.pool_size import free_bytes, run_largest_step
from pagedkv.kv_cache import CacheShape, num_blocks_for
from pagedkv.models import AttentionMetadata, random_model
from pagedkv.ops import library

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def pretend(monkeypatch: pytest.MonkeyPatch, num_gpus: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)


def test_auto_takes_a_gpu_only_with_the_library(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    pretend(monkeypatch, 2)
    assert devices.resolve_device("auto") == CPU
    with pytest.raises(ValueError, match="device is 'cuda', but pagedkv's CUDA library is not bu"):
        devices.resolve_device("cuda")
    (tmp_path / "_ops_cuda.so").touch()
    assert devices.resolve_device("auto") == torch.device("cuda", 1)
    assert devices.resolve_device("cuda:0") == torch.device("cuda", 0)
    assert devices.resolve_device("cpu") == CPU
    with pytest.raises(ValueError, match=r"device is 'cuda:2', but torch .* finds 2 GPUs"):
        devices.resolve_device("cuda:2")
    pretend(monkeypatch, 0)
    assert devices.resolve_device("auto") == CPU
    for option in ("cuda", "cuda:0"):
        with pytest.raises(ValueError, match=rf"device is '{option}', but torch .* finds 0 GPUs"):
            devices.resolve_device(option)


@pytest.mark.parametrize("option", ["gpu", "cuda:", "cuda:-1", "cpu:0", "", 0])
def test_a_device_of_another_kind_is_refused(option: Any) -> None:
    with pytest.raises(ValueError, match="device must be auto, cpu, cuda or cuda:N, got"):
        EngineConfig(model="m", device=option)


def test_a_pool_takes_the_free_bytes_unless_another_option_sizes_it() -> None:
    shape = CacheShape(num_layers=2, num_kv_heads=4, head_dim=8, dtype=torch.float32)
    block = shape.bytes_per_token * 16

    def blocks(config: CacheConfig) -> int:
        return num_blocks_for(
            config, shape, max_num_seqs=4, max_model_len=100, num_free_bytes=9 * block + 5
        )

    assert blocks(CacheConfig()) == 9
    assert blocks(CacheConfig(num_gpu_blocks_override=3)) == 3
    assert blocks(CacheConfig(kv_cache_memory_bytes=2 * block)) == 2
    with pytest.raises(ValueError, match=r"gpu_memory_utilization is 0.5, which leaves 7 bytes"):
        num_blocks_for(
            CacheConfig(gpu_memory_utilization=0.5),
            shape,
            max_num_seqs=4,
            max_model_len=100,
            num_free_bytes=7,
        )


class Watched:
    """A model that remembers what it was run on."""

    def __init__(self) -> None:
        self.inner = random_model(CONFIG, dtype=torch.float32, device="cpu")
        self.steps: list[AttentionMetadata] = []
        self.num_logits = 0

    def forward(self, *step: Any) -> torch.Tensor:
        self.steps.append(step[-1])
        return self.inner.forward(*step)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.num_logits += hidden.shape[0]
        return self.inner.compute_logits(hidden)


def test_the_profiled_step_is_the_largest_and_writes_nothing() -> None:
    config = EngineConfig.from_options("m", max_num_batched_tokens=150, max_num_seqs=9)
    model = Watched()
    whole = random_model(CONFIG, dtype=torch.float32, device="cpu")
    loaded = describe(whole, torch.float32, CPU, max_model_len=60)
    run_largest_step(loaded.__class__(model, *_rest(loaded)), config)
    (step,) = model.steps
    assert step.seq_lens.tolist() == [60, 60, 30]
    assert step.slot_mapping.tolist() == [-1] * 150
    assert model.num_logits == 9
    assert free_bytes(loaded, config) is None  # a CPU's pool is not measured


def _rest(loaded: Any) -> list[Any]:
    return [getattr(loaded, name) for name in loaded.__slots__ if name != "model"]


def test_a_dummy_needs_a_config_alone_and_is_the_same_each_time(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    params = SamplingParams(temperature=0, max_tokens=5)
    with caplog.at_level(logging.INFO):
        first, second = (
            LLM(str(folder), load_format="dummy", device="cpu", num_gpu_blocks_override=6)
            for _ in range(2)
        )
    answers = [llm.generate([[1, 2, 3], [4]], params, use_tqdm=False) for llm in (first, second)]
    texts = [[one.outputs[0].token_ids for one in each] for each in answers]
    assert texts[0] == texts[1]
    assert texts[0][0] != texts[0][1]
    assert "the pool on cpu has 6 blocks: 96 tokens" in caplog.text
    assert "Maximum concurrency for 64 tokens per request: 1.50x" in caplog.text
    with pytest.raises(ValueError, match="a prompt as text needs a tokenizer"):
        first.generate("text", params)


def test_without_weights_only_a_dummy_loads(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"safetensors"):
        LLM(str(folder), device="cpu")
    with pytest.raises(ValueError, match="load_format must be one of auto, dummy, got 'random'"):
        LLM(str(folder), load_format="random")
