"""The prediction of an engine's memory from a config.json: what is counted, and of a real model.
On a GPU it is compared with what is then used (tests/cuda/test_cuda_memory.py).
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from typing import Any

import pytest
import torch

from pagedkv.config import EngineConfig
from pagedkv.engine import memory_plan
from pagedkv.engine.largest_step import run_largest_step
from pagedkv.engine.live_memory import LiveMemory
from pagedkv.engine.loaded_model import describe
from pagedkv.engine.memory_plan import log_prediction, predict
from pagedkv.engine.step_graphs import sizes_for, token_sizes_for
from pagedkv.models import ModelConfig, linear, random_model
from pagedkv.records import MemoryPlan

CONFIG: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
H200 = 139 * 2**30


def plan(
    config: dict[str, object] = CONFIG, dtype: torch.dtype = torch.bfloat16, **options: Any
) -> MemoryPlan:
    made = EngineConfig.from_options("m", **{"max_num_seqs": 16, **options})
    return predict(made, config, dtype, gpu_bytes=H200)


def test_live_memory_counts_what_is_alive_at_once() -> None:
    with torch.inference_mode(), LiveMemory("meta") as memory:
        x = torch.empty(1024, device="meta")
        y = (x + 1) * 2
        assert (memory.now, memory.peak) == (8192, 12288)
        view = y.view(32, 32)
        y.add_(1)
        assert memory.now == 8192
        del y
        assert memory.now == 8192  # the view holds it
        del view
        assert memory.now == 4096
        torch.empty(1, device="meta")
        assert memory.peak == 12288
        small = torch.empty(1, device="meta")
        assert memory.now == 4096 + 512  # pieces of 512 bytes
        on_cpu = torch.empty(1 << 20)
        assert memory.now == 4096 + 512
    assert (x.numel(), small.numel(), on_cpu.numel()) == (1024, 1, 1 << 20)


def test_weights_are_those_of_a_real_model() -> None:
    with LiveMemory("cpu") as memory:
        model = random_model(CONFIG, dtype=torch.bfloat16, device="cpu")
    del model
    numbers = 2 * 1000 * 256 + 256  # embedding, head, last norm
    numbers += 3 * (2 * 256 + 256 * (256 + 2 * 64) + 256 * 256 + 3 * 256 * 1024)
    table = 512 * 32 * 4
    assert plan().weights_bytes == 2 * numbers + table
    assert memory.peak >= plan().weights_bytes
    tied = {**CONFIG, "tie_word_embeddings": True}
    assert plan().weights_bytes - plan(tied).weights_bytes == 2 * 1000 * 256
    longer = plan(max_model_len=256)
    assert plan().weights_bytes - longer.weights_bytes == 256 * 32 * 4


def test_a_step_takes_what_its_widest_point_holds() -> None:
    """The feed-forward: the sum, gate and up, and their product, where norms are folded; in fp16
    the normed sum and what the layer was given, too; and the step's arrays (ids, positions, slots;
    lengths, starts, tables).
    """
    cases = [(4096, torch.bfloat16, 1), (8192, torch.bfloat16, 1), (8192, torch.float16, 3)]
    for num_tokens, dtype, sums in cases:
        step = plan(dtype=dtype, max_num_batched_tokens=num_tokens).step_bytes
        widest = 2 * num_tokens * (sums * 256 + 3 * 1024)
        arrays = 3 * 8 * num_tokens
        assert widest + arrays < step < 1.01 * (widest + arrays)
    wide = {**CONFIG, "vocab_size": 20_000}
    many = plan(wide, max_num_seqs=2048).step_bytes
    assert many > plan(wide).step_bytes  # logits take more than the feed-forward
    assert 2048 * 20_000 * 2 < many < 1.2 * 2048 * 20_000 * 2  # and are chosen from as they are


def test_the_pool_is_what_is_left_or_what_an_option_says() -> None:
    block = 16 * 2 * 3 * 2 * 32 * 2
    assert plan(num_gpu_blocks_override=77).pool_bytes == 77 * block
    assert plan(kv_cache_memory_bytes=10 * block + 1).num_blocks == 10
    assert plan(num_gpu_blocks_override=77, kv_cache_dtype="fp8").pool_bytes == 77 * block // 2
    half, most = plan(gpu_memory_utilization=0.5), plan(gpu_memory_utilization=0.9)
    assert abs(most.pool_bytes - half.pool_bytes - 0.4 * H200) < 2 * block
    assert half.used_bytes < 0.5 * H200 < half.used_bytes + 2**30
    swapped = plan(swap_space=1.0)
    assert (swapped.cpu_pool_bytes, plan().cpu_pool_bytes) == (2**30 // block * block, 0)
    with pytest.raises(ValueError, match=r"gpu_memory_utilization is 0.004, which leaves 0 bytes"):
        plan(gpu_memory_utilization=0.004)


def test_a_cpu_has_no_graphs_and_a_pool_by_options_alone() -> None:
    config = EngineConfig.from_options("m", max_num_seqs=16)
    read = ModelConfig.from_dict(CONFIG)
    one = predict(config, read, torch.bfloat16, gpu_bytes=None)
    assert (one.graphs_bytes, one.libraries_bytes) == (0, 0)
    assert one.num_blocks == 16 * 512 // 16
    assert one.weights_bytes == plan().weights_bytes
    # Norms are folded on a GPU alone: here what a layer is given stays beside its normed sum.
    assert one.step_bytes > plan().step_bytes


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_predicted_of_a_cpu_is_what_is_used(
    dtype: torch.dtype, is_tied: bool, packs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed weights, which torch does not count, are plain copies here."""
    monkeypatch.setattr(linear, "can_pack", lambda dtype, device: packs and device.type == "cpu")
    monkeypatch.setattr(
        linear, "packed_product", lambda weight, bias: linear.plain_product(weight.clone(), bias)
    )
    described = {**CONFIG, "tie_word_embeddings": is_tied}
    config = EngineConfig.from_options("m", max_num_seqs=16, max_num_batched_tokens=256)
    predicted = predict(config, described, dtype, gpu_bytes=None)
    with LiveMemory("cpu") as memory:
        model = random_model(described, dtype=dtype, device="cpu")
    assert predicted.weights_bytes == memory.now
    # A head that shares the embedding's table, which stays as it is, has a packed copy.
    table = 1000 * 256 * dtype.itemsize
    apart = predict(config, CONFIG, dtype, gpu_bytes=None).weights_bytes
    assert apart - predicted.weights_bytes == (table if is_tied and not packs else 0)
    loaded = describe(model, dtype, torch.device("cpu"), max_model_len=None)
    with LiveMemory("cpu") as memory:
        run_largest_step(loaded, config)
    assert predicted.step_bytes == memory.peak


