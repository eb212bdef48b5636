"""Sampling against a plain NumPy oracle: exact filter sets, exact draws, frequencies, bad rows."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from pagedkv.sampling import RowTensors, SlotParams, choose, uniform
from pagedkv.sampling_params import SamplingParams

# (temperature, top_k, top_p) of rows; top_k beyond any vocabulary and the disabled spellings too.
SETTINGS = [
    (1.0, 0, 1.0),
    (0.7, -1, 1.0),
    (1.0, 1, 1.0),
    (1.3, 5, 1.0),
    (1.0, 10**9, 1.0),
    (1.0, 2**40, 0.9),
    (1.0, 0, 0.5),
    (0.8, 0, 0.95),
    (1.0, 0, 1e-6),
    (0.9, 40, 0.8),
    (2.5, 7, 0.999),
    (0.05, 0, 0.9),
]
VOCABULARIES = [1, 2, 63, 64, 65, 300, 1024, 5000]


def slot_params(rows: list[SamplingParams], seeds: list[int] | None = None) -> SlotParams:
    params = SlotParams(len(rows))
    for slot, row in enumerate(rows):
        params.set(slot, row, slot if seeds is None else seeds[slot])
    return params


def sample(
    logits: torch.Tensor, params: SlotParams, positions: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(token ids, which rows failed)."""
    token_ids = choose(logits, RowTensors.of(params, positions)).numpy()
    return token_ids, token_ids < 0


