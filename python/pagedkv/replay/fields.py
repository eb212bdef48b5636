"""Fields of a recording's line, checked: each error names the field, its value and what it should
be. KeyError: it is missing.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, TypeVar

Line = dict[str, Any]
V = TypeVar("V")
_MAX_TOKEN_ID = 2**31 - 1
_MAX_COUNT = 2**53


def field(line: Line, name: str, kind: type[V]) -> V:
    value = line[name]
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TypeError(f"{name} must be of type {kind.__name__}, got {value!r:.80}")
    return value


def list_of(line: Line, name: str, kind: type[V]) -> list[V]:
    values = field(line, name, list)
    for one in values:
        if not isinstance(one, kind) or isinstance(one, bool):
            raise TypeError(f"{name} must hold values of type {kind.__name__}, got {one!r:.80}")
    return values


def seconds(line: Line, name: str) -> float:
    value = line[name]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise TypeError(f"{name} must be a number of seconds, got {value!r:.80}")
    return float(value)


def token_ids_of(line: Line, name: str) -> list[int]:
    token_ids = list_of(line, name, int)
    if any(not 0 <= one <= _MAX_TOKEN_ID for one in token_ids):
        raise ValueError(f"{name} holds numbers that are no token ids")
    return token_ids


def counts_of(kind: type[V], line: Line) -> V:
    """A dataclass of numbers that are at least 0."""
    for name in line:
        if not 0 <= field(line, name, int) < _MAX_COUNT:
            raise ValueError(f"{name} must be a count, got {line[name]}")
    return dataclass_of(kind, line)


def dataclass_of(kind: type[V], line: Line) -> V:
    """Fields that this version does not know are an error; those that are missing take their
    defaults.
    """
    known = {one.name for one in dataclasses.fields(kind)}  # type: ignore[arg-type]
    unknown = line.keys() - known
    if unknown:
        raise ValueError(f"{kind.__name__} has no {', '.join(sorted(unknown))}")
    return kind(**line)
