"""A pairwise cover of paged attention on the GPU: few cases in which every two levels of any two
axes occur together. test_pairwise_cover.py proves that they do, from the cases alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from gpu_attention_cases import E4M3, E5M2, Case

Levels = dict[str, Any]

# Length of the first sequence by the block size and a power of two.
LENGTHS: dict[str, Callable[[int, int], int]] = {
    "0": lambda block, power: 0,
    "1": lambda block, power: 1,
    "B - 1": lambda block, power: block - 1,
    "B": lambda block, power: block,
    "B + 1": lambda block, power: block + 1,
    "2^k - 1": lambda block, power: power - 1,
    "2^k": lambda block, power: power,
    "2^k + 1": lambda block, power: power + 1,
    "100k": lambda block, power: 100_000,
}
POWERS = (64, 256, 512, 1024, 2048, 4096)

FEATURES: dict[str, dict[str, Any]] = {
    "none": {},
    "window": {"window": 45},
    "alibi": {"alibi": True},
    "soft_cap": {"soft_cap": 8.0},
    "e4m3": {"cache_dtype": E4M3},
    "e5m2 per head": {"cache_dtype": E5M2, "scale_per_head": True},
}

AXES: dict[str, tuple[Any, ...]] = {
    "dtype": (torch.bfloat16, torch.float16, torch.float32),
    "head_dim": (64, 80, 96, 112, 128, 192, 256),
    "group": (1, 2, 4, 7, 8, 16, 64),
    "block_size": (1, 3, 8, 16, 32, 64, 100, 128, 256),
    "length": tuple(LENGTHS),
    "feature": tuple(FEATURES),
    "query_len": (1, 3, 200),
    "num_splits": (0, 1, 3),
}


Level = tuple[int, int]  # (number of the axis, number of the level)


def _pair(one: Level, other: Level) -> tuple[Level, Level]:
    return (one, other) if one < other else (other, one)


def pairwise(axes: Mapping[str, Sequence[Any]]) -> list[Levels]:
    """Points of the axes that cover all pairs of levels. Greedy: each point begins with a pair
    that is missing, and takes on every other axis the level that adds most missing pairs, the
    least used one among equals."""
    names = list(axes)
    missing = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(range(len(names)), 2)
        for i in range(len(axes[names[a]]))
        for j in range(len(axes[names[b]]))
    }
    used = [[0] * len(axes[name]) for name in names]
    points = []
    while missing:
        taken = dict(min(missing))
        for axis in sorted(set(range(len(names))) - set(taken), key=lambda a: -len(axes[names[a]])):
            gains = [
                sum(_pair((axis, level), other) in missing for other in taken.items())
                for level in range(len(axes[names[axis]]))
            ]
            taken[axis] = max(range(len(gains)), key=lambda i, g=gains, u=used[axis]: (g[i], -u[i]))
        for axis, level in taken.items():
            used[axis][level] += 1
        missing -= set(itertools.combinations(sorted(taken.items()), 2))
        points.append({names[a]: axes[names[a]][taken[a]] for a in range(len(names))})
    return points


def case_of(number: int, levels: Levels) -> Case:
    """Two sequences: one of the length, with as much of the query_len as it has tokens (padding
    if it has none), and one that is long enough for the whole query_len."""
    block_size, query_len = levels["block_size"], levels["query_len"]
    length = LENGTHS[levels["length"]](block_size, POWERS[number % len(POWERS)])
    kv_heads = 1 if levels["group"] == 64 else 2
    return Case(
        name=f"{number}-"
        + "-".join(str(level).removeprefix("torch.") for level in levels.values()),
        rows=((min(query_len, length or query_len), length), (query_len, query_len + 37)),
        num_heads=levels["group"] * kv_heads,
        num_kv_heads=kv_heads,
        head_dim=levels["head_dim"],
        block_size=block_size,
        dtype=levels["dtype"],
        num_splits=levels["num_splits"],
        **FEATURES[levels["feature"]],
    )


COVER = tuple(case_of(number, levels) for number, levels in enumerate(pairwise(AXES)))
