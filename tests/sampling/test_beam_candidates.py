"""What beams may go on with: the best tokens of a row, by the log-probabilities of the model."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pagedkv.sampling import SlotParams, best_candidates
from pagedkv.sampling_params import SamplingParams

BEAMS = SamplingParams(temperature=0, beam_width=3)


def slots(*num_candidates: int) -> SlotParams:
    params = SlotParams(len(num_candidates))
    for slot, number in enumerate(num_candidates):
        params.set(slot, BEAMS if number else SamplingParams(), 0, number)
    return params.rows(np.arange(len(num_candidates)))


def test_only_beams_get_candidates_best_first() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(1))
    found = best_candidates(logits, slots(0, 6, 0, 9))
    assert found is not None
    samples, ids, logprobs = found
    assert samples.tolist() == [1, 3]
    assert ids.shape == logprobs.shape == (2, 9)
    for i, row in enumerate(samples.tolist()):
        expected = torch.log_softmax(logits[row].double(), 0).sort(descending=True)
        assert ids[i].tolist() == expected.indices[:9].tolist()
        assert logprobs[i].tolist() == pytest.approx(expected.values[:9].tolist(), abs=1e-5)


def test_a_small_vocabulary_gives_all_it_has() -> None:
    found = best_candidates(torch.randn(1, 4), slots(6))
    assert found is not None
    assert sorted(found[1][0].tolist()) == [0, 1, 2, 3]


def test_no_beams_cost_nothing() -> None:
    assert best_candidates(torch.randn(2, 4), slots(0, 0)) is None


def test_as_many_candidates_are_looked_at_as_leave_enough_that_go_on() -> None:
    assert [BEAMS.num_candidates(n) for n in (0, 1, 3)] == [6, 6, 12]
    assert SamplingParams(n=4).num_candidates(3) == 0
