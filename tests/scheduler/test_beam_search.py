"""Beam search as arithmetic, against every sequence there is over a toy vocabulary."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from pagedkv.request import Request
from pagedkv.sampling_params import SamplingParams
from pagedkv.scheduler.beam_search import BeamSearch, Hypothesis

VOCAB = 5
STOP_ID = 3


def logprobs_after(tokens: tuple[int, ...], seed: int) -> np.ndarray:
    rng = np.random.default_rng([seed, *tokens])
    logits = rng.normal(size=VOCAB) * 2
    return logits - np.log(np.exp(logits).sum())


def search(width: int, max_tokens: int, seed: int, **options: Any) -> list[Hypothesis]:
    params = SamplingParams(beam_width=width, temperature=0, **options)
    request = Request("a", np.array([1], dtype=np.int32), max_tokens, (STOP_ID,), params)
    beams = BeamSearch(request)
    known = [np.empty(0, dtype=np.int32)]
    while True:
        rows = np.stack([logprobs_after(tuple(one.tolist()), seed) for one in known])
        order = np.argsort(-rows, axis=1)
        going_on = beams.advance(known, order, np.take_along_axis(rows, order, axis=1))
        if going_on is None:
            return beams.finished
        pairs = zip(going_on.parents, going_on.token_ids, strict=True)
        known = [np.append(known[parent], np.int32(token)) for parent, token in pairs]
        assert len({tuple(one.tolist()) for one in known}) == len(known) <= width


def exhaustive(max_tokens: int, seed: int, length_penalty: float) -> list[tuple[float, list[int]]]:
    """Every sequence that ends: by its only stop id, or at max_tokens."""
    found = []
    for length in range(1, max_tokens + 1):
        for tokens in itertools.product(range(VOCAB), repeat=length):
            if STOP_ID in tokens[:-1] or (length < max_tokens and tokens[-1] != STOP_ID):
                continue
            total = sum(
                float(logprobs_after(tokens[:i], seed)[token]) for i, token in enumerate(tokens)
            )
            found.append((total / length**length_penalty, list(tokens)))
    return sorted(found, reverse=True)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("length_penalty", [0.0, 0.7, 1.0, 2.0])
def test_beams_as_wide_as_the_tree_find_what_exhaustive_search_finds(
    seed: int, length_penalty: float
) -> None:
    width = 64  # 4 tokens that go on: 64 beams after three
    found = search(width, 4, seed, n=8, length_penalty=length_penalty, early_stopping="never")
    expected = exhaustive(4, seed, length_penalty)
    assert [one.token_ids.tolist() for one in found[:8]] == [tokens for _, tokens in expected[:8]]
    assert [one.score for one in found[:8]] == pytest.approx([score for score, _ in expected[:8]])


def test_early_stopping_ends_as_soon_as_enough_have_finished() -> None:
    lengths: dict[Any, int] = {}
    for early_stopping in (True, False, "never"):
        for seed in range(60):
            found = search(3, 12, seed, early_stopping=early_stopping, length_penalty=2.0)
            assert len(found) == 3
            assert [one.score for one in found] == sorted(
                (one.score for one in found), reverse=True
            )
            total = sum(one.token_ids.size for one in found)
            lengths[early_stopping] = lengths.get(early_stopping, 0) + total
    assert lengths[True] < lengths[False] <= lengths["never"]


def test_a_longer_penalty_prefers_longer_beams() -> None:
    short = sum(search(4, 10, seed, length_penalty=-1.0)[0].token_ids.size for seed in range(40))
    long = sum(search(4, 10, seed, length_penalty=2.0)[0].token_ids.size for seed in range(40))
    assert short < long
