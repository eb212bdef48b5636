"""Greedy answers and log-probabilities of a tiny Llama with options that change logits: those of
transformers' generate() with the same options.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run

from pagedkv.config import EngineConfig
from pagedkv.engine import Engine
from pagedkv.engine.loading import describe
from pagedkv.models import load_model
from pagedkv.sampling_params import SamplingParams

sys.path.insert(0, str(Path(__file__).parent.parent / "models"))
from tiny_llama import tiny_llama

NUM_TOKENS = 64
PROMPTS = [[(7 * i + i * i) % 97 for i in range(26)], [5], [3, 3, 3, 8, 3, 3, 3]]
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "none": ({}, {}),
    "repetition_penalty": ({"repetition_penalty": 1.3}, {"repetition_penalty": 1.3}),
    "repetition_penalty below 1": ({"repetition_penalty": 0.9}, {"repetition_penalty": 0.9}),
    "logit_bias": (
        {"logit_bias": {5: 6.0, 9: 4.5, 33: -7.0}},
        {"sequence_bias": [[[5], 6.0], [[9], 4.5], [[33], -7.0]]},
    ),
    "min_tokens": (
        {"min_tokens": 40, "stop_token_ids": [5, 9], "logit_bias": {5: 3.0}},
        {"min_new_tokens": 40, "eos_token_id": [5, 9], "sequence_bias": [[[5], 3.0]]},
    ),
    "all": (
        {"repetition_penalty": 1.2, "logit_bias": {5: 2.0}, "min_tokens": 9, "stop_token_ids": [5]},
        {
            "repetition_penalty": 1.2,
            "sequence_bias": [[[5], 2.0]],
            "min_new_tokens": 9,
            "eos_token_id": [5],
        },
    ),
}


@pytest.fixture(scope="module")
def reference() -> Iterator[Any]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield tiny_llama(max_position_embeddings=128)
    torch.set_num_threads(num_threads)


@pytest.mark.parametrize("name", OPTIONS)
def test_greedy_answers_are_those_of_transformers(reference: Any, name: str) -> None:
    ours, theirs = OPTIONS[name]
    device = torch.device("cpu")
    model = load_model(
        reference.config.to_dict() | {"architectures": ["LlamaForCausalLM"]},
        reference.state_dict().items(),
        dtype=torch.float32,
        device=device,
    )
    config = EngineConfig.from_options("tiny", dtype="float32", block_size=4, device="cpu")
    engine = Engine(describe(model, torch.float32, device), config)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, logprobs=3, **ours)
    for number, prompt in enumerate(PROMPTS):
        engine.add_request(str(number), prompt, params)
    outputs, _ = run(engine)
    for number, prompt in enumerate(PROMPTS):
        found = outputs[str(number)].outputs[0]
        with torch.inference_mode():
            ids = reference.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                do_sample=False,
                max_new_tokens=NUM_TOKENS,
                pad_token_id=0,
                **{"eos_token_id": None, **theirs},
            )[0].tolist()
            logits = reference(torch.tensor([ids])).logits[0, len(prompt) - 1 : -1]
        assert found.token_ids == ids[len(prompt) :]
        assert found.logprobs is not None
        best = torch.log_softmax(logits.double(), dim=1).topk(3, dim=1)
        for told, token, right_ids, right in zip(
            found.logprobs, found.token_ids, best.indices.tolist(), best.values, strict=True
        ):
            assert set(told) == {token, *right_ids}
            values = torch.tensor([told[one].logprob for one in right_ids], dtype=torch.float64)
            torch.testing.assert_close(values, right, atol=2e-4, rtol=0)
