"""The cover of paged attention's cases is pairwise. Runs without a GPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from gpu_attention_cases import E4M3, E5M2, Case
from pairwise_cover import COVER, pairwise

# What it means for a case to have a level, said again without the cover's own tables.
POWERS = [2**k for k in range(6, 13)]
HAS: dict[str, dict[str, Callable[[Case], bool]]] = {
    "dtype": {
        str(dtype): lambda c, d=dtype: c.dtype == d
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
    },
    "head_dim": {
        str(dim): lambda c, d=dim: c.head_dim == d for dim in (64, 80, 96, 112, 128, 192, 256)
    },
    "group": {
        str(group): lambda c, g=group: c.num_heads == g * c.num_kv_heads
        for group in (1, 2, 4, 7, 8, 16, 64)
    },
    "block_size": {
        str(size): lambda c, s=size: c.block_size == s
        for size in (1, 3, 8, 16, 32, 64, 100, 128, 256)
    },
    "length": {
        "0": lambda c: c.rows[0][1] == 0,
        "1": lambda c: c.rows[0][1] == 1,
        "B - 1": lambda c: c.rows[0][1] == c.block_size - 1,
        "B": lambda c: c.rows[0][1] == c.block_size,
        "B + 1": lambda c: c.rows[0][1] == c.block_size + 1,
        "2^k - 1": lambda c: c.rows[0][1] + 1 in POWERS,
        "2^k": lambda c: c.rows[0][1] in POWERS,
        "2^k + 1": lambda c: c.rows[0][1] - 1 in POWERS,
        "100k": lambda c: c.rows[0][1] == 100_000,
    },
    "feature": {
        "none": lambda c: c.cache_dtype is None and not (c.window or c.alibi or c.soft_cap),
        "window": lambda c: c.window > 1,
        "alibi": lambda c: c.alibi,
        "soft_cap": lambda c: c.soft_cap > 0,
        "e4m3": lambda c: c.cache_dtype == E4M3,
        "e5m2": lambda c: c.cache_dtype == E5M2,
    },
    "query_len": {
        "decode": lambda c: c.rows[1][0] == 1,
        "few": lambda c: c.rows[1][0] == 3,
        "chunk": lambda c: c.rows[1][0] == 200,
    },
    "num_splits": {
        "chosen": lambda c: c.num_splits == 0,
        "one pass": lambda c: c.num_splits == 1,
        "pieces": lambda c: c.num_splits > 1,
    },
}


@pytest.mark.parametrize(("one", "other"), list(itertools.combinations(HAS, 2)))
def test_every_two_levels_of_two_axes_occur_in_one_case(one: str, other: str) -> None:
    missing = [
        (a, b)
        for a, has_a in HAS[one].items()
        for b, has_b in HAS[other].items()
        if not any(has_a(case) and has_b(case) for case in COVER)
    ]
    assert not missing


def test_the_cover_is_small() -> None:
    # Two axes of 9 levels need 81 cases; all combinations would be two million.
    assert 81 <= len(COVER) <= 120
    assert len({case.name for case in COVER}) == len(COVER)


def test_a_cover_of_two_axes_is_their_product() -> None:
    points = pairwise({"a": (1, 2), "b": "xyz"})
    assert sorted((p["a"], p["b"]) for p in points) == [(a, b) for a in (1, 2) for b in "xyz"]


def test_every_sequence_has_its_query_tokens() -> None:
    for case in COVER:
        for query_len, seq_len in case.rows:
            assert seq_len == 0 or 1 <= query_len <= seq_len
