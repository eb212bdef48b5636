"""LLM, as a user calls it, on a folder that transformers saved in shards, with a tokenizer: text,
tokens and log-probabilities of each architecture.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pagedkv import LLM, SamplingParams

sys.path.insert(0, str(Path(__file__).parent.parent / "models"))
sys.path.insert(0, str(Path(__file__).parent.parent / "text"))
from tiny_families import FAMILIES, tiny_family
from tokenizers_of_tests import byte_level
from tokenizers_of_tests import saved as save_tokenizer


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", [name for name in FAMILIES if "," not in name])
def test_a_saved_folder_answers_as_transformers(name: str, tmp_path: Path) -> None:
    backend = byte_level()
    vocab_size = backend.get_vocab_size()
    reference = tiny_family(name, vocab_size=vocab_size + 3)  # padded, as many are
    reference.save_pretrained(tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 4
    save_tokenizer(backend, tmp_path, eos_token="<|end|>")
    llm = LLM(str(tmp_path), dtype="float32", block_size=4, num_gpu_blocks_override=64)
    params = SamplingParams(
        temperature=0, max_tokens=20, ignore_eos=True, logprobs=0, prompt_logprobs=0
    )
    for output in llm.generate(["the cat sat", "日本"], params, use_tqdm=False):
        prompt, answer = output.prompt_token_ids, output.outputs[0].token_ids
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + answer])).logits[0, :, :vocab_size]
        assert answer == logits[len(prompt) - 1 : -1].argmax(-1).tolist()
        assert output.outputs[0].text == backend.decode(answer)
        told = [*(output.prompt_logprobs or [])[1:], *(output.outputs[0].logprobs or [])]
        expected = torch.log_softmax(logits.double(), -1)
        assert len(told) == len(prompt) + len(answer) - 1
        for place, (one, token) in enumerate(zip(told, [*prompt, *answer][1:], strict=True)):
            assert one is not None
            assert one[token].logprob == pytest.approx(float(expected[place, token]), abs=1e-3)
