"""Ops that take a projection's bare result and the rows whose scales it lacks, against fp64; what
they refuse of those.
"""

from __future__ import annotations

import math

import pytest
import torch
from bare_projections import (
    ACTIVATIONS,
    EPSILON,
    FORMS,
    SIZES,
    BareProjection,
    exact_gate,
    exact_scales,
    rows,
)
from operands import DTYPES, LAYOUTS, Arena, assert_matches
from refusing import Refusal, assert_refused, transposed_rows

from pagedkv import ops
from pagedkv.ops import reference

E4M3 = torch.float8_e4m3fn


def name_of(value: object) -> str:
    return str(value).removeprefix("torch.")


@pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "gptj"])
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize(
    ("dtype", "cache_dtype"),
    [(torch.float32, None), (torch.bfloat16, None), (torch.float16, E4M3)],
    ids=name_of,
)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [size for size in SIZES if size != "llama"])
def test_the_fused_rotation_finishes_a_projection(
    size, form, dtype, cache_dtype, shift, is_neox
) -> None:
    torch.manual_seed(0)
    BareProjection(size, form, dtype, cache_dtype, shift, "cpu").check(ops, is_neox)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", SIZES)
def test_the_oracle_finishes_a_projection(size, form) -> None:
    torch.manual_seed(0)
    BareProjection(size, form, torch.float32, None, 0, "cpu").check(reference, is_neox=True)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize(
    ("num_tokens", "width", "hidden"),
    [(5, 576, 192), (3, 99, 7), (2, 5000, 1), (0, 64, 8), (1, 1, 3000)],
)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gates_finish_a_projection(activation, num_tokens, width, hidden, dtype, layout) -> None:
    torch.manual_seed(0)
    op, options, _ = ACTIVATIONS[activation]
    arena = Arena()
    residual = arena.make(rows(num_tokens, hidden, dtype, "cpu"), layout)
    bare = 3 * torch.randn(num_tokens, 2 * width) / exact_scales(residual).float()
    x = arena.make(bare.to(dtype), layout)
    out = arena.make(torch.full((num_tokens, width), math.nan).to(dtype), layout)
    arena.remember()
    op(out, x, **options, residual=residual, residual_epsilon=EPSILON)
    arena.check_untouched([out])
    exact = exact_gate(activation, x, residual)
    assert_matches(out, exact.float())
    oracle = torch.empty(num_tokens, width)
    getattr(reference, op.__name__)(
        oracle, x, **options, residual=residual, residual_epsilon=EPSILON
    )
    assert_matches(oracle, exact.float())


def test_with_the_weights_of_the_norm_folded_in_it_is_the_norm_and_the_projection() -> None:
    torch.manual_seed(0)
    residual, norm, weight = rows(6, 24, torch.float32, "cpu"), torch.rand(24), torch.randn(32, 24)
    normed, out, want = torch.empty(6, 24), torch.empty(6, 16), torch.empty(6, 16)
    ops.rms_norm(normed, residual, norm, EPSILON)
    ops.silu_and_mul(want, normed @ weight.T)
    ops.silu_and_mul(out, residual @ (weight * norm).T, residual=residual, residual_epsilon=EPSILON)
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)


HIDDEN = "[num_tokens, hidden]"
OF_RESIDUAL = [
    ({"residual": torch.Tensor.half}, "residual has dtype float16, expected float32 as {first}"),
    ({"residual": lambda t: t[0]}, f"residual has shape [6], expected {HIDDEN}"),
    (
        {"residual": transposed_rows},
        "residual has strides [1, 3], expected a contiguous last dimension",
    ),
    ({"residual": lambda t: t[:2]}, f"residual has shape [2, 6], expected {HIDDEN} = [3, *]"),
    ({"residual": lambda t: t[:, :0]}, "hidden is 0, expected at least 1"),
    ({"residual_epsilon": -1.0}, "residual_epsilon is -1, expected a finite float32 of at least 0"),
    ({"residual_epsilon": math.inf}, "residual_epsilon is inf, expected a finite float32"),
]
BIAS = "[(num_heads + 2 * num_kv_heads) * head_dim]"
OF_BIAS = [
    ({"bias": torch.Tensor.half}, "bias has dtype float16, expected float32 as query"),
    ({"bias": lambda t: t.view(8, 8)}, f"bias has shape [8, 8], expected {BIAS}"),
    (
        {"bias": lambda t: t.repeat_interleave(2)[::2]},
        "bias has strides [2], expected a contiguous last dimension",
    ),
    ({"bias": lambda t: t[:63]}, f"bias has shape [63], expected {BIAS} = [64]"),
]
FIRST = {
    "silu_and_mul": "input",
    "gelu_and_mul": "input",
    "fused_rotary_reshape_and_cache": "query",
    "fused_norm_rotary_reshape_and_cache": "query",
}
REFUSALS = [
    Refusal(f"{op}, bare", changes, message.format(first=first))
    for op, first in FIRST.items()
    for changes, message in OF_RESIDUAL + (OF_BIAS if first == "query" else [])
]


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.name)
def test_refusal(refusal: Refusal) -> None:
    assert_refused(refusal)
