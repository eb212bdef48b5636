"""LLM on GGUF files that hold all of a model: weights, tokenizer and chat template. What it answers
is what transformers does with the model that was written.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pagedkv import LLM, SamplingParams

sys.path.insert(0, str(Path(__file__).parent.parent / "text"))
sys.path.insert(0, str(Path(__file__).parent.parent / "weights"))
from gguf_files import tiny_llama, tiny_qwen2, tiny_qwen3, write_gguf
from test_gguf_gemma import metadata_of, tiny_gemma
from test_gguf_vocabulary import gpt2_metadata, llama_metadata

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
MODELS: dict[str, tuple[Callable[..., Any], dict[str, object]]] = {
    "llama": (tiny_llama, llama_metadata()),
    "qwen2": (tiny_qwen2, gpt2_metadata("qwen2")),
    "qwen3": (tiny_qwen3, gpt2_metadata("qwen2")),
    "gemma2": (
        lambda **sizes: tiny_gemma("gemma2", **sizes),
        llama_metadata(add_space_prefix=False),
    ),
    "gemma3": (
        lambda **sizes: tiny_gemma("gemma3", **sizes),
        llama_metadata(add_space_prefix=False),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_file_of_everything_answers_prompts_and_chats(name: str, tmp_path: Path) -> None:
    make, vocabulary = MODELS[name]
    tokens = vocabulary["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    model = make(vocab_size=len(tokens), **({"head_dim": 32} if name == "qwen3" else {}))
    metadata = {
        key: value.tolist() if isinstance(value, np.ndarray) else value
        for key, value in vocabulary.items()
    }
    if name.startswith("gemma"):
        metadata |= metadata_of(name, model)
    if name == "qwen3":
        metadata |= {f"qwen3.attention.{which}_length": 32 for which in ("key", "value")}
    metadata["tokenizer.chat_template"] = TEMPLATE
    path = write_gguf(tmp_path / "m.gguf", model, metadata=metadata)
    llm = LLM(str(path), block_size=4, num_gpu_blocks_override=64, max_model_len=64)
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    chat = [{"role": "user", "content": f"the cat {llm.tokenizer.decode([2], False)}"}]
    outputs = [
        *llm.generate(["the cat sat", "日本"], params, use_tqdm=False),
        *llm.chat(chat, params, use_tqdm=False),
    ]
    for output in outputs:
        prompt, answer = output.prompt_token_ids, output.outputs[0].token_ids
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + answer])).logits[0]
        assert answer == logits[len(prompt) - 1 : -1].argmax(-1).tolist()
        assert output.outputs[0].text == llm.tokenizer.decode(answer)
    starts = name in ("llama", "gemma2", "gemma3")
    begin = metadata["tokenizer.ggml.bos_token_id"]
    assert (outputs[0].prompt_token_ids[0] == begin) == starts
    end = metadata["tokenizer.ggml.eos_token_id"]
    assert outputs[2].prompt_token_ids.count(end) == 1  # the template's, not the message's
    assert outputs[2].prompt_token_ids[-1] == end
