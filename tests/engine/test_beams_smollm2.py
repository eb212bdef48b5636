"""Beam search on SmolLM2 in fp32 against transformers on the same weights, token for token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import run
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from pagedkv.config import EngineConfig
from pagedkv.engine import Engine
from pagedkv.engine.loading import LoadedModel, load
from pagedkv.sampling_params import SamplingParams
from pagedkv.weights import fetch

pytestmark = pytest.mark.model

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea, there lived",
    "Q: What is 2 + 2?\nA:",
]
# beam_width, n, and the search's options
SEARCHES: list[tuple[int, int, dict[str, Any]]] = [
    (4, 4, {}),
    (3, 2, {"length_penalty": 2.0, "early_stopping": True}),
    (5, 1, {"length_penalty": 0.0, "early_stopping": "never"}),
]
MAX_TOKENS = 10


def config_of(**options: Any) -> EngineConfig:
    return EngineConfig.from_options("smollm2", dtype="float32", max_model_len=256, **options)


@pytest.fixture(scope="module")
def loaded() -> Iterator[LoadedModel]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield load(config_of())
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def theirs() -> LlamaForCausalLM:
    path = Path(fetch("smollm2"))
    config = load_gguf_checkpoint(str(path))["config"]
    model = LlamaForCausalLM(LlamaConfig(**config)).eval()
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    state = {name: torch.as_tensor(tensor) for name, tensor in tensors.items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert (missing, unexpected) in (([], []), (["lm_head.weight"], []))
    model.tie_weights()
    return model


# The full stop ends a beam too, so that beams of different lengths compete.
@pytest.mark.parametrize("stop", ["", "."])
@pytest.mark.parametrize(("width", "n", "options"), SEARCHES)
def test_beams_equal_those_of_transformers(
    loaded: LoadedModel,
    theirs: LlamaForCausalLM,
    width: int,
    n: int,
    options: dict[str, Any],
    stop: str,
) -> None:
    assert loaded.tokenizer is not None
    stop_ids = loaded.tokenizer.encode(stop) if stop else []
    engine = Engine(loaded, config_of(num_gpu_blocks_override=200))
    params = SamplingParams(
        temperature=0,
        max_tokens=MAX_TOKENS,
        beam_width=width,
        n=n,
        stop_token_ids=stop_ids,
        **options,
    )
    for prompt in PROMPTS:
        engine.add_request(prompt, prompt, params)
    outputs, _ = run(engine)
    eos = sorted({*loaded.eos_token_ids, *stop_ids})
    num_stopped = 0
    for prompt in PROMPTS:
        ids = torch.tensor([loaded.tokenizer.encode(prompt)])
        expected = theirs.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            num_beams=width,
            num_return_sequences=n,
            max_new_tokens=MAX_TOKENS,
            do_sample=False,
            eos_token_id=eos,
            pad_token_id=eos[0],
            length_penalty=options.get("length_penalty", 1.0),
            early_stopping=options.get("early_stopping", False),
        )
        got = outputs[prompt].outputs
        assert len(got) == n
        for one, row in zip(got, expected[:, ids.shape[1] :].tolist(), strict=True):
            # transformers pads the shorter ones with the first of the stop ids.
            assert one.token_ids == row[: len(one.token_ids)]
            assert all(token == eos[0] for token in row[len(one.token_ids) :])
            num_stopped += one.finish_reason == "stop"
    if stop:
        assert num_stopped > 0
