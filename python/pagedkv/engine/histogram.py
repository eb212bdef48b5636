"""Histogram: how often values fell between given bounds. Values come as arrays, once a step, so
that counting costs a step the same whatever its number of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True, slots=True, eq=False)
class HistogramCounts:
    """bounds float64 [n], ascending; counts int64 [n + 1]: values at most bounds[i] and above the
    bound before it, the last those above all. sum: of all values.
    """

    bounds: NDArray[np.float64]
    counts: NDArray[np.int64]
    sum: float

    @property
    def num_values(self) -> int:
        return int(self.counts.sum())


class Histogram:
    """See HistogramCounts."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = np.array(bounds, dtype=np.float64)
        self._counts = np.zeros(len(bounds) + 1, dtype=np.int64)
        self._sum = 0.0

    def observe(self, values: ArrayLike) -> None:
        """Count values: a number, or an array of any shape."""
        given = np.asarray(values, dtype=np.float64).reshape(-1)
        if given.size:
            places = np.searchsorted(self._bounds, given)
            self._counts += np.bincount(places, minlength=self._counts.size)
            self._sum += float(given.sum())

    def counts(self) -> HistogramCounts:
        """As it is now; an own copy."""
        return HistogramCounts(self._bounds, self._counts.copy(), self._sum)
