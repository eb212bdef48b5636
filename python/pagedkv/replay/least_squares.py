"""Non-negative least squares: the active-set method of Lawson and Hanson, "Solving Least Squares
Problems" (1974), chapter 23.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def nonnegative_least_squares(matrix: Floats, target: Floats) -> Floats:
    """The x >= 0 that minimises |matrix @ x - target|.

    Args:
        matrix: float64 [num_rows, num_columns], columns of comparable size.
        target: float64 [num_rows].

    Returns:
        float64 [num_columns].

    Example:
        columns [1, 1] and [1, -1], target [3, 5] -> [4, 0]: -1 of the second is not allowed
    """
    num_columns = matrix.shape[1]
    solution = np.zeros(num_columns)
    is_free = np.zeros(num_columns, dtype=np.bool_)  # the others are 0
    gradient = matrix.T @ target
    tolerance = 1e-10 * max(1e-300, float(np.abs(gradient).max()))
    for _ in range(3 * num_columns):  # each turn lowers the error, so it ends long before
        if is_free.all() or float(gradient[~is_free].max()) <= tolerance:
            break
        is_free[int(np.argmax(np.where(is_free, -np.inf, gradient)))] = True
        while is_free.any():
            wanted = np.zeros(num_columns)
            wanted[is_free] = np.linalg.lstsq(matrix[:, is_free], target, rcond=None)[0]
            if float(wanted[is_free].min()) > 0:
                solution = wanted
                break
            # Go towards it until the first column becomes 0, and fix that one there.
            falling = is_free & (wanted <= 0)
            share = (solution[falling] / (solution[falling] - wanted[falling])).min()
            solution = solution + share * (wanted - solution)
            is_free &= solution > 1e-14 * max(1.0, float(solution.max()))
            solution[~is_free] = 0.0
        gradient = matrix.T @ (target - matrix @ solution)
    return solution
