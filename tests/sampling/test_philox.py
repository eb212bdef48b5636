"""Philox4x32-10 against the published known answers of Random123, and the draws made from it."""

from __future__ import annotations

import numpy as np
import pytest

from pagedkv.sampling import philox4x32, uniform

# Random123's kat_vectors, philox4x32 with 10 rounds: counter, key, result.
KNOWN_ANSWERS = [
    (
        "00000000 00000000 00000000 00000000",
        "00000000 00000000",
        "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    ),
    (
        "ffffffff ffffffff ffffffff ffffffff",
        "ffffffff ffffffff",
        "408f276d 41c83b0e a20bc7c6 6d5451fd",
    ),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


def words(text: str) -> tuple[np.ndarray, ...]:
    return tuple(np.array([int(word, 16)], dtype=np.uint64) for word in text.split())


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN_ANSWERS)
def test_known_answers(counter: str, key: str, result: str) -> None:
    assert philox4x32(words(counter), words(key)) == words(result)


def test_an_array_of_counters_gives_each_its_own_answer() -> None:
    columns = zip(*(words(counter) for counter, _, _ in KNOWN_ANSWERS), strict=True)
    keys = zip(*(words(key) for _, key, _ in KNOWN_ANSWERS), strict=True)
    got = philox4x32(
        tuple(np.concatenate(column) for column in columns),
        tuple(np.concatenate(column) for column in keys),
    )
    expected = zip(*(words(result) for _, _, result in KNOWN_ANSWERS), strict=True)
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(one, np.concatenate(other))


def test_a_draw_is_built_from_the_first_two_words_as_documented() -> None:
    seed, position, draw = 0x123456789ABCDEF0, 0x1_0000_0007, 3
    w0, w1, _, _ = philox4x32(words("7 1 3 0"), words("9abcdef0 12345678"))
    bits = (int(w0[0]) << 32 | int(w1[0])) >> 11
    got = uniform(np.array([seed], dtype=np.uint64), np.array([position]), draw)
    assert got[0] == bits / 2**53


def test_draws_are_uniform_and_differ_by_seed_position_and_draw() -> None:
    seeds = np.arange(200, dtype=np.uint64).repeat(200)
    positions = np.tile(np.arange(200), 200)
    numbers = uniform(seeds, positions)
    assert (numbers >= 0).all()
    assert (numbers < 1).all()
    assert np.unique(numbers).size == numbers.size
    assert not np.isin(numbers, uniform(seeds, positions, draw=1)).any()
    counts, _ = np.histogram(numbers, bins=100, range=(0, 1))
    chi_square = ((counts - 400) ** 2 / 400).sum()
    assert chi_square < 148.2  # 99 degrees of freedom, p = 0.001
