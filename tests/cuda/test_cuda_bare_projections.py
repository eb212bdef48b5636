"""Ops that take a projection's bare result, on the GPU against fp64: on vectors and element by
element, rows of more and of fewer vectors than a block has threads.
"""

from __future__ import annotations

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
from operands import DTYPES, assert_same

from pagedkv import ops

E4M3 = torch.float8_e4m3fn


@pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "gptj"])
@pytest.mark.parametrize("shift", [0, 1], ids=["aligned", "shifted"])
@pytest.mark.parametrize(
    ("dtype", "cache_dtype"), [*((one, None) for one in DTYPES), (torch.bfloat16, E4M3)], ids=str
)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", SIZES)
def test_the_fused_rotation_finishes_a_projection(
    size, form, dtype, cache_dtype, shift, is_neox, device
) -> None:
    BareProjection(size, form, dtype, cache_dtype, shift, device).check(ops, is_neox)


@pytest.mark.parametrize("shift", [0, 1], ids=["aligned", "shifted"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_tokens", "width", "hidden"),
    [(5, 14336, 4096), (300, 3072, 1024), (3, 99, 7), (2, 40_000, 20_000), (4, 8, 64), (0, 8, 8)],
)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gates_finish_a_projection(
    activation, num_tokens, width, hidden, dtype, shift, device
) -> None:
    op, options, _ = ACTIVATIONS[activation]
    residual = rows(num_tokens, hidden + 8, dtype, device)[:, shift : shift + hidden]
    bare = 3 * torch.randn(num_tokens, 2 * width + 8, device=device)
    x = (bare / exact_scales(residual).float()).to(dtype)[:, shift : shift + 2 * width]
    wide = torch.full((num_tokens, width + 8), torch.nan, dtype=dtype, device=device)
    out = wide[:, shift : shift + width]
    op(out, x, **options, residual=residual, residual_epsilon=EPSILON)
    # One rounding of 16 bits; in fp32 those of the sum, of its root and of both halves. What is
    # left of a half in 1 + erf(gate) has fp32's rounding of the whole.
    rounding = torch.finfo(dtype).eps * (1 if dtype.itemsize == 2 else 8)
    exact = exact_gate(activation, x, residual)
    gate, up = (x.double() * exact_scales(residual)).chunk(2, dim=-1)
    allowed = rounding * (1 + exact.abs()) + torch.finfo(torch.float32).eps * (gate * up).abs()
    beyond = ((out.double() - exact).abs() / allowed).amax() if out.numel() else 0
    assert beyond <= 1
    again = torch.empty_like(out)
    op(again, x, **options, residual=residual, residual_epsilon=EPSILON)
    assert_same(again, out)
    out.fill_(torch.nan)
    assert wide.isnan().all()  # nothing beside the result was written
