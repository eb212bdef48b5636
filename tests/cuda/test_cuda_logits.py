"""Edits of logits and log-probabilities on a GPU are those on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from edits_by_hand import edit_tensors

from pagedkv.request import Request
from pagedkv.sampling import (
    LogitRules,
    RowTensors,
    RuledRow,
    SlotParams,
    call_functions,
    choose,
    score_tokens,
)
from pagedkv.sampling_params import SamplingParams

VOCAB = 5003
OPTIONS = [
    SamplingParams(repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=-0.3),
    SamplingParams(logit_bias={7: 3.5, 5002: -9.0}, min_p=0.05, temperature=0.7),
    SamplingParams(allowed_token_ids=range(0, VOCAB, 7), bad_words=["a"]),
    SamplingParams(max_tokens=90, min_tokens=50, stop_token_ids=[3, 4], bad_words=["a"]),
    SamplingParams(logits_processors=[lambda prompt, output, logits: logits.flip(0)]),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_they_are_those_on_the_cpu(dtype: torch.dtype) -> None:
    logits = (torch.randn(len(OPTIONS) + 2, VOCAB, generator=torch.manual_seed(3)) * 4).to(dtype)
    token_ids = np.random.default_rng(1).integers(0, VOCAB, 40).astype(np.int32)
    rows = []
    for row, params in enumerate(OPTIONS):
        bad = ((int(token_ids[-1]), 9), (11,)) if params.bad_words else ()
        request = Request(
            "r",
            token_ids[:25],
            60,
            params.stop_token_ids,
            params,
            bad_token_ids=bad,  # type: ignore[arg-type]
        )
        rules = LogitRules.of(request, VOCAB)
        assert rules is not None
        rows.append(RuledRow(row + 1, rules, token_ids))
    there = logits.cuda()
    slots = SlotParams(len(logits))
    for slot in range(len(logits)):
        slots.set(slot, SamplingParams(temperature=slot % 2), seed=slot)
    draws = RowTensors.of(slots.rows(np.arange(len(logits))), np.full(len(logits), 40))
    edits = edit_tensors(rows, len(logits))
    edits_there = edit_tensors(rows, len(logits), "cuda")
    assert all(map(torch.equal, edits, (one.cpu() for one in edits_there)))
    functions = call_functions(there, rows)
    assert torch.equal(functions.cpu(), call_functions(logits, rows))
    chosen_there = choose(functions, draws.to("cuda"), edits_there).cpu()
    assert torch.equal(chosen_there, choose(call_functions(logits, rows), draws, edits))
    assert torch.equal(there.cpu(), logits)
    chosen = np.arange(len(OPTIONS) + 2) * 834
    index = np.arange(len(OPTIONS) + 2)
    here, gpu = (score_tokens(one, index, chosen, 5) for one in (logits, there))
    np.testing.assert_array_equal(gpu.ranks, here.ranks)
    np.testing.assert_allclose(gpu.logprobs, here.logprobs, atol=3e-6)
    np.testing.assert_allclose(gpu.top_logprobs, here.top_logprobs, atol=3e-6)
