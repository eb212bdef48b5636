"""SamplingParams refuses what is out of range, by name, when it is made."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from pagedkv.sampling_params import SamplingParams


@pytest.mark.parametrize("name", ["temperature", "top_p"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), -0.1])
def test_every_number_must_be_finite_and_in_range(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} must be finite"):
        SamplingParams(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_p": 0}, "top_p must be finite, above 0 and at most 1, got 0"),
        ({"top_p": 1.01}, "at most 1, got 1.01"),
        ({"temperature": "1"}, "temperature must be a number, got str"),
        ({"temperature": True}, "temperature must be a number, got bool"),
        ({"temperature": None}, "temperature must be a number, got NoneType"),
        ({"top_k": -2}, "top_k must be at least -1, got -2"),
        ({"top_k": 1.5}, "top_k must be an integer, got float"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"max_tokens": "5"}, "max_tokens must be an integer"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"seed": 2**64}, "seed must be at least 0 and at most"),
        ({"stop": [""]}, "stop must hold non-empty strings, got ''"),
        ({"stop": ""}, "stop must hold non-empty strings, got ''"),
        ({"stop": [3]}, "stop must hold non-empty strings, got 3"),
        ({"stop": ["x"] * 65}, "stop has 65 strings; at most 64"),
        ({"stop_token_ids": [-1]}, "stop_token_ids must be at least 0, got -1"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids must be an integer"),
        ({"stop_token_ids": range(257)}, "stop_token_ids has 257 ids; at most 256"),
    ],
)
def test_what_is_out_of_range_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        SamplingParams(**options)


def test_stop_may_be_one_string_and_lists_become_immutable() -> None:
    params = SamplingParams(stop="END", stop_token_ids=[5, 7])
    assert params.stop == ("END",)
    assert params.stop_token_ids == (5, 7)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.top_k = 3  # type: ignore[misc]


@pytest.mark.parametrize(("temperature", "greedy"), [(0, True), (9e-6, True), (1e-5, False)])
def test_near_zero_counts_as_greedy(temperature: float, greedy: bool) -> None:
    assert SamplingParams(temperature=temperature).is_greedy is greedy


def test_stop_ids_outside_the_vocabulary_are_refused() -> None:
    SamplingParams(stop_token_ids=[99]).check_vocabulary(100)
    with pytest.raises(ValueError, match=r"has 100, outside the vocabulary \(0 to 99\)"):
        SamplingParams(stop_token_ids=[100]).check_vocabulary(100)
