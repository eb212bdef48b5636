"""Engines on a tiny model of each architecture: greedy answers are those of transformers through
chunks, prefix hits and preemption, in half precision but for near ties.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run

from pagedkv.config import EngineConfig
from pagedkv.engine import Engine
from pagedkv.engine.loading import LoadedModel
from pagedkv.kv_cache import CacheShape
from pagedkv.models import load_model
from pagedkv.sampling_params import SamplingParams

sys.path.insert(0, str(Path(__file__).parent.parent / "models"))
from tiny_families import IN_ENGINES, tiny_family

GREEDY = SamplingParams(temperature=0, max_tokens=40)
BEGINNING = [(7 * i + i * i) % 97 for i in range(26)]
PROMPTS = [
    [*BEGINNING, 8, 9],
    [*BEGINNING, 1, 2, 3],
    [11 * i % 97 for i in range(13)],
    *([5], [7], [2, 2], [3, 1, 4], [90]),
]
PRESSURES: dict[str, dict[str, Any]] = {
    "one batch": {},
    "chunks of 6": {"max_num_seqs": 6, "max_num_batched_tokens": 6},
    "tiny pool": {"num_gpu_blocks_override": 20, "preemption_mode": "recompute"},
    "tiny pool, swap": {
        "num_gpu_blocks_override": 20,
        "preemption_mode": "swap",
        "swap_space": 1e-3,
        "enable_prefix_caching": False,
    },
}


def loaded_of(reference: Any, dtype: torch.dtype) -> LoadedModel:
    model = load_model(
        reference.config.to_dict() | {"architectures": [type(reference).__name__]},
        reference.state_dict().items(),
        dtype=dtype,
        device="cpu",
    )
    config = model.config
    return LoadedModel(
        model=model,
        tokenizer=None,
        eos_token_ids=frozenset(),
        cache_shape=CacheShape(config.num_layers, config.num_kv_heads, config.head_dim, dtype),
        vocab_size=config.vocab_size,
        sampled_vocab_size=config.vocab_size,
        max_model_len=128,
        window=config.window,
    )


@functools.lru_cache(maxsize=64)  # right answers are the same ids under every pressure
def logits_of(reference: Any, ids: tuple[int, ...]) -> torch.Tensor:
    """fp32 [len(ids), vocab_size]."""
    with torch.inference_mode():
        logits: torch.Tensor = reference(torch.tensor([ids])).logits[0]
    return logits.float()


@pytest.fixture(scope="module", params=IN_ENGINES)
def loaded_and_reference(request: pytest.FixtureRequest) -> Iterator[tuple[LoadedModel, Any]]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    reference = tiny_family(request.param)
    loaded = loaded_of(reference, torch.float32)
    yield loaded, reference
    torch.set_num_threads(num_threads)


@pytest.mark.parametrize("name", PRESSURES)
def test_greedy_answers_equal_those_of_transformers(
    loaded_and_reference: tuple[LoadedModel, Any], name: str
) -> None:
    loaded, reference = loaded_and_reference
    options = {"block_size": 4, "watermark": 0.0, "max_model_len": 128, **PRESSURES[name]}
    if loaded.window and name.startswith("tiny"):
        options["num_gpu_blocks_override"] = 9  # blocks behind the window come back
    engine = Engine(loaded, EngineConfig.from_options("tiny", dtype="float32", **options))
    for round_number in range(2):  # the second round finds what the first has published
        for number, prompt in enumerate(PROMPTS):
            engine.add_request(str(number), prompt, GREEDY)
        outputs, _ = run(engine)
        for number, prompt in enumerate(PROMPTS):
            found = outputs[str(number)].outputs[0].token_ids
            logits = logits_of(reference, (*prompt, *found))
            assert found == logits[len(prompt) - 1 : -1].argmax(-1).tolist(), prompt
        preempted = sum(output.num_preemptions for output in outputs.values())
        assert (preempted > 0) == name.startswith("tiny")
        if name == "one batch" and round_number:
            assert outputs["0"].num_cached_tokens == 24


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_takes_another_token_only_at_a_near_tie(
    loaded_and_reference: tuple[LoadedModel, Any], dtype: torch.dtype
) -> None:
    loaded, reference = loaded_of(loaded_and_reference[1], dtype), loaded_and_reference[1]
    rounded = copy.deepcopy(reference)
    for parameter in rounded.parameters():
        parameter.data = parameter.data.to(dtype)
    options = {**PRESSURES["tiny pool"], **PRESSURES["chunks of 6"], "max_model_len": 128}
    if loaded.window:
        options["num_gpu_blocks_override"] = 9
    config = EngineConfig.from_options("tiny", block_size=4, watermark=0.0, **options)
    engine = Engine(loaded, config)
    prompts, num_preemptions = [*PROMPTS[:2], *PROMPTS[3:6]], 0
    for _ in range(2):  # the second round finds what the first has published
        for number, prompt in enumerate(prompts):
            engine.add_request(str(number), prompt, GREEDY)
        outputs, _ = run(engine)
        num_preemptions += sum(output.num_preemptions for output in outputs.values())
        for number, prompt in enumerate(prompts):
            found = outputs[str(number)].outputs[0].token_ids
            exact = logits_of(reference, (*prompt, *found))
            # What rounding does to the logits, as transformers rounds.
            noise = (logits_of(rounded, (*prompt, *found)) - exact).abs().max()
            rows = exact[len(prompt) - 1 : -1]
            behind = rows.amax(1) - rows.gather(1, torch.tensor(found)[:, None])[:, 0]
            assert behind.max() < 4 * noise
            assert (behind == 0).sum() > len(found) / 2
    assert num_preemptions
