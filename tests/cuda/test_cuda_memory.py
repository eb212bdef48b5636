"""Memory on a GPU: what is predicted from a config.json is what is then used, and on a card that is
full steps run in parts and only what does not fit fails."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from small_llama import answers, engine_on

from pagedkv.sampling_params import SamplingParams

QWEN3: dict[str, object] = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}
LLAMA: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 32768,
}
GREEDY = SamplingParams(temperature=0, max_tokens=24)


# In a process of its own, since what other tests have left on the card counts too.
PROGRAM = """
import json, sys
import torch
from pagedkv.config import EngineConfig
from pagedkv.engine import Engine
from pagedkv.engine.loading import load
from pagedkv.engine.memory_plan import predict
from pagedkv.sampling_params import SamplingParams

folder, shape, options = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
config = EngineConfig.from_options(
    folder, load_format="dummy", device="cuda:0", max_model_len=16384, **options
)
total = torch.cuda.mem_get_info(0)[1]
before = total - torch.cuda.mem_get_info(0)[0]
plan = predict(config, shape, torch.bfloat16, gpu_bytes=total)
loaded = load(config)
weights = torch.cuda.memory_allocated(0)
engine = Engine(loaded, config)
params = SamplingParams(temperature=0.8, top_k=20, top_p=0.9, max_tokens=8, ignore_eos=True)
for i in range(256):  # as many tokens as a step may have, then steps of all 256
    engine.add_request(str(i), [i % 97] * 32, params)
while engine.has_work:
    assert all(one.error is None for one in engine.step().finished)
used = total - torch.cuda.mem_get_info(0)[0]
print(json.dumps({
    "weights": weights / plan.weights_bytes, "blocks": engine.statistics().num_blocks,
    "predicted_blocks": plan.num_blocks, "used": used / plan.used_bytes,
    "used_mib": used >> 20, "plan": str(plan), "before_mib": before >> 20,
}))
"""


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        (QWEN3, {"num_gpu_blocks_override": 10_000, "max_num_batched_tokens": 8192}),
        (LLAMA, {"gpu_memory_utilization": 0.5, "kv_cache_dtype": "fp8", "enforce_eager": True}),
    ],
    ids=["graphs", "eager"],
)
def test_what_is_predicted_is_used(
    tmp_path: Path, shape: dict[str, object], options: dict[str, Any]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**shape, "torch_dtype": "bfloat16"}))
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), json.dumps(shape), json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    print(found)
    assert found["before_mib"] < 1024, "others hold memory of the card: this test wants it alone"
    assert abs(found["weights"] - 1) < 0.001
    assert abs(found["blocks"] / found["predicted_blocks"] - 1) < 0.01
    assert abs(found["used"] - 1) < 0.01


@pytest.fixture
def _nothing_left() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def fill(device: torch.device, leave: int) -> list[torch.Tensor]:
    """Take the card's memory but for leave bytes; with 0, also all large pieces that torch holds
    free.
    """
    torch.cuda.empty_cache()
    held, size = [], 2**34
    while size > 2**20:
        fits = torch.cuda.mem_get_info(device)[0] - leave >= size or leave == 0
        try:
            if fits:
                held.append(torch.empty(size, dtype=torch.uint8, device=device))
        except torch.OutOfMemoryError:
            fits = False
        if not fits:
            size = size // 2 + (512 if size == 2**21 else 0)
    return held


@pytest.mark.usefixtures("_nothing_left")
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_on_a_full_card_a_step_runs_in_parts(device, caplog, enforce_eager: bool) -> None:
    """The largest part of what a step of 8,192 tokens takes is 8,192 x 3 x 384 numbers."""
    options: dict[str, Any] = {
        "num_gpu_blocks_override": 1000,
        "max_num_batched_tokens": 8192,
        "enforce_eager": enforce_eager,
    }
    prompts = [[(7 * i + j) % 1500 for j in range(400)] for i in range(20)]
    right = answers(engine_on(device, "float32", **options), prompts, GREEDY)
    engine = engine_on(device, "float32", **options)
    answers(engine, [[1, 2]], GREEDY)  # libraries set themselves up
    # The whole step takes more than 57 MiB at once. Of what is left torch takes pieces of 20 MiB
    # for tensors of 1 to 10, and of 2 for smaller ones.
    held = fill(device, 44 * 2**20)
    engine.reset_prefix_cache()
    with caplog.at_level("WARNING"):
        got = answers(engine, prompts, GREEDY)
    assert "do not fit: CUDA out of memory" in caplog.text
    assert got == right
    del held


@pytest.mark.usefixtures("_nothing_left")
def test_on_a_full_card_only_what_does_not_fit_fails_and_the_engine_lives_on(device) -> None:
    options = {"num_gpu_blocks_override": 1000, "max_num_batched_tokens": 8192}
    engine = engine_on(device, "float32", **options)
    long = [(3 * j) % 1500 for j in range(500)]
    short = [[5, 6, i] for i in range(6)]
    right = answers(engine, [*short, long], GREEDY)
    engine.reset_prefix_cache()
    held = fill(device, 0)
    outputs = {}
    for i, prompt in enumerate([*short, long]):
        engine.add_request(str(i), prompt, GREEDY)
    while engine.has_work:
        outputs |= {one.request_id: one for one in engine.step().finished}
        engine.check_invariants()
    for i in range(len(short)):
        assert outputs[str(i)].error is None, outputs[str(i)].error
        assert outputs[str(i)].outputs[0].token_ids == right[i][0]
    assert "memory does not suffice" in str(outputs["6"].error)
    del held
    torch.cuda.empty_cache()
    assert answers(engine, [*short, long], GREEDY) == right
