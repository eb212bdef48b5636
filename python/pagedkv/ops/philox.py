"""Philox4x32-10, the counter-based generator of Salmon, Moraes, Dror and Shaw, "Parallel Random
Numbers: As Easy as 1, 2, 3" (SC 2011), over arrays.

A draw is a function of (seed, position, draw) alone: no state, so neighbours in the batch, chunking
and preemption cannot change it, and a GPU kernel can make the same numbers.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_ROUNDS = 10
# What is added to the two words of the key by each round.
_KEY_STEPS = np.arange(_ROUNDS, dtype=np.uint64)[:, None, None] * np.array(
    [[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64
)


def philox4x32(
    counter: tuple[NDArray[np.uint64], ...], key: tuple[NDArray[np.uint64], ...]
) -> tuple[NDArray[np.uint64], ...]:
    """Ten rounds on arrays of 32-bit words, each held in a uint64. Few rows cost by the number of
    array operations, so both halves of a round are made by one.

    Args:
        counter: four arrays [n].
        key: two arrays [n].

    Returns:
        four arrays [n] of random words.
    """
    multiplied, mixed = np.stack(counter[::2]), np.stack(counter[1::2])
    for round_key in (np.stack(key) + _KEY_STEPS) & _LOW:
        products = multiplied * _MULTIPLIERS
        multiplied = (products[::-1] >> _SHIFT) ^ mixed ^ round_key
        mixed = products[::-1] & _LOW
    return multiplied[0], mixed[0], multiplied[1], mixed[1]


def uniform(
    seeds: NDArray[np.uint64], positions: NDArray[np.int64], draw: int | NDArray[np.int64] = 0
) -> NDArray[np.float64]:
    """One number in [0, 1) with 53 random bits for each row.

    Args:
        seeds: uint64 [n].
        positions: int64 [n], the index in its sequence of the token that is drawn.
        draw: tells apart several draws at one position; one for all, or int64 [n].

    Returns:
        float64 [n]: with counter (position low, position high, draw low, draw high), key (seed low,
        seed high) and output words w0, w1: ((w0 << 32 | w1) >> 11) / 2^53.
    """
    place = positions.astype(np.uint64)
    draws = np.broadcast_to(np.asarray(draw).astype(np.uint64), seeds.shape)
    counter = (place & _LOW, place >> _SHIFT, draws & _LOW, draws >> _SHIFT)
    w0, w1, _, _ = philox4x32(counter, (seeds & _LOW, seeds >> _SHIFT))
    return ((w0 << _SHIFT | w1) >> np.uint64(11)).astype(np.float64) * 2.0**-53
