"""Every refusal of fused_rotary_reshape_and_cache, by its message."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from refusing import Refusal, assert_refused, repeated, transposed_rows

OP = "fused_rotary_reshape_and_cache"
HALF = torch.Tensor.half
FLOAT8 = "float8_e4m3fn"
CACHE = "[num_blocks, num_kv_heads, block_size, head_dim]"
KEYS = "[num_tokens, num_kv_heads, head_dim]"
QUERIES = "[num_tokens, num_heads, head_dim]"


def both(change: Any) -> dict[str, Any]:
    return {"key_cache": change, "value_cache": change}


PLAIN: list[tuple[dict[str, Any], str]] = [
    (
        {"query": torch.Tensor.double},
        "query has dtype float64, expected float32, bfloat16 or float16",
    ),
    ({"key": HALF}, "key has dtype float16, expected float32 as query"),
    ({"value": HALF}, "value has dtype float16, expected float32 as query"),
    (both(HALF), "key_cache has dtype float16, expected float32 as query, or a float8"),
    ({"value_cache": HALF}, "value_cache has dtype float16, expected float32 as key_cache"),
    (
        both(lambda t: t.to(torch.float8_e4m3fn)),
        f"k_scale is missing, expected a scale with a cache of dtype {FLOAT8}",
    ),
    (
        {"k_scale": torch.ones(1)},
        "k_scale is given, expected none with a cache of dtype float32",
    ),
    ({"positions": torch.Tensor.int}, "positions has dtype int32, expected int64"),
    ({"slot_mapping": torch.Tensor.int}, "slot_mapping has dtype int32, expected int64"),
    ({"cos_sin_cache": HALF}, "cos_sin_cache has dtype float16, expected float32"),
    ({"query": lambda t: t[0]}, f"query has shape [4, 8], expected {QUERIES}"),
    (
        {"query": transposed_rows},
        "query has strides [32, 1, 4], expected a contiguous last dimension",
    ),
    (
        {"query": repeated},
        "query has strides [0, 8, 1], expected no overlap in a tensor that is written",
    ),
    (
        {"key": transposed_rows},
        "key has strides [16, 1, 2], expected a contiguous last dimension",
    ),
    (
        {"value": transposed_rows},
        "value has strides [16, 1, 2], expected a contiguous last dimension",
    ),
    (
        {"key_cache": transposed_rows},
        "key_cache has strides [32, 16, 1, 2], expected a contiguous last dimension",
    ),
    (
        {"value_cache": repeated},
        "value_cache has strides [0, 16, 8, 1], expected no overlap in a tensor that is written",
    ),
    (
        {"positions": lambda t: t.repeat_interleave(2)[::2]},
        "positions has strides [2], expected a contiguous last dimension",
    ),
    (
        {"slot_mapping": lambda t: t.repeat_interleave(2)[::2]},
        "slot_mapping has strides [2], expected a contiguous last dimension",
    ),
    (
        {"cos_sin_cache": lambda t: t[0]},
        "cos_sin_cache has shape [6], expected [max_position, rotary_dim]",
    ),
    (
        {"value_cache": lambda t: t[:3]},
        f"value_cache has shape [3, 2, 2, 8], expected {CACHE} = [4, 2, 2, 8]",
    ),
    (
        {"query": lambda t: t[..., :6]},
        f"query has shape [3, 4, 6], expected {QUERIES} = [3, *, 8]",
    ),
    ({"key": lambda t: t[:2]}, f"key has shape [2, 2, 8], expected {KEYS} = [3, 2, 8]"),
    ({"value": lambda t: t[:, :1]}, f"value has shape [3, 1, 8], expected {KEYS} = [3, 2, 8]"),
    ({"positions": lambda t: t[:2]}, "positions has shape [2], expected [num_tokens] = [3]"),
    ({"slot_mapping": lambda t: t[:2]}, "slot_mapping has shape [2], expected [num_tokens] = [3]"),
    (
        {"cos_sin_cache": lambda _: torch.rand(5, 10)},
        "rotary_dim (columns of cos_sin_cache) is 10, expected 2 to 8",
    ),
    (
        {"cos_sin_cache": lambda _: torch.rand(5, 5)},
        "rotary_dim (columns of cos_sin_cache) is 5, expected an even number",
    ),
    (
        {"positions": torch.tensor([0, 5, 1])},
        "positions[1] is 5, expected 0 to 4 (rows of cos_sin_cache)",
    ),
    (
        {"positions": torch.tensor([0, 1, -1])},
        "positions[2] is -1, expected 0 to 4 (rows of cos_sin_cache)",
    ),
    (
        {"slot_mapping": torch.tensor([0, 1, 8])},
        "slot_mapping[2] is 8, expected below 8 (num_blocks * block_size)",
    ),
]

WITH_FLOAT8: list[tuple[dict[str, Any], str]] = [
    ({"v_scale": None}, f"v_scale is missing, expected a scale with a cache of dtype {FLOAT8}"),
    ({"k_scale": torch.ones(3)}, "k_scale has shape [3], expected [1] or [2] (num_kv_heads)"),
    (
        {"k_scale": torch.tensor([0.0])},
        "k_scale[0] is 0, expected a finite number above 0",
    ),
    (
        {"v_scale": torch.tensor([1.0, math.nan])},
        "v_scale[1] is nan, expected a finite number above 0",
    ),
]

REFUSALS = [Refusal(OP, changes, message) for changes, message in PLAIN] + [
    Refusal(f"{OP}, fp8", changes, message) for changes, message in WITH_FLOAT8
]


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda r: r.name)
def test_the_fused_op_refuses_it(refusal: Refusal) -> None:
    assert_refused(refusal)
