"""SamplingParams refuses what is out of range, by name, when it is made."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from pagedkv.sampling_params import SamplingParams

NUMBERS = {
    field.name for field in dataclasses.fields(SamplingParams) if field.type == "float"
}  # all of them: a new one is tested too


@pytest.mark.parametrize("name", sorted(NUMBERS))
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), -100.1])
def test_every_number_must_be_finite_and_in_range(name: str, value: float) -> None:
    assert {"temperature", "min_p", "length_penalty"} < NUMBERS
    with pytest.raises(ValueError, match=f"{name} must be finite"):
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=f"{name} must be a number, got NoneType None"):
        SamplingParams(**{name: None})  # type: ignore[arg-type]


JUNK: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 2**31, 2**64, 10**400, 0.0, -0.0, 0.5, 1e-320, 1e300),
    *(math.nan, math.inf, -math.inf, "", "x", "\ud800", "\0", b"x", [], [None], [0], [2**70]),
    *(["a"], [""], [[]], {}, {0: 1.0}, {0: 10**400}, {"1": 1}, {1: None}, {1.5: 1}, ((1, 2),)),
    *(((1,),), (1, 2), object(), print, [print], np.float32(0.5), np.int64(2), np.arange(2)),
]


@pytest.mark.parametrize("field", dataclasses.fields(SamplingParams), ids=lambda field: field.name)
def test_any_value_of_any_option_is_taken_or_refused_in_words(
    field: dataclasses.Field[Any],
) -> None:
    outcomes = set()
    for junk in JUNK:
        try:
            params = SamplingParams(**{"temperature": 0, field.name: junk})
            params.check_vocabulary(2**80)
        except (ValueError, TypeError) as error:
            outcomes.add("refused")
            if field.name not in str(error) or len(str(error)) > 500:
                raise
        else:
            outcomes.add("taken")
            hash(params)
    assert outcomes == {"refused", "taken"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"temperature": 10**400},
            "temperature must be finite, at least 0 and at most 1e[+]06, got",
        ),
        ({"top_p": 0}, "top_p must be finite, above 0 and at most 1, got 0"),
        ({"top_p": 1.01}, "at most 1, got 1.01"),
        ({"temperature": 1.1e6}, "temperature must be finite, at least 0 and at most 1e[+]06"),
        ({"logit_bias": [5] * 10**5}, r"logit_bias must map token ids to numbers, got .{200}$"),
        ({"temperature": "1"}, "temperature must be a number, got str"),
        ({"temperature": True}, "temperature must be a number, got bool"),
        ({"temperature": None}, "temperature must be a number, got NoneType"),
        ({"min_p": -0.1}, "min_p must be finite, at least 0 and at most 1, got -0.1"),
        ({"min_p": 1.1}, "min_p must be finite, at least 0 and at most 1, got 1.1"),
        ({"repetition_penalty": 0}, "repetition_penalty must be finite, at least 0.01 and at most"),
        ({"repetition_penalty": 101}, "and at most 100, got 101"),
        ({"frequency_penalty": 2.1}, "frequency_penalty must be finite, at least -2 and at most 2"),
        ({"presence_penalty": -2.1}, "presence_penalty must be finite, at least -2 and at most 2"),
        ({"logit_bias": {5: 101}}, "logit_bias of 5 must be finite, .* got 101"),
        ({"logit_bias": {5: float("nan")}}, "logit_bias of 5 must be finite, .* got nan"),
        ({"logit_bias": {5: "1"}}, "logit_bias of 5 must be a number, got str"),
        ({"logit_bias": {-1: 1}}, "logit_bias must be at least 0, got -1"),
        ({"logit_bias": {"abc": 1}}, "logit_bias must be an integer, got str 'abc'"),
        ({"logit_bias": [5]}, "logit_bias must map token ids to numbers, got .5."),
        ({"logit_bias": (5, 1)}, "logit_bias must map token ids to numbers, got .5, 1."),
        ({"logit_bias": ((5, 1), (5, 2))}, "logit_bias names 5 twice"),
        ({"logit_bias": None}, "logit_bias must map token ids to numbers, got None"),
        ({"allowed_token_ids": []}, "allowed_token_ids is empty, so that no token"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids must be at least 0, got -1"),
        ({"allowed_token_ids": [1.0]}, "allowed_token_ids must be an integer"),
        ({"allowed_token_ids": 5}, "allowed_token_ids must be a list, got int 5"),
        ({"stop_token_ids": None}, "stop_token_ids must be a list, got NoneType None"),
        ({"stop": None}, "stop must be a list, got NoneType None"),
        ({"stop": 5}, "stop must be a list, got int 5"),
        ({"bad_words": [""]}, "bad_words must hold non-empty strings, got ''"),
        ({"bad_words": [5]}, "bad_words must hold non-empty strings, got 5"),
        ({"bad_words": ["x"] * 257}, "bad_words has 257 strings; at most 256"),
        ({"min_tokens": -1}, "min_tokens must be at least 0 and at most 16, got -1"),
        ({"min_tokens": 17}, "min_tokens must be at least 0 and at most 16, got 17"),
        ({"min_tokens": 1.5}, "min_tokens must be an integer, got float"),
        ({"logprobs": -1}, "logprobs must be at least 0 and at most 20, got -1"),
        ({"logprobs": True}, "logprobs must be an integer, got bool True"),
        ({"prompt_logprobs": 21}, "prompt_logprobs must be at least 0 and at most 20, got 21"),
        ({"prompt_logprobs": 1.0}, "prompt_logprobs must be an integer, got float"),
        ({"logprobs": 1, "beam_width": 2, "temperature": 0}, "logprobs and prompt_logprobs do not"),
        ({"logits_processors": ["print"]}, "logits_processors must hold functions, got 'print'"),
        ({"logits_processors": print}, "logits_processors must be a list, got builtin"),
        ({"ignore_eos": 1}, "ignore_eos must be True or False, got int 1"),
        ({"include_stop_str_in_output": "no"}, "include_stop_str_in_output must be True or False"),
        ({"skip_special_tokens": None}, "skip_special_tokens must be True or False"),
        ({"early_stopping": 1}, 'early_stopping must be True, False or "never", got 1'),
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


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("logit_bias", {"logit_bias": {100: 1.0}}),
        ("allowed_token_ids", {"allowed_token_ids": [5, 100]}),
    ],
)
def test_ids_with_rules_outside_the_vocabulary_are_refused(
    name: str, options: dict[str, Any]
) -> None:
    SamplingParams(**options).check_vocabulary(101)
    with pytest.raises(ValueError, match=rf"{name} has 100, outside the vocabulary \(0 to 99\)"):
        SamplingParams(**options).check_vocabulary(100)


@pytest.mark.parametrize(
    "options",
    [
        {"min_p": 0.1},
        {"repetition_penalty": 1.1},
        {"frequency_penalty": 0.1},
        {"presence_penalty": 0.1},
        {"logit_bias": {1: 1.0}},
        {"allowed_token_ids": [1]},
        {"bad_words": ["x"]},
        {"min_tokens": 1},
        {"logits_processors": [lambda prompt, output, logits: logits]},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_changes_logits_says_so_and_goes_with_no_beam_search(options: dict[str, Any]) -> None:
    assert not SamplingParams().changes_logits
    params = SamplingParams(**options)
    assert params.changes_logits == ("min_p" not in options)  # a filter, as top_p
    assert dataclasses.replace(params, max_tokens=5) == SamplingParams(**options, max_tokens=5)
    hash(params)
    with pytest.raises(ValueError, match="no option that changes logits goes with beam_width"):
        SamplingParams(temperature=0, beam_width=2, **options)
