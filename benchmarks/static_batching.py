"""transformers' `generate` on the requests of bench_throughput.py: static batches of random weights
of the same shape, which run until their longest request ends. Only the tokens asked for count.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch


def transformers_model(shape: Mapping[str, object], device: str) -> Any:
    """A model of a config.json's shape in its dtype, with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    (name,) = shape["architectures"]  # type: ignore[misc]
    kind = name.removesuffix("ForCausalLM").lower()
    left_out = ("architectures", "torch_dtype")
    options = {key: value for key, value in shape.items() if key not in left_out}
    config = AutoConfig.for_model(kind, **options, eos_token_id=None, bos_token_id=None)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, str(shape["torch_dtype"]))
        )
    return model.eval()


def generate_seconds(
    model: Any, prompts: Sequence[list[int]], lens: Sequence[int], batch_size: int
) -> float:
    """Seconds for all requests, batch after batch, drawn at temperature 0.6."""
    begin = time.perf_counter()
    for first in range(0, len(prompts), batch_size):
        _generate(model, prompts[first : first + batch_size], max(lens[first : first + batch_size]))
    return time.perf_counter() - begin


def _generate(model: Any, prompts: Sequence[list[int]], num_tokens: int) -> None:
    longest = max(map(len, prompts))
    ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):  # padded on the left, so that all end together
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    with torch.inference_mode():
        out = model.generate(
            ids.to(model.device),
            attention_mask=mask.to(model.device),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=True,
            temperature=0.6,
            top_k=0,
            top_p=1.0,
            pad_token_id=0,
        ).cpu()
    assert out.shape == (len(prompts), longest + num_tokens), out.shape
