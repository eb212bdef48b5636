"""The real small model against transformers, on the same GGUF file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from paged_run import PagedRun, cosine, greedy
from smollm2_questions import QUESTIONS
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from pagedkv.models import CausalLM, load_model
from pagedkv.text import Tokenizer, load_tokenizer
from pagedkv.weights import Checkpoint, fetch, open_checkpoint

pytestmark = pytest.mark.model

NUM_TOKENS = 64


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return open_checkpoint("smollm2")


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    return load_tokenizer(checkpoint.tokenizer_source)


@pytest.fixture(scope="module")
def model(checkpoint: Checkpoint) -> CausalLM:
    return load_model(checkpoint.config, checkpoint.tensors(), dtype=torch.float32, device="cpu")


@pytest.fixture(scope="module")
def theirs() -> tuple[dict[str, object], dict[str, torch.Tensor]]:
    """Configuration and tensors as transformers reads them from the file, on its own."""
    path = Path(fetch("smollm2"))
    config = load_gguf_checkpoint(str(path))["config"]
    empty = LlamaForCausalLM(LlamaConfig(**config))
    loaded = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=empty)
    return loaded["config"], loaded["tensors"]


def test_every_tensor_equals_the_one_that_transformers_reads(
    checkpoint: Checkpoint, theirs: tuple[dict[str, object], dict[str, torch.Tensor]]
) -> None:
    _, tensors = theirs
    ours = dict(checkpoint.tensors())
    assert set(ours) == set(checkpoint.tensor_names)
    assert set(ours) == set(tensors) - {"lm_head.weight"}
    for name, tensor in ours.items():
        assert torch.equal(tensor, torch.as_tensor(tensors[name])), name


def test_greedy_text_and_logits_equal_those_of_transformers(
    model: CausalLM,
    tokenizer: Tokenizer,
    theirs: tuple[dict[str, object], dict[str, torch.Tensor]],
) -> None:
    """Ten prompts of different lengths, decoded side by side in one batch. transformers reads each
    answer in one pass: that its best token is ours at every place is greedy equality."""
    config, tensors = theirs
    reference = LlamaForCausalLM(LlamaConfig(**config)).eval()
    state = {name: torch.as_tensor(tensor) for name, tensor in tensors.items()}
    missing, unexpected = reference.load_state_dict(state, strict=False)
    assert (missing, unexpected) in (([], []), (["lm_head.weight"], []))
    reference.tie_weights()

    prompts = [
        tokenizer.encode_chat([{"role": "user", "content": question}]) for question in QUESTIONS
    ]
    max_len = max(map(len, prompts)) + NUM_TOKENS
    run = PagedRun(model, num_seqs=len(prompts), max_len=max_len, block_size=16)
    answers = greedy(run, prompts, NUM_TOKENS)
    assert "Paris" in tokenizer.decode(answers[0])
    again = PagedRun(model, num_seqs=1, max_len=max_len, block_size=16, seed=1)
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = prompt + answer
        with torch.inference_mode():
            expected = reference(torch.tensor([ids])).logits[0]
        assert answer == expected[len(prompt) - 1 : -1].argmax(-1).tolist()
        again.lens[0] = 0
        cut = len(ids) // 3
        logits = again.logits(0, ids, [cut, 1, len(ids) - cut - 1])
        assert cosine(logits, expected) > 0.9999
