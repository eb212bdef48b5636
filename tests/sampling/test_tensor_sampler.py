"""Choosing tokens on tensors, against the NumPy sampler with the same numbers, and its filters
against sorting."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_sampler import SETTINGS, VOCABULARIES, assert_drawn_by, oracle_weights, slot_params

from pagedkv.sampling import Kinds, RowTensors, SlotParams, choose, sample, uniform
from pagedkv.sampling_params import SamplingParams


def row_tensors(params: SlotParams, numbers: np.ndarray) -> RowTensors:
    temperature = params.temperature
    inverse = np.divide(
        1.0, temperature, out=np.zeros(temperature.size), where=temperature > 0
    ).astype(np.float32)
    return RowTensors(*map(torch.from_numpy, (inverse, params.top_k, params.top_p, numbers)))


def chosen(logits: np.ndarray, params: SlotParams, numbers: np.ndarray) -> list[int]:
    rows, kinds = row_tensors(params, numbers), Kinds.of(params, logits.shape[1])
    got: list[int] = choose(torch.from_numpy(logits), rows, kinds).tolist()
    everything = choose(torch.from_numpy(logits), rows, Kinds(True, True, True)).tolist()
    assert got == everything  # kinds only leave out what changes nothing
    return got


def made_logits(vocab: int, kind: str) -> np.ndarray:
    logits = np.random.default_rng(vocab).normal(size=vocab).astype(np.float32) * 3
    if kind == "tied":
        logits = np.round(logits)
    elif kind == "flat":
        logits[:] = 1.5
    elif kind == "peaked":
        logits[vocab // 2] += 30
    return logits


@pytest.mark.parametrize("vocab", VOCABULARIES)
@pytest.mark.parametrize("kind", ["normal", "tied", "flat", "peaked"])
def test_each_draw_lies_in_the_oracles_interval_of_its_number(vocab: int, kind: str) -> None:
    logits = made_logits(vocab, kind)
    rows = [SamplingParams(temperature=t, top_k=k, top_p=p) for t, k, p in SETTINGS] * 4
    params = slot_params(rows)
    numbers = uniform(params.seeds, np.arange(len(rows)) * 17)
    got = chosen(np.tile(logits, (len(rows), 1)), params, numbers)
    for token, number, one in zip(got, numbers, rows, strict=True):
        assert_drawn_by(number, token, logits, one)


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), SETTINGS)
def test_numbers_across_the_interval_find_exactly_the_oracles_set(
    temperature: float, top_k: int, top_p: float
) -> None:
    logits = np.round(np.random.default_rng(5).normal(size=24), 1).astype(np.float32)
    one = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    weights = oracle_weights(logits, one)
    ends = np.cumsum(weights)
    middles = ends - weights / 2  # a number in the middle of each token's interval
    kept = np.flatnonzero(weights > 1e-9)
    params = slot_params([one] * kept.size)
    assert chosen(np.tile(logits, (kept.size, 1)), params, middles[kept]) == kept.tolist()


def test_greedy_rows_and_drawn_ones_share_a_batch_and_zero_has_one_sign() -> None:
    rows = [SamplingParams(temperature=0), SamplingParams(top_k=2), SamplingParams(temperature=0)]
    logits = np.array([[1, 3, 2, 3], [0.0, -0.0, -1, -5], [-7, -9, -8, -7.5]], dtype=np.float32)
    params = slot_params(rows)
    for number, second in ((0.25, 0), (0.75, 1)):
        numbers = np.full(3, number)
        got = chosen(logits, params, numbers)
        assert got == [1, second, 0]
        alone = sample(torch.from_numpy(logits[::2]), params.rows(np.array([0, 2])), np.zeros(2))
        assert got[::2] == alone[0].tolist()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_rows_without_usable_logits_are_told_and_spoil_no_other(bad: float) -> None:
    rows = [SamplingParams(), SamplingParams(top_k=3, top_p=0.9), SamplingParams(temperature=0)] * 2
    params = slot_params(rows)
    logits = np.random.default_rng(0).normal(size=(6, 700)).astype(np.float32)
    numbers = uniform(params.seeds, np.arange(6))
    right = chosen(logits, params, numbers)
    assert min(right) >= 0
    logits[:3, 5] = bad
    got = chosen(logits, params, numbers)
    assert got == [-1, -1, -1, *right[3:]]
    logits[:3] = -np.inf
    got = chosen(logits, params, numbers)
    assert got == [-1, -1, -1, *right[3:]]


def test_the_largest_number_below_one_takes_the_last_token_with_a_weight() -> None:
    logits = np.full(1000, -np.inf, dtype=np.float32)
    logits[[3, 300, 700]] = 0.0
    params = slot_params([SamplingParams()] * 2)
    numbers = np.array([0.0, 1 - 2.0**-53])
    got = chosen(np.tile(logits, (2, 1)), params, numbers)
    assert got == [3, 700]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_16_bits_are_computed_with_in_32(dtype: torch.dtype) -> None:
    rows = [
        SamplingParams(temperature=0.3, top_k=k, top_p=p) for k, p in ((0, 1), (9, 1), (9, 0.7))
    ]
    params = slot_params(rows * 20)
    logits = torch.randn(60, 900, generator=torch.Generator().manual_seed(2)).to(dtype) * 5
    tensors = row_tensors(params, uniform(params.seeds, np.arange(60)))
    kinds = Kinds.of(params, 900)
    assert torch.equal(choose(logits, tensors, kinds), choose(logits.float(), tensors, kinds))
