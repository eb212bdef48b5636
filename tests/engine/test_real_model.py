"""The engine on SmolLM2: fp32 answers equal the solo ones under every pressure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from harness import run

from pagedkv.config import EngineConfig
from pagedkv.engine import Engine
from pagedkv.engine.loading import LoadedModel, load
from pagedkv.engine.rate_meter import RateMeter
from pagedkv.sampling_params import SamplingParams
from pagedkv.scheduler import Rates

pytestmark = pytest.mark.model

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea, there lived",
    "def fibonacci(n):\n",
    "List three primary colours:",
    "Once upon a time, in a village by the sea, a storm",
]
GREEDY = SamplingParams(temperature=0, max_tokens=20)
PRESSURES: dict[str, dict[str, Any]] = {
    "one batch": {},
    "chunks of 3": {"max_num_seqs": 3, "max_num_batched_tokens": 3},
    "tiny pool": {"num_gpu_blocks_override": 12, "block_size": 4, "watermark": 0.0},
    "tiny pool, no prefix cache": {
        "num_gpu_blocks_override": 12,
        "block_size": 4,
        "watermark": 0.0,
        "enable_prefix_caching": False,
    },
}


class CheapMoves(RateMeter):
    """Rates that do not depend on how busy this machine is."""

    @property
    def rates(self) -> Rates:
        return Rates(link_bytes_per_s=1e12, prefill_tokens_per_s=1.0)


def config_of(**options: Any) -> EngineConfig:
    return EngineConfig.from_options("smollm2", dtype="float32", max_model_len=256, **options)


@pytest.fixture(scope="module")
def loaded() -> Iterator[LoadedModel]:
    # Test processes run side by side: threads that wait for each other across them are slow.
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield load(config_of())
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def solo(loaded: LoadedModel) -> list[list[int]]:
    answers = []
    for prompt in PROMPTS:
        engine = Engine(loaded, config_of(enable_prefix_caching=False, num_gpu_blocks_override=50))
        engine.add_request("only", prompt, GREEDY)
        answers.append(run(engine)[0]["only"].outputs[0].token_ids)
    return answers


@pytest.mark.parametrize("name", PRESSURES)
def test_greedy_answers_equal_the_solo_ones(
    loaded: LoadedModel, solo: list[list[int]], name: str
) -> None:
    engine = Engine(loaded, config_of(**PRESSURES[name]))
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(str(i), prompt, GREEDY)
    outputs, _ = run(engine)
    for i, right in enumerate(solo):
        assert outputs[str(i)].outputs[0].token_ids == right, PROMPTS[i]
    preempted = sum(output.num_preemptions for output in outputs.values())
    assert (preempted > 0) == name.startswith("tiny")


def test_a_known_answer_and_a_warm_prompt_give_the_same_text(
    loaded: LoadedModel, solo: list[list[int]]
) -> None:
    engine = Engine(loaded, config_of(block_size=2))
    texts = []
    for name in ("cold", "warm"):
        engine.add_request(name, PROMPTS[0], GREEDY, stream=True)
        outputs, deltas = run(engine)
        texts.append(outputs[name].outputs[0].text)
        assert "".join(delta.text for delta in deltas) == texts[-1]
        assert outputs[name].outputs[0].token_ids == solo[0]
    assert outputs["warm"].num_cached_tokens == 4
    assert texts[0] == texts[1]
    assert "Paris" in texts[0]


def test_a_question_in_the_chat_template_ends_by_itself(loaded: LoadedModel) -> None:
    engine = Engine(loaded, config_of())
    assert engine.tokenizer is not None
    prompt = engine.tokenizer.encode_chat([{"role": "user", "content": "Say hello."}])
    engine.add_request("chat", prompt, SamplingParams(temperature=0, max_tokens=60))
    output = run(engine)[0]["chat"].outputs[0]
    assert output.finish_reason == "stop"
    assert "<|" not in output.text
    assert output.text.strip()


def test_prefixes_that_come_back_from_the_cpu_change_no_answer(
    loaded: LoadedModel, solo: list[list[int]]
) -> None:
    pool = {"num_gpu_blocks_override": 12, "block_size": 4, "watermark": 0.0}
    engine = Engine(loaded, config_of(**pool, swap_space=0.01, enable_kv_offloading=True))
    engine._runner.meter = CheapMoves()
    for number in range(2):
        for i, prompt in enumerate(PROMPTS):
            name = f"{number}-{i}"
            engine.add_request(name, prompt, GREEDY)
            outputs, _ = run(engine)
            assert outputs[name].outputs[0].token_ids == solo[i], prompt
    assert engine.statistics().prefix_cache_cpu_hits > 0
