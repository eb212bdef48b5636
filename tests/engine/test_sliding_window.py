"""The engine on a tiny Mistral whose window is shorter than what it reads and writes: answers are
those of transformers, and of the same engine when nothing behind the window is freed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from harness import run
from transformers import MistralConfig, MistralForCausalLM

from pagedkv.config import EngineConfig
from pagedkv.engine import Engine
from pagedkv.engine.loading import LoadedModel
from pagedkv.kv_cache import CacheShape
from pagedkv.models import load_model
from pagedkv.records import RequestOutput
from pagedkv.sampling_params import SamplingParams

VOCAB, WINDOW, BLOCK_SIZE = 97, 8, 4  # the window is two blocks
GREEDY = SamplingParams(temperature=0, max_tokens=64)
PROMPTS = {
    "short": [5],
    "brief": [9, 9],
    "small": [3, 1, 4],
    "long": [(7 * i + i * i) % VOCAB for i in range(30)],
    "like long": [(7 * i + i * i) % VOCAB for i in range(26)] + [1, 2, 3],
    "other": [(11 * i) % VOCAB for i in range(13)],
}
# Blocks that one sequence holds at once at most: 1 + ceil((7 + chunk - 1) / 4), chunks of 7.
MOST_OF_ONE = 5


@pytest.fixture(scope="module")
def reference() -> MistralForCausalLM:
    torch.manual_seed(1)
    config = MistralConfig(
        vocab_size=VOCAB,
        hidden_size=40,
        intermediate_size=56,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        sliding_window=WINDOW,
        initializer_range=0.2,
        use_cache=False,
    )
    return MistralForCausalLM(config).eval()


@pytest.fixture(scope="module")
def loaded(reference: MistralForCausalLM) -> Iterator[LoadedModel]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model = load_model(
        reference.config.to_dict(),
        reference.state_dict().items(),
        dtype=torch.float32,
        device="cpu",
    )
    config = model.config
    yield LoadedModel(
        model=model,
        tokenizer=None,
        eos_token_ids=frozenset(),
        cache_shape=CacheShape(
            config.num_layers, config.num_kv_heads, config.head_dim, torch.float32
        ),
        vocab_size=VOCAB,
        sampled_vocab_size=VOCAB,
        max_model_len=128,
        window=config.window,
    )
    torch.set_num_threads(num_threads)


def engine_of(loaded: LoadedModel, **options: Any) -> Engine:
    settings = {"block_size": BLOCK_SIZE, "watermark": 0.0, "max_model_len": 128, **options}
    return Engine(loaded, EngineConfig.from_options("tiny", dtype="float32", **settings))


def peak_and_outputs(engine: Engine) -> tuple[int, dict[str, RequestOutput]]:
    """Run to the end; the most blocks held after any step."""
    peak, outputs = 0, {}
    while engine.has_work:
        outputs |= {one.request_id: one for one in engine.step().finished}
        engine.check_invariants()
        peak = max(peak, engine.statistics().num_referenced)
    statistics = engine.statistics()
    assert statistics.num_free + statistics.num_cached_idle == statistics.num_blocks
    return peak, outputs


@pytest.fixture(scope="module")
def expected(reference: MistralForCausalLM, loaded: LoadedModel) -> dict[str, list[int]]:
    """Greedy answers, each position checked with transformers in one pass."""
    keeping = replace(loaded, window=0)
    answers = {}
    for name, prompt in PROMPTS.items():
        engine = engine_of(keeping)
        engine.add_request(name, prompt, GREEDY)
        answers[name] = run(engine)[0][name].outputs[0].token_ids
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + answers[name]])).logits[0]
        assert answers[name] == logits[len(prompt) - 1 : -1].argmax(-1).tolist()
    return answers


PRESSURES: dict[str, dict[str, Any]] = {
    "room for all": {},
    "no prefix cache": {"enable_prefix_caching": False},
    "chunks of 6": {"max_num_seqs": 6, "max_num_batched_tokens": 6},
    "tiny pool, recompute": {"num_gpu_blocks_override": 8, "preemption_mode": "recompute"},
    "tiny pool, swap": {
        "num_gpu_blocks_override": 8,
        "preemption_mode": "swap",
        "swap_space": 1e-3,
    },
    "tiny pool, little swap space, no prefix cache": {
        "num_gpu_blocks_override": 8,
        "preemption_mode": "swap",
        "swap_space": 3 * BLOCK_SIZE * 480 / 2**30,
        "enable_prefix_caching": False,
    },
}


@pytest.mark.parametrize("name", PRESSURES)
def test_answers_equal_those_of_transformers(
    loaded: LoadedModel, expected: dict[str, list[int]], name: str
) -> None:
    engine = engine_of(loaded, **PRESSURES[name])
    for round_number in range(2):  # the second round finds what the first has published
        for request_id, prompt in PROMPTS.items():
            engine.add_request(request_id, prompt, GREEDY)
        outputs, _ = run(engine)
        for request_id, answer in expected.items():
            assert outputs[request_id].outputs[0].token_ids == answer, request_id
        is_tiny = name.startswith("tiny")
        assert (sum(one.num_preemptions for one in outputs.values()) > 0) == is_tiny
        if name == "room for all" and round_number:
            assert outputs["long"].num_cached_tokens == 28
            assert "5 blocks of them lie behind its window" in engine.explain("long")[0].text
    assert (engine.statistics().num_swapped_in > 0) == ("swap" in name)


def test_a_long_generation_finishes_in_a_pool_smaller_than_its_length(
    loaded: LoadedModel, expected: dict[str, list[int]]
) -> None:
    engine = engine_of(loaded, num_gpu_blocks_override=MOST_OF_ONE)
    engine.add_request("long", PROMPTS["long"], GREEDY)  # 94 tokens, and the pool holds 20
    peak, outputs = peak_and_outputs(engine)
    assert outputs["long"].outputs[0].token_ids == expected["long"]
    assert outputs["long"].num_preemptions == 0
    assert peak <= MOST_OF_ONE
    keeping = engine_of(replace(loaded, window=0))
    keeping.add_request("long", PROMPTS["long"], GREEDY)
    assert peak_and_outputs(keeping)[0] == 23  # after the last step but one


def test_without_a_limit_an_answer_may_be_longer_than_the_pool(loaded: LoadedModel) -> None:
    engine = engine_of(loaded, num_gpu_blocks_override=MOST_OF_ONE)
    engine.add_request("a", PROMPTS["short"], SamplingParams(temperature=0, max_tokens=None))
    assert len(run(engine)[0]["a"].outputs[0].token_ids) == 127
    keeping = engine_of(replace(loaded, window=0), num_gpu_blocks_override=MOST_OF_ONE)
    keeping.add_request("a", PROMPTS["short"], SamplingParams(temperature=0, max_tokens=None))
    assert len(run(keeping)[0]["a"].outputs[0].token_ids) == 20


def test_a_request_whose_window_does_not_fit_the_pool_is_refused_with_the_numbers(
    loaded: LoadedModel,
) -> None:
    engine = engine_of(loaded, num_gpu_blocks_override=2)
    with pytest.raises(ValueError, match=r"need 5 blocks of 4 tokens for a sliding window of 8"):
        engine.add_request("a", PROMPTS["long"], GREEDY)
    engine.add_request("b", PROMPTS["short"], SamplingParams(temperature=0, max_tokens=8))
    assert len(run(engine)[0]["b"].outputs[0].token_ids) == 8  # 8 tokens fit without a window


# The double free that shared blocks under sliding windows have led to elsewhere.
@pytest.mark.parametrize("prompt", ["short", "other"])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(n=4, temperature=1.0, seed=7, max_tokens=24),
        SamplingParams(n=4, beam_width=4, temperature=0, max_tokens=24),
    ],
    ids=["samples", "beams"],
)
def test_answers_that_share_blocks_free_each_once_behind_the_window(
    loaded: LoadedModel, params: SamplingParams, prompt: str
) -> None:
    """The window is 2 blocks, 6 blocks are generated, then all is freed."""
    keeping = engine_of(replace(loaded, window=0))
    keeping.add_request("a", PROMPTS[prompt], params)
    most, wanted = peak_and_outputs(keeping)
    engine = engine_of(loaded)
    engine.add_request("a", PROMPTS[prompt], params)
    peak, outputs = peak_and_outputs(engine)
    assert outputs["a"].outputs == wanted["a"].outputs
    assert peak < most
    assert peak <= 4 * 3  # a window of 8 lies in at most 3 blocks
    engine.reset_prefix_cache()
    assert engine.statistics().num_free == engine.statistics().num_blocks
    tight = engine_of(loaded, num_gpu_blocks_override=4 * MOST_OF_ONE)
    tight.add_request("a", PROMPTS[prompt], params)
    assert peak_and_outputs(tight)[1]["a"].outputs == wanted["a"].outputs


def test_a_fork_of_a_request_beyond_its_window_goes_on_alike(
    loaded: LoadedModel, expected: dict[str, list[int]]
) -> None:
    engine = engine_of(loaded)
    engine.add_request("a", PROMPTS["other"], GREEDY)
    for _ in range(20):
        engine.step()
    engine.fork("a", 2)
    _, outputs = peak_and_outputs(engine)
    for name in ("a", "a-1", "a-2"):
        assert outputs[name].outputs[0].token_ids == expected["other"]
    assert engine.statistics().num_copies > 0
