"""Lists of token ids as arrays, and what is no such list."""

from __future__ import annotations

import random

import numpy as np
import pytest

from pagedkv._core import token_ids


def test_a_list_becomes_an_array_of_its_own() -> None:
    draw = random.Random(5)
    values = [draw.randrange(128_256) for _ in range(5000)]
    ids = token_ids(values, 128_256)
    assert ids is not None
    assert ids.dtype == np.int32
    assert ids.tolist() == values
    values[0] += 1
    assert ids[0] == values[0] - 1


def test_the_ends_of_the_vocabulary() -> None:
    for vocab_size in (1, 260, 2**31):
        ids = token_ids([0, vocab_size - 1], vocab_size)
        assert ids is not None
        assert ids.tolist() == [0, vocab_size - 1]
        assert token_ids([0, vocab_size], vocab_size) is None


@pytest.mark.parametrize(
    "value", [-1, 2**31, -(2**31) - 1, 2**63, -(2**70), True, 1.0, "1", None, [1], np.int64(1)]
)
def test_anything_else_in_the_list_is_told(value: object) -> None:
    assert token_ids([1, value], 2**31) is None  # type: ignore[list-item]


def test_no_ids_are_no_mistake() -> None:
    ids = token_ids([], 10)
    assert ids is not None
    assert ids.size == 0


@pytest.mark.parametrize("vocab_size", [-1, 2**31 + 1])
def test_a_vocabulary_beyond_32_bits_is_refused(vocab_size: int) -> None:
    with pytest.raises(ValueError, match="vocab_size"):
        token_ids([1], vocab_size)


def test_only_lists_are_taken() -> None:
    with pytest.raises(TypeError):
        token_ids((1, 2), 10)  # type: ignore[arg-type]