def oracle_weights(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Probabilities after the filters, by sorting everything; fp32 weights as the sampler has."""
    shifted = (logits - logits.max()) * np.float32(1 / params.temperature)
    weights = np.exp(shifted).astype(np.float64)
    if 0 < params.top_k < logits.size:
        weights[logits < np.sort(logits)[-params.top_k]] = 0
    if params.top_p < 1:
        order = np.argsort(-weights, kind="stable")
        reached = np.cumsum(weights[order])
        last = order[np.argmax(reached >= params.top_p * weights.sum())]
        weights[weights < weights[last]] = 0
    return weights / weights.sum()


def assert_drawn_by(number: float, token: int, logits: np.ndarray, params: SamplingParams) -> None:
    weights = oracle_weights(logits, params)
    ends = np.cumsum(weights)
    assert weights[token] > 0, (params, token)
    # The oracle's sums differ in their last bits: the number must lie in the token's interval.
    assert ends[token] - weights[token] - 1e-6 <= number <= ends[token] + 1e-6, params


def draw(logits: np.ndarray, params: SamplingParams, numbers: int, first: int = 0) -> np.ndarray:
    """Tokens of the same row at many positions, from the first on."""
    rows = torch.from_numpy(np.tile(logits, (numbers, 1)))
    slots = slot_params([params], [3]).rows(np.zeros(numbers, dtype=np.int64))
    got, failed = sample(rows, slots, np.arange(first, first + numbers))
    assert not failed.any()
    return got


@pytest.mark.parametrize("vocab", VOCABULARIES)
@pytest.mark.parametrize("kind", ["normal", "tied", "flat", "peaked"])
def test_each_draw_is_the_oracles_inverse_of_the_same_number(vocab: int, kind: str) -> None:
    rng = np.random.default_rng(vocab)
    logits = rng.normal(size=vocab).astype(np.float32) * 3
    if kind == "tied":
        logits = np.round(logits)
    elif kind == "flat":
        logits[:] = 1.5
    elif kind == "peaked":
        logits[vocab // 2] += 30
    rows = [SamplingParams(temperature=t, top_k=k, top_p=p) for t, k, p in SETTINGS] * 4
    positions = np.arange(len(rows)) * 17
    got, failed = sample(
        torch.from_numpy(np.tile(logits, (len(rows), 1))), slot_params(rows), positions
    )
    assert not failed.any()
    numbers = uniform(np.arange(len(rows), dtype=np.uint64), positions)
    for token, number, params in zip(got.tolist(), numbers, rows, strict=True):
        assert_drawn_by(number, token, logits, params)


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), SETTINGS)
def test_the_filters_keep_exactly_the_oracles_set(
    temperature: float, top_k: int, top_p: float
) -> None:
    rng = np.random.default_rng(5)
    logits = np.round(rng.normal(size=24), 1).astype(np.float32)  # with ties
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    weights = oracle_weights(logits, params)
    kept = np.flatnonzero(weights > 1e-3).tolist()
    allowed = set(np.flatnonzero(weights).tolist())
    seen = set(draw(logits, params, 20_000 if len(kept) > 1 else 100).tolist())
    assert set(kept) <= seen <= allowed


def test_ties_at_the_cut_are_kept_whole() -> None:
    logits = np.array([0, 2, 2, 2, 1, 1], dtype=np.float32)
    assert set(draw(logits, SamplingParams(top_k=2), 500).tolist()) == {1, 2, 3}
    assert set(draw(logits, SamplingParams(top_k=4), 500).tolist()) == {1, 2, 3, 4, 5}
    assert set(draw(logits, SamplingParams(top_p=0.3), 500).tolist()) == {1, 2, 3}


@pytest.mark.parametrize(
    "params",
    [SamplingParams(), SamplingParams(temperature=0.6, top_k=12), SamplingParams(top_p=0.8)],
    ids=["plain", "top_k", "top_p"],
)
def test_frequencies_pass_a_chi_square_test(params: SamplingParams) -> None:
    logits = np.random.default_rng(1).normal(size=2000).astype(np.float32) * 2.5
    num_draws = 20_000
    expected = oracle_weights(logits, params) * num_draws
    counts = np.bincount(draw(logits, params, num_draws), minlength=logits.size)
    big = expected >= 10
    chi_square = ((counts[big] - expected[big]) ** 2 / expected[big]).sum()
    degrees = int(big.sum())
    assert degrees > 5
    # Mean `degrees`, variance 2 * degrees: four standard deviations.
    assert chi_square < degrees + 4 * np.sqrt(2 * degrees)
    assert abs(counts[~big].sum() - expected[~big].sum()) < 4 * np.sqrt(expected[~big].sum() + 1)


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.8, 40, 0.95)])
def test_a_million_draws_pass_a_chi_square_test(
    temperature: float, top_k: int, top_p: float
) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    logits = np.random.default_rng(4).normal(size=300).astype(np.float32) * 1.5
    weights = oracle_weights(logits, params)
    counts = np.zeros(logits.size, dtype=np.int64)
    for first in range(0, 1_000_000, 50_000):
        counts += np.bincount(draw(logits, params, 50_000, first), minlength=logits.size)
    kept = weights > 0
    assert counts[~kept].sum() == 0
    expected = weights[kept] * 1_000_000
    assert expected.min() > 5
    chi_square = ((counts[kept] - expected) ** 2 / expected).sum()
    degrees = int(kept.sum()) - 1
    assert degrees > 20
    assert abs(chi_square - degrees) < 4 * np.sqrt(2 * degrees)  # neither too far nor too close


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("temperature", [1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 0.0])
def test_a_tiny_temperature_is_greedy_and_never_nan(dtype: torch.dtype, temperature: float) -> None:
    logits = (torch.randn(6, 500, generator=torch.Generator().manual_seed(2)) * 40).to(dtype)
    logits[:, 77] = logits.max() + 16
    params = [SamplingParams(temperature=temperature, top_p=p) for p in (1.0, 0.9)] * 3
    got, failed = sample(logits, slot_params(params), np.arange(6))
    assert not failed.any()
    assert got.tolist() == [77] * 6


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    logits = torch.randn(40, 3000, generator=torch.Generator().manual_seed(4)) * 3
    rows = [SamplingParams(temperature=t, top_k=k, top_p=p) for t, k, p in SETTINGS]
    rows = list(itertools.islice(itertools.cycle([*rows, SamplingParams(temperature=0)]), 40))
    seeds, positions = list(range(100, 140)), np.arange(40) * 5
    together, _ = sample(logits, slot_params(rows, seeds), positions)
    for i in range(40):
        alone, _ = sample(
            logits[i : i + 1], slot_params([rows[i]], [seeds[i]]), positions[i : i + 1]
        )
        assert alone[0] == together[i]
    order = np.random.default_rng(0).permutation(40)
    shuffled, _ = sample(
        logits[torch.from_numpy(order)],
        slot_params([rows[i] for i in order], [seeds[i] for i in order]),
        positions[order],
    )
    assert shuffled.tolist() == together[order].tolist()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.nan])
def test_a_row_with_nan_or_inf_is_reported_and_others_are_not_changed(bad: float) -> None:
    logits = torch.randn(4, 100, generator=torch.Generator().manual_seed(6))
    rows = [SamplingParams(temperature=0), SamplingParams(), SamplingParams(), SamplingParams()]
    clean, failed = sample(logits, slot_params(rows), np.arange(4))
    assert not failed.any()
    for row in (0, 2):
        logits[row, 63] = bad
    logits[3] = -torch.inf
    got, failed = sample(logits, slot_params(rows), np.arange(4))
    assert failed.tolist() == [True, False, True, True]
    assert got[1] == clean[1]


def test_a_token_with_logit_minus_infinity_is_never_drawn() -> None:
    logits = np.zeros(1000, dtype=np.float32)
    logits[::2] = -np.inf
    for params in (SamplingParams(), SamplingParams(top_k=700), SamplingParams(top_p=0.99)):
        assert (draw(logits, params, 2000) % 2 == 1).all()


def test_near_zero_temperature_takes_the_largest_of_a_near_tie() -> None:
    logits = np.zeros(100, dtype=np.float32)
    logits[60] = 1e-6
    assert set(draw(logits, SamplingParams(temperature=9e-6), 200).tolist()) == {60}
    assert len(set(draw(logits, SamplingParams(temperature=1e-5), 200).tolist())) > 1


def test_top_p_stops_at_the_weight_that_reaches_it() -> None:
    logits = np.log([1, 4, 1, 2]).astype(np.float32)
    for top_p, kept in ((0.499, {1}), (0.501, {1, 3}), (0.749, {1, 3}), (0.751, {0, 1, 2, 3})):
        assert set(draw(logits, SamplingParams(top_p=top_p), 300).tolist()) == kept


def test_min_p_and_top_k_come_before_top_p() -> None:
    logits = np.log([8, 4, 2, 1, 1]).astype(np.float32)
    for options, kept in (
        ({"min_p": 0.3, "top_p": 0.6}, {0}),  # 8 of 12
        ({"min_p": 0.2, "top_p": 0.7}, {0, 1}),  # 8 of 14
        ({"min_p": 0.2}, {0, 1, 2}),
        ({"min_p": 0.2, "temperature": 2.0}, {0, 1, 2, 3, 4}),  # roots: 1 / 2.83
        ({"top_k": 2, "top_p": 0.6}, {0}),
        ({"top_k": 3, "top_p": 0.6}, {0, 1}),
    ):
        assert set(draw(logits, SamplingParams(**options), 500).tolist()) == kept, options
