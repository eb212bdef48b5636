"""Every refusal of the small layers, by its message."""

from __future__ import annotations

import math

import pytest
import torch
from refusing import Refusal, assert_refused, repeated, transposed_rows

HALF = torch.Tensor.half
DOUBLE = torch.Tensor.double

REFUSALS = [
    # ---- rms_norm
    Refusal(
        "rms_norm",
        {"input": DOUBLE},
        "input has dtype float64, expected float32, bfloat16 or float16",
    ),
    Refusal("rms_norm", {"out": HALF}, "out has dtype float16, expected float32 as input"),
    Refusal("rms_norm", {"weight": HALF}, "weight has dtype float16, expected float32 as input"),
    Refusal(
        "rms_norm",
        {"input": lambda t: t[0]},
        "input has shape [8], expected [num_tokens, hidden]",
    ),
    Refusal(
        "rms_norm",
        {"input": transposed_rows},
        "input has strides [1, 3], expected a contiguous last dimension",
    ),
    Refusal(
        "rms_norm",
        {"out": transposed_rows},
        "out has strides [1, 3], expected a contiguous last dimension",
    ),
    Refusal(
        "rms_norm",
        {"weight": lambda t: t.repeat_interleave(2)[::2]},
        "weight has strides [2], expected a contiguous last dimension",
    ),
    Refusal(
        "rms_norm",
        {"out": repeated},
        "out has strides [0, 1], expected no overlap in a tensor that is written",
    ),
    Refusal(
        "rms_norm",
        {"out": lambda t: t[:2]},
        "out has shape [2, 8], expected [num_tokens, hidden] = [3, 8]",
    ),
    Refusal(
        "rms_norm",
        {"weight": lambda t: t[:4]},
        "weight has shape [4], expected [hidden] = [8]",
    ),
    Refusal(
        "rms_norm",
        {"input": lambda t: t[:, :0], "out": lambda t: t[:, :0], "weight": lambda t: t[:0]},
        "hidden is 0, expected at least 1",
    ),
    Refusal("rms_norm", {"epsilon": math.nan}, "epsilon is nan, expected a finite float32"),
    Refusal("rms_norm", {"epsilon": 1e300}, "epsilon is 1e+300, expected a finite float32"),
    Refusal(
        "rms_norm", {"epsilon": -1e-5}, "epsilon is -1e-05, expected a finite float32 of at least 0"
    ),
    # ---- fused_add_rms_norm
    Refusal(
        "fused_add_rms_norm",
        {"input": torch.Tensor.long},
        "input has dtype int64, expected float32, bfloat16 or float16",
    ),
    Refusal(
        "fused_add_rms_norm",
        {"residual": HALF},
        "residual has dtype float16, expected float32 as input",
    ),
    Refusal(
        "fused_add_rms_norm",
        {"weight": HALF},
        "weight has dtype float16, expected float32 as input",
    ),
    Refusal(
        "fused_add_rms_norm",
        {"input": repeated},
        "input has strides [0, 1], expected no overlap in a tensor that is written",
    ),
    Refusal(
        "fused_add_rms_norm",
        {"residual": repeated},
        "residual has strides [0, 1], expected no overlap in a tensor that is written",
    ),
    Refusal(
        "fused_add_rms_norm",
        {"residual": lambda t: t[:2]},
        "residual has shape [2, 8], expected [num_tokens, hidden] = [3, 8]",
    ),
    Refusal(
        "fused_add_rms_norm",
        {"weight": lambda t: t[:4]},
        "weight has shape [4], expected [hidden] = [8]",
    ),
    Refusal(
        "fused_add_rms_norm",
        {"input": lambda t: t[:, :0], "residual": lambda t: t[:, :0], "weight": lambda t: t[:0]},
        "hidden is 0, expected at least 1",
    ),
    Refusal(
        "fused_add_rms_norm", {"epsilon": math.inf}, "epsilon is inf, expected a finite float32"
    ),
    # ---- rotary_embedding
    Refusal(
        "rotary_embedding",
        {"query": torch.Tensor.int},
        "query has dtype int32, expected float32, bfloat16 or float16",
    ),
    Refusal("rotary_embedding", {"key": HALF}, "key has dtype float16, expected float32 as query"),
    Refusal(
        "rotary_embedding",
        {"positions": torch.Tensor.int},
        "positions has dtype int32, expected int64",
    ),
    Refusal(
        "rotary_embedding",
        {"cos_sin_cache": torch.Tensor.bfloat16},
        "cos_sin_cache has dtype bfloat16, expected float32",
    ),
    Refusal(
        "rotary_embedding",
        {"query": lambda t: t.flatten(1)},
        "query has shape [3, 32], expected [num_tokens, num_heads, head_dim]",
    ),
    Refusal(
        "rotary_embedding",
        {"key": transposed_rows},
        "key has strides [16, 1, 2], expected a contiguous last dimension",
    ),
    Refusal(
        "rotary_embedding",
        {"key": repeated},
        "key has strides [0, 8, 1], expected no overlap in a tensor that is written",
    ),
    Refusal(
        "rotary_embedding",
        {"key": lambda t: t[:2]},
        "key has shape [2, 2, 8], expected [num_tokens, num_kv_heads, head_dim] = [3, *, 8]",
    ),
    Refusal(
        "rotary_embedding",
        {"positions": lambda t: t[:2]},
        "positions has shape [2], expected [num_tokens] = [3]",
    ),
    Refusal(
        "rotary_embedding",
        {"positions": lambda t: t.repeat_interleave(2)[::2]},
        "positions has strides [2], expected a contiguous last dimension",
    ),
    Refusal(
        "rotary_embedding",
        {"cos_sin_cache": lambda _: torch.rand(5, 10)},
        "rotary_dim (columns of cos_sin_cache) is 10, expected 2 to 8",
    ),
    Refusal(
        "rotary_embedding",
        {"cos_sin_cache": lambda _: torch.rand(5, 0)},
        "rotary_dim (columns of cos_sin_cache) is 0, expected 2 to 8",
    ),
    Refusal(
        "rotary_embedding",
        {"cos_sin_cache": lambda _: torch.rand(5, 5)},
        "rotary_dim (columns of cos_sin_cache) is 5, expected an even number",
    ),
    Refusal(
        "rotary_embedding",
        {"positions": torch.tensor([0, 5, 1])},
        "positions[1] is 5, expected 0 to 4 (rows of cos_sin_cache)",
    ),
    Refusal(
        "rotary_embedding",
        {"positions": torch.tensor([0, 1, -1])},
        "positions[2] is -1, expected 0 to 4 (rows of cos_sin_cache)",
    ),
    # ---- silu_and_mul, gelu_and_mul
    Refusal(
        "silu_and_mul",
        {"input": DOUBLE},
        "input has dtype float64, expected float32, bfloat16 or float16",
    ),
    Refusal("silu_and_mul", {"out": HALF}, "out has dtype float16, expected float32 as input"),
    Refusal(
        "silu_and_mul",
        {"out": repeated},
        "out has strides [0, 1], expected no overlap in a tensor that is written",
    ),
    Refusal(
        "silu_and_mul",
        {"input": transposed_rows},
        "input has strides [1, 3], expected a contiguous last dimension",
    ),
    Refusal(
        "silu_and_mul",
        {"input": lambda t: t[:, :7]},
        "input has shape [3, 7], expected an even number of columns",
    ),
    Refusal(
        "silu_and_mul",
        {"out": lambda t: t[:, :3]},
        "out has shape [3, 3], expected [num_tokens, intermediate] = [3, 4]",
    ),
    Refusal(
        "gelu_and_mul", {"approximate": "erf"}, "approximate is 'erf', expected 'none' or 'tanh'"
    ),
    Refusal(
        "gelu_and_mul",
        {"out": lambda t: t[:2]},
        "out has shape [2, 4], expected [num_tokens, intermediate] = [3, 4]",
    ),
]


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda r: r.name)
def test_it_is_refused(refusal) -> None:
    assert_refused(refusal)
