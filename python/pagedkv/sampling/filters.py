"""The set of tokens that top-k and top-p leave, exactly, without sorting the vocabulary.

Both keep whole groups of equal logits: the cut is a value, so it depends on no order of ids.
    top-k: every token whose logit is at least the k-th largest.
    top-p: every token whose probability is at least t, for the largest t whose tokens together
           reach top_p. Probabilities are those after temperature and top-k, which adds up to 1.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_GROUP_SIZE = 64


def kth_largest(values: NDArray[np.float32], k: int) -> float:
    """The k-th largest of values [n], counted from 1 and with repeats. REQUIRES 1 <= k <= n.

    The values are taken in groups of 64; the k-th largest of the groups' maxima is a lower bound,
    and few values reach it: two passes over the row, and a selection among those few.
    """
    num_groups = values.size // _GROUP_SIZE
    if k > num_groups:
        return float(np.partition(values, values.size - k)[values.size - k])
    grouped = values[: num_groups * _GROUP_SIZE].reshape(_GROUP_SIZE, num_groups)
    maxima = grouped.max(axis=0)
    bound = np.partition(maxima, num_groups - k)[num_groups - k]
    reaching = values[values >= bound]
    return float(np.partition(reaching, reaching.size - k)[reaching.size - k])


def top_p_cut(weights: NDArray[np.float32], total: float, top_p: float) -> float:
    """The smallest weight that top-p keeps.

    Args:
        weights: [n] > 0, not normalised; may leave out small ones of the distribution.
        total: sum over the whole distribution.
        top_p: in (0, 1).

    Returns:
        the cut, or 0.0 (keep all) if these weights together do not reach top_p * total.
    """
    descending = np.sort(weights)[::-1]
    reached = np.cumsum(descending, dtype=np.float64)
    index = int(np.searchsorted(reached, top_p * total, side="left"))
    return float(descending[index]) if index < descending.size else 0.0
