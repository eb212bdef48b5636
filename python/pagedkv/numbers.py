"""Numbers that callers pass, as Python's own: what NumPy's scalars are too. Truths are no numbers,
and neither are arrays. Used where values are made (config, sampling_params, request).
"""

from __future__ import annotations

import numpy as np


def integer(name: str, value: object, *, low: int, high: int | None = None) -> int:
    """value as an int. Raises TypeError if it is none, ValueError outside of low to high."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} must be an integer, got {_told(value)}")
    found = int(value)
    if found < low or (high is not None and found > high):
        upper = "" if high is None else f" and at most {high}"
        raise ValueError(f"{name} must be at least {low}{upper}, got {found}")
    return found


def real(name: str, value: object) -> float:
    """value as a float, or as the int that it is. Raises TypeError if it is neither."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(f"{name} must be a number, got {_told(value)}")
    if isinstance(value, (int, np.integer)):
        return int(value)
    return float(value)


def real_between(
    name: str, value: object, *, low: float, high: float, low_open: bool = False
) -> float:
    """real, if it is at least low and at most high; ValueError otherwise."""
    found = real(name, value)
    bounds = f"{'above' if low_open else 'at least'} {low:g} and at most {high:g}"
    # Not by math.isfinite, which fails for integers that no float can hold.
    if not low <= found <= high or (low_open and found == low):
        raise ValueError(f"{name} must be finite, {bounds}, got {found!r:.200}")
    return found


def truth(name: str, value: object) -> bool:
    """value as a bool. Raises TypeError if it is none."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be True or False, got {_told(value)}")
    return bool(value)


def _told(value: object) -> str:
    return f"{type(value).__name__} {value!r:.200}"
