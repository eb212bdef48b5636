"""score_tokens on the CPU against its oracle: log-probabilities, ranks, the most likely tokens."""

from __future__ import annotations

import pytest
import torch
from sampling_cases import LOGITS, assert_scores, score_call

from pagedkv import ops
from pagedkv.ops import reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize(("vocab", "num_top"), [(1, 1), (2, 0), (65, 65), (700, 512), (5003, 20)])
@pytest.mark.parametrize("kind", LOGITS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_are_the_oracles(kind: str, vocab: int, num_top: int, dtype: torch.dtype) -> None:
    call = score_call(kind, vocab, dtype, num_top)
    ops.score_tokens(**call)
    assert_scores(call, atol=1e-12)


def test_by_hand() -> None:
    call = score_call("normal", 4, torch.float32, 3)
    call["logits"][:] = torch.tensor([2.0, 4.0, 2.0, 8.0]).log()
    call["token_ids"][:5] = torch.tensor([0, 1, 3, 4, -1])
    for module in (ops, reference):
        module.score_tokens(**call)
        probabilities = [1 / 8, 1 / 4, 1 / 2, 0, 0]
        assert call["logprobs"][:5].exp().tolist() == pytest.approx(probabilities)
        assert call["ranks"][:5].tolist() == [3, 2, 1, 5, 5]
        assert call["top_ids"][0].tolist() == [3, 1, 0]
        assert call["top_logprobs"][0].exp().tolist() == pytest.approx([1 / 2, 1 / 4, 1 / 8])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_rows_without_usable_logits_are_told_and_spoil_no_other(bad: float) -> None:
    call = score_call("normal", 300, torch.float32, 4)
    call["logits"][1, 7], call["logits"][2] = bad, -torch.inf
    ops.score_tokens(**call)
    assert_scores(call, atol=1e-12)
    assert call["ranks"][1:3].tolist() == [0, 0]
    assert (call["top_ids"][1:3] == -1).all()
