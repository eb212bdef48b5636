"""NumPy's scalars stand for the numbers that they are wherever a caller gives numbers, and are kept
as Python's own; truths and arrays are no numbers.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from pagedkv.config import EngineConfig
from pagedkv.request import MAX_PRIORITY, Request
from pagedkv.sampling_params import SamplingParams

REALS = (
    "temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty",
)  # fmt: skip
INTEGERS = ("top_k", "seed", "max_tokens", "n", "best_of", "min_tokens", "logprobs")
FLAGS = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens")


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64, np.longdouble])
@pytest.mark.parametrize("name", REALS)
def test_a_real_of_numpy_is_the_float_that_it_is(name: str, kind: Any) -> None:
    value = kind(0.7)
    kept = getattr(SamplingParams(**{name: value}), name)
    assert type(kept) is float
    assert kept == float(value)
    for bad in (kind(math.nan), kind(math.inf), -kind(math.inf)):
        with pytest.raises(ValueError, match=f"{name} must be finite"):
            SamplingParams(**{name: bad})


@pytest.mark.parametrize("kind", [np.int8, np.uint16, np.int32, np.int64, np.uint64])
@pytest.mark.parametrize("name", [*INTEGERS, *REALS[:3]])
def test_an_integer_of_numpy_is_the_int_that_it_is(name: str, kind: Any) -> None:
    kept = getattr(SamplingParams(**{name: kind(1)}), name)
    assert type(kept) is int
    assert kept == 1


def test_all_options_of_numpy_make_the_value_that_pythons_make() -> None:
    plain: dict[str, Any] = {
        "temperature": 0.5,
        "seed": 2**64 - 1,
        "stop_token_ids": (5, 7),
        "allowed_token_ids": (3, 4),
        "logit_bias": {5: 1.5, 7: -2},
        "ignore_eos": True,
    }
    numpy = {
        **plain,
        "temperature": np.float32(0.5),
        "seed": np.uint64(2**64 - 1),
        "stop_token_ids": np.array([5, 7]),
        "allowed_token_ids": np.array([3, 4], dtype=np.uint8),
        "logit_bias": {np.int32(5): np.float32(1.5), np.int64(7): np.int8(-2)},
        "ignore_eos": np.True_,
    }
    made = SamplingParams(**numpy)
    assert made == SamplingParams(**plain)
    assert hash(made) == hash(SamplingParams(**plain))
    assert repr(made) == repr(SamplingParams(**plain))
    beams = {"beam_width": 3, "temperature": 0, "length_penalty": 2.0, "early_stopping": True}
    kept = SamplingParams(
        beam_width=np.int64(3),  # type: ignore[arg-type]
        temperature=np.float32(0),  # type: ignore[arg-type]
        length_penalty=np.float16(2),  # type: ignore[arg-type]
        early_stopping=np.True_,  # type: ignore[arg-type]
    )
    assert kept == SamplingParams(**beams)  # type: ignore[arg-type]
    assert kept.early_stopping is True
    # What was made once can be made anew.
    assert dataclasses.replace(made, n=np.int64(2)) == SamplingParams(**plain, n=2)


@pytest.mark.parametrize("value", [np.True_, np.array(1), np.array([1]), np.str_("1"), 1j])
@pytest.mark.parametrize("name", [*INTEGERS, *REALS])
def test_truths_arrays_and_texts_are_no_numbers(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"{name} must be an? (number|integer), got"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name", FLAGS)
def test_numbers_are_no_truths(name: str) -> None:
    with pytest.raises(TypeError, match=f"{name} must be True or False, got int64"):
        SamplingParams(**{name: np.int64(1)})


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids"])
def test_ids_are_integers_one_by_one(name: str) -> None:
    for bad in (np.array([1.0]), np.array([True]), np.array([[1, 2]]), [np.True_]):
        with pytest.raises(TypeError, match=f"{name} must be an integer, got"):
            SamplingParams(**{name: bad})
    with pytest.raises(TypeError, match="logit_bias must be an integer, got"):
        SamplingParams(logit_bias={np.True_: 1.0})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="logit_bias of 3 must be a number, got"):
        SamplingParams(logit_bias={3: np.True_})  # type: ignore[dict-item]


def test_options_of_an_engine_are_kept_as_pythons_numbers() -> None:
    plain: dict[str, Any] = {
        "block_size": 8,
        "num_gpu_blocks_override": 100,
        "gpu_memory_utilization": 0.5,
        "watermark": 0.25,
        "swap_space": 2,
        "enable_prefix_caching": False,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "max_num_paced_tokens": 32,
        "max_model_len": 128,
        "max_cudagraph_capture_size": 16,
        "async_scheduling": True,
        "seed": 7,
    }
    numpy = {
        name: np.bool_(value) if isinstance(value, bool) else np.array(value)[()]
        for name, value in plain.items()
    }
    assert all(isinstance(value, np.generic) for value in numpy.values())
    made = EngineConfig.from_options("m", **numpy)
    assert repr(made) == repr(EngineConfig.from_options("m", **plain))
    for name, value in plain.items():
        kind = "True or False" if isinstance(value, bool) else "an? (integer|number)"
        bad = np.int64(1) if isinstance(value, bool) else np.True_
        with pytest.raises(TypeError, match=f"{name} must be {kind}, got"):
            EngineConfig.from_options("m", **{name: bad})
    for name in ("gpu_memory_utilization", "watermark", "swap_space"):
        with pytest.raises(ValueError, match=f"{name} must be"):
            EngineConfig.from_options("m", **{name: np.float32(math.nan)})


def test_a_priority_may_be_one_of_numpy() -> None:
    def priority(value: Any) -> int:
        return Request("r", np.array([1], dtype=np.int32), 1, priority=value).priority

    assert type(priority(np.int16(-3))) is int
    assert priority(np.int64(-MAX_PRIORITY)) == -MAX_PRIORITY
    for bad in (np.int64(-MAX_PRIORITY - 1), np.int64(MAX_PRIORITY + 1)):
        with pytest.raises(ValueError, match="priority must be at least -2147483648 and at most"):
            priority(bad)
    for other in (np.True_, np.float32(1), np.array(1)):
        with pytest.raises(TypeError, match="priority must be an integer, got"):
            priority(other)
