"""streamed_linear against the oracle, in awkward memory; its refusals by their messages."""

from __future__ import annotations

import math

import pytest
import torch
from operands import DTYPES, LAYOUTS, Arena, assert_matches, assert_same
from refusing import Refusal, assert_refused, repeated, transposed_rows

from pagedkv import ops
from pagedkv.ops import reference

EPILOGUES = ("store", "add", "silu_and_mul")
# num_tokens, in_features, out_features
SIZES = [(1, 576, 96), (3, 99, 34), (8, 1030, 18), (2, 1, 2), (0, 64, 32), (1, 8, 0)]


def name_of(value: object) -> str:
    return str(value).removeprefix("torch.")


@pytest.mark.parametrize("size", SIZES, ids=name_of)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("with_norm", [False, True], ids=["plain", "normed"])
def test_streamed_linear_matches_the_oracle(size, layout, dtype, epilogue, with_norm) -> None:
    torch.manual_seed(0)
    num_tokens, in_features, out_features = size
    columns = out_features // 2 if epilogue == "silu_and_mul" else out_features
    arena = Arena()
    x = arena.make(torch.randn(num_tokens, in_features).to(dtype), layout)
    weight = arena.make((torch.randn(out_features, in_features) / 8).to(dtype), layout)
    bias = arena.make(torch.randn(out_features).to(dtype), "offset") if with_norm else None
    norm = arena.make(torch.randn(in_features).to(dtype), "offset") if with_norm else None
    old = torch.randn(num_tokens, columns) if epilogue == "add" else torch.nan
    out = arena.make(torch.empty(num_tokens, columns).copy_(torch.as_tensor(old)).to(dtype), layout)
    oracle, plain = out.clone().float(), out.clone()
    options = {"bias": bias, "norm_weight": norm, "epsilon": 1e-5, "epilogue": epilogue}
    reference.streamed_linear(oracle, x, weight, **options)
    composed(plain, x, weight, **options)
    arena.remember()
    ops.streamed_linear(out, x, weight, **options)
    arena.check_untouched([out])
    assert_matches(out, oracle, plain)


def composed(out, x, weight, *, bias, norm_weight, epsilon, epilogue) -> None:
    """The same by the ops that it stands for, each rounded to the dtype."""
    if norm_weight is not None:
        normed = torch.empty_like(x)
        ops.rms_norm(normed, x, norm_weight, epsilon)
        x = normed
    product = torch.nn.functional.linear(x, weight, bias)
    if epilogue == "silu_and_mul":
        ops.silu_and_mul(out, product)
    else:
        out.copy_(out + product if epilogue == "add" else product)


@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_a_row_has_the_same_bits_whatever_rows_are_beside_it(epilogue) -> None:
    torch.manual_seed(0)
    x, weight, norm = torch.randn(5, 300), torch.randn(40, 300), torch.rand(300)
    outs = torch.randn(5, 20 if epilogue == "silu_and_mul" else 40)
    alone = [row.clone().unsqueeze(0) for row in outs]
    options = {"norm_weight": norm, "epsilon": 1e-5, "epilogue": epilogue}
    ops.streamed_linear(outs, x, weight, **options)
    for row, out, together in zip(x, alone, outs, strict=True):
        ops.streamed_linear(out, row.unsqueeze(0), weight, **options)
        assert_same(out[0], together)


OP = "streamed_linear"
REFUSALS = [
    Refusal(
        OP,
        {"input": torch.Tensor.double},
        "input has dtype float64, expected float32, bfloat16 or float16",
    ),
    *(
        Refusal(
            OP,
            {operand: torch.Tensor.half},
            f"{operand} has dtype float16, expected float32 as input",
        )
        for operand in ("out", "weight", "bias", "norm_weight")
    ),
    Refusal(
        OP,
        {"input": transposed_rows},
        "input has strides [1, 3], expected a contiguous last dimension",
    ),
    Refusal(
        OP,
        {"weight": transposed_rows},
        "weight has strides [1, 6], expected a contiguous last dimension",
    ),
    Refusal(
        OP, {"out": repeated}, "out has strides [0, 1], expected no overlap in a tensor that is"
    ),
    Refusal(
        OP,
        {"weight": lambda t: t[:, :4]},
        "weight has shape [6, 4], expected [out_features, in_features] = [*, 8]",
    ),
    Refusal(OP, {"bias": lambda t: t[:4]}, "bias has shape [4], expected [out_features] = [6]"),
    Refusal(
        OP,
        {"norm_weight": lambda t: t[:4]},
        "norm_weight has shape [4], expected [in_features] = [8]",
    ),
    Refusal(
        OP,
        {"out": lambda t: torch.zeros(3, 6)},
        "out has shape [3, 6], expected [num_tokens, out_features / 2] = [3, 3]",
    ),
    Refusal(
        OP,
        {"epilogue": "add"},
        "out has shape [3, 3], expected [num_tokens, out_features] = [3, 6]",
    ),
    Refusal(
        OP,
        {"weight": lambda t: t[:5], "bias": lambda t: t[:5]},
        "weight has shape [5, 8], expected an even number of rows for epilogue 'silu_and_mul'",
    ),
    Refusal(
        OP,
        {"epilogue": "gelu"},
        "epilogue is 'gelu', expected 'store', 'add' or 'silu_and_mul'",
    ),
    Refusal(
        OP,
        {
            "input": lambda t: t[:, :0],
            "weight": lambda t: t[:, :0],
            "norm_weight": lambda t: t[:0],
        },
        "in_features is 0, expected at least 1",
    ),
    Refusal(OP, {"epsilon": math.nan}, "epsilon is nan, expected a finite float32 of at least 0"),
    Refusal(OP, {"epsilon": -1.0}, "epsilon is -1, expected a finite float32 of at least 0"),
]


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.name)
def test_refusal(refusal: Refusal) -> None:
    assert_refused(refusal)


@pytest.mark.parametrize("other", ["input", "weight", "bias", "norm_weight"])
def test_a_result_that_shares_memory_with_an_operand_is_refused(other) -> None:
    memory = torch.randn(200)
    shapes = {"input": (3, 8), "weight": (6, 8), "bias": (6,), "norm_weight": (8,)}
    operands = {name: torch.randn(shape) for name, shape in shapes.items()}
    operands[other] = memory[10 : 10 + math.prod(shapes[other])].view(shapes[other])
    out = memory[: 3 * 6].view(3, 6)
    with pytest.raises(RuntimeError, match=f"out overlaps {other} in memory"):
        ops.streamed_linear(out, epsilon=1e-5, **operands)
