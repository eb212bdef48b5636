"""A plan on the card that it is about: the blocks and the memory that it plans from a
config.json alone are what the engine then takes, within 1 %."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedkv.config import EngineConfig
from pagedkv.engine.memory_plan import predict
from pagedkv.models import ModelConfig
from pagedkv.plan import GPUS, find_gpu, make_plan
from pagedkv.records import MemoryPlan
from pagedkv.weights import read_config

SHAPE: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 16384,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}

# In a process of its own, since what other tests have left on the card counts too.
ENGINE = """
import json, sys
import torch
from pagedkv.config import EngineConfig
from pagedkv.engine import Engine
from pagedkv.sampling_params import SamplingParams

config = EngineConfig.from_options(
    sys.argv[1], load_format="dummy", device="cuda:0", **json.loads(sys.argv[2])
)
free, total = torch.cuda.mem_get_info(0)
before = total - free
engine = Engine.from_config(config)
params = SamplingParams(temperature=0.8, top_k=20, top_p=0.9, max_tokens=4, ignore_eos=True)
for i in range(256):  # steps of the largest size, then steps of all 256
    engine.add_request(str(i), [i % 97] * 32, params)
while engine.has_work:
    assert all(one.error is None for one in engine.step().finished)
free, total = torch.cuda.mem_get_info(0)
print(json.dumps({
    "num_blocks": engine.statistics().num_blocks, "used_bytes": total - free, "before": before,
    "total_bytes": total, "name": torch.cuda.get_device_name(0),
}))
"""


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 4096},
        {"kv_cache_dtype": "fp8", "gpu_memory_utilization": 0.5, "block_size": 32},
    ],
    ids=str,
)
def test_what_is_planned_is_taken(tmp_path: Path, options: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    # What this process holds, of other tests too, the engine's pool is smaller by.
    free, total = torch.cuda.mem_get_info(0)
    others = total - free
    command = [sys.executable, "-c", ENGINE, str(tmp_path), json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    taken = json.loads(done.stdout.splitlines()[-1])

    def predict_beside(*args: Any, others_bytes: int = 0, **kwargs: Any) -> MemoryPlan:
        return predict(*args, others_bytes=others_bytes + others, **kwargs)

    plan = make_plan(
        EngineConfig.from_options(str(tmp_path), **options),
        ModelConfig.from_dict(read_config(tmp_path)),
        torch.bfloat16,
        find_gpu(None, memory_bytes=taken["total_bytes"]),
        predict_beside,
    ).fit.memory
    print(taken, plan)
    assert taken["before"] - others < 2**30, "others take memory meanwhile: it wants the card alone"
    assert abs(taken["num_blocks"] / plan.num_blocks - 1) < 0.01
    assert abs((taken["used_bytes"] - others) / plan.used_bytes - 1) < 0.01
    known = GPUS.get(taken["name"].removeprefix("NVIDIA ").lower())
    if known is not None and known.memory_bytes is not None:
        assert abs(taken["total_bytes"] / known.memory_bytes - 1) < 0.01