@pytest.mark.skipif(
    not linear.can_pack(torch.float32, torch.device("cpu")), reason="torch has no oneDNN here"
)
def test_a_packed_weight_is_as_large_as_it_was() -> None:
    packed = torch.ops.mkldnn._reorder_linear_weight(torch.zeros(1024, 256))
    assert torch.ops.mkldnn._nbytes(packed) == 1024 * 256 * 4
    x = torch.ones(2, 256, device="meta")
    with LiveMemory("meta") as memory:
        product = linear.packed_product(torch.empty(1024, 256, device="meta"), None)
    assert memory.now == 1024 * 256 * 4
    assert product(x).shape == (2, 1024)


def test_a_prediction_imports_no_compiler() -> None:
    """torch's would come with a dispatch mode, and cost each start seconds."""
    program = (
        "import json, sys, torch\n"
        "from pagedkv.config import EngineConfig\n"
        "from pagedkv.engine.memory_plan import predict\n"
        "config = EngineConfig.from_options('m', max_num_seqs=16)\n"
        "predict(config, json.loads(sys.argv[1]), torch.bfloat16, gpu_bytes=2**37)\n"
        "print('torch._dynamo' in sys.modules)\n"
    )
    command = [sys.executable, "-c", program, json.dumps(CONFIG)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "False\n"


def test_graphs_are_counted_unless_there_are_none() -> None:
    assert plan(enforce_eager=True).graphs_bytes == 0
    few, many = plan(max_num_seqs=16), plan(max_num_seqs=256)
    assert 0 < few.graphs_bytes < many.graphs_bytes
    assert sizes_for(16) == [1, 2, 4, 8, 16]
    assert sizes_for(1) == [1]
    assert token_sizes_for(100) == [16, 32, 64, 96, 100]
    assert token_sizes_for(16) == [16]
    assert token_sizes_for(0) == []
    without = plan(max_cudagraph_capture_size=0)
    assert without.graphs_bytes < plan().graphs_bytes
    # A step with a prompt has a row of padding beside it, for which there is none here.
    alone = plan(max_num_seqs=1, max_cudagraph_capture_size=0)
    assert plan(max_num_seqs=1).graphs_bytes == alone.graphs_bytes
    # Without an option for the pool, what graphs may take is left free.
    assert plan(enforce_eager=True).num_blocks > plan().num_blocks


def test_the_documented_example_is_what_is_predicted() -> None:
    llama = {
        **CONFIG,
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
    }
    config = EngineConfig.from_options("m", max_num_batched_tokens=8192, max_model_len=32768)
    made = predict(config, llama, torch.bfloat16, gpu_bytes=int(139.8 * 2**30))
    words = "{:.2f} GiB of weights, {:.2f} GiB for a step of 8,192 tokens, and a pool of {:.2f} GiB"
    parts = (made.weights_bytes, made.step_bytes, made.pool_bytes)
    told = words.format(*(part / 2**30 for part in parts))
    assert told in " ".join((predict.__doc__ or "").split())


def test_the_parts_make_the_whole() -> None:
    one = plan(num_gpu_blocks_override=100)
    parts = (one.weights_bytes, one.step_bytes, one.graphs_bytes, one.libraries_bytes)
    assert one.used_bytes == sum(parts) + one.pool_bytes


class Gpu:
    type = "cuda"

    def __str__(self) -> str:
        return "cuda:0"


@pytest.mark.parametrize(
    ("options", "free", "words"),
    [
        ({"num_gpu_blocks_override": 100}, 100 * 2**30, "predicted for cuda:0: weights 0.01 GiB"),
        ({"num_gpu_blocks_override": 10**7}, 100 * 2**30, "will not fit on cuda:0, which has 139"),
        ({"gpu_memory_utilization": 0.2}, 90 * 2**30, "will not fit on cuda:0: gpu_memory_util"),
    ],
)
def test_the_prediction_is_logged_before_loading(
    options: dict[str, Any],
    free: int,
    words: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, H200))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    config = EngineConfig.from_options("m", max_num_seqs=16, **options)
    device: Any = Gpu()
    with caplog.at_level(logging.INFO, logger=memory_plan.__name__):
        log_prediction(config, CONFIG, torch.bfloat16, device)
    assert words in caplog.text
    assert any(one.levelno == logging.WARNING for one in caplog.records) == ("not fit" in words)


def test_nothing_is_predicted_for_a_cpu(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        log_prediction(EngineConfig(model="m"), CONFIG, torch.float32, torch.device("cpu"))
    assert not caplog.records


def test_a_model_on_the_meta_device_is_described_like_any_other() -> None:
    model = memory_plan.shape_model(CONFIG, dtype=torch.bfloat16, max_model_len=100)
    loaded = describe(model, torch.bfloat16, torch.device("meta"), max_model_len=100)
    assert loaded.max_model_len == 100
    assert loaded.cache_shape.bytes_per_token == 2 * 3 * 2 * 32 * 2
