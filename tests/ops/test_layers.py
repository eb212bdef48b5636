"""RMS norm, rotary embedding and gated activations against the oracle, in awkward memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cases import ROTARY_CORNERS, ROTARY_CORRECTNESS, ROWS_CORNERS, ROWS_CORRECTNESS
from operands import DTYPES, LAYOUTS, Arena, assert_matches, assert_same
from torch import Tensor
from torch.nn import functional

from pagedkv import ops
from pagedkv.ops import reference

ROWS = ROWS_CORRECTNESS + ROWS_CORNERS
ROTARY = ROTARY_CORRECTNESS + ROTARY_CORNERS


def name_of(value: object) -> str:
    return str(getattr(value, "name", value)).removeprefix("torch.")


def nan_like(values: Tensor) -> Tensor:
    return torch.full_like(values, torch.nan)


def every_row_case(test: Callable[..., None]) -> Callable[..., None]:
    for name, values in (("layout", LAYOUTS), ("dtype", DTYPES), ("case", ROWS)):
        test = pytest.mark.parametrize(name, values, ids=name_of)(test)
    return test


@every_row_case
def test_rms_norm_matches_the_oracle(case, dtype, layout) -> None:
    torch.manual_seed(0)
    arena = Arena()
    x = arena.make(torch.randn(case.num_tokens, case.width).to(dtype), layout)
    weight = arena.make(torch.randn(case.width).to(dtype), "offset")
    out = arena.make(nan_like(x), layout)
    arena.remember()
    ops.rms_norm(out, x, weight, 1e-5)
    arena.check_untouched([out])
    oracle = torch.empty(x.shape)
    reference.rms_norm(oracle, x, weight, 1e-5)
    plain = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight
    assert_matches(out, oracle, plain)


@every_row_case
def test_fused_add_rms_norm_matches_the_oracle(case, dtype, layout) -> None:
    torch.manual_seed(0)
    arena = Arena()
    x = arena.make(torch.randn(case.num_tokens, case.width).to(dtype), layout)
    residual = arena.make(torch.randn(case.num_tokens, case.width).to(dtype), "sliced")
    weight = arena.make(torch.randn(case.width).to(dtype), "offset")
    sum_oracle, norm_oracle = residual.clone(), x.clone().float()
    reference.fused_add_rms_norm(norm_oracle, sum_oracle, weight, 1e-5)
    total = x + residual
    plain = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-5) * weight
    arena.remember()
    ops.fused_add_rms_norm(x, residual, weight, 1e-5)
    arena.check_untouched([x, residual])
    assert_same(residual, sum_oracle, "residual")
    assert_matches(x, norm_oracle, plain)


def test_rms_norm_in_place_is_the_same() -> None:
    x = torch.randn(4, 576)
    weight = torch.randn(576)
    out = torch.empty_like(x)
    ops.rms_norm(out, x, weight, 1e-6)
    ops.rms_norm(x, x, weight, 1e-6)
    assert_same(x, out)


def test_rms_norm_of_large_fp16_values_does_not_overflow() -> None:
    x = torch.full((2, 64), 6e4, dtype=torch.float16)  # the square is not an fp16
    out = torch.empty_like(x)
    ops.rms_norm(out, x, torch.ones(64, dtype=torch.float16), 0.0)
    assert torch.equal(out, torch.ones_like(out))


ACTIVATIONS = {
    "silu": (
        ops.silu_and_mul,
        reference.silu_and_mul,
        lambda gate, up: functional.silu(gate) * up,
    ),
    "gelu": (
        ops.gelu_and_mul,
        reference.gelu_and_mul,
        lambda gate, up: functional.gelu(gate) * up,
    ),
    "gelu_tanh": (
        lambda out, x: ops.gelu_and_mul(out, x, "tanh"),
        lambda out, x: reference.gelu_and_mul(out, x, "tanh"),
        lambda gate, up: functional.gelu(gate, approximate="tanh") * up,
    ),
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@every_row_case
def test_gated_activations_match_the_oracle(case, dtype, layout, activation) -> None:
    torch.manual_seed(0)
    op, oracle_op, plain_op = ACTIVATIONS[activation]
    arena = Arena()
    x = arena.make((3 * torch.randn(case.num_tokens, 2 * case.width)).to(dtype), layout)
    out = arena.make(torch.full((case.num_tokens, case.width), torch.nan).to(dtype), layout)
    arena.remember()
    op(out, x)
    arena.check_untouched([out])
    oracle = torch.empty(out.shape)
    oracle_op(oracle, x)
    assert_matches(out, oracle, plain_op(*x.chunk(2, dim=-1)))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_activations_in_the_tails(activation) -> None:
    # Every magnitude from denormal to infinity; the exponentials inside overflow and underflow.
    op, oracle_op, _ = ACTIVATIONS[activation]
    magnitudes = torch.tensor([0.0, 1e-40, 1e-20, 1e-4, 0.1, 1, 5, 9, 12, 20, 88, 104, 1e4, 3e38])
    gate = torch.cat([magnitudes, -magnitudes, torch.tensor([torch.inf, torch.nan])])
    x = torch.stack([gate, torch.ones_like(gate)], dim=1)
    out, oracle = torch.empty(len(gate), 1), torch.empty(len(gate), 1)
    op(out, x)
    oracle_op(oracle, x)
    torch.testing.assert_close(out, oracle, rtol=2e-6, atol=5e-6, equal_nan=True)


@pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "gptj"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("case", ROTARY, ids=name_of)
def test_rotary_embedding_matches_the_oracle(case, dtype, layout, is_neox) -> None:
    torch.manual_seed(0)
    arena = Arena()
    shape = (case.num_tokens, case.num_heads, case.head_dim)
    query = arena.make(torch.randn(shape).to(dtype), layout)
    key = arena.make(
        torch.randn(case.num_tokens, case.num_kv_heads, case.head_dim).to(dtype), "sliced"
    )
    # Shuffled, repeated and, as after a prefix hit, not from 0. Rows that no position names are
    # poison.
    positions = torch.randint(3, 40, (case.num_tokens,))
    table = torch.full((50, case.rotary_dim), torch.nan)
    angles = torch.rand(50, case.rotary_dim // 2) * 6.3
    table[positions] = torch.cat([angles.cos(), angles.sin()], dim=1)[positions]
    table = arena.make(table, "sliced")
    oracles = query.clone().float(), key.clone().float()
    reference.rotary_embedding(positions, *oracles, table, is_neox)
    plains = query.clone(), key.clone()
    plain_rotary(positions, plains, table, is_neox)
    rest = query[..., case.rotary_dim :].clone()
    arena.remember()
    ops.rotary_embedding(positions, query, key, table, is_neox)
    arena.check_untouched([query, key])
    assert_same(query[..., case.rotary_dim :], rest, "elements that are not rotated")
    assert_matches(query, oracles[0], plains[0], "query")
    assert_matches(key, oracles[1], plains[1], "key")


def plain_rotary(positions: Tensor, heads: tuple[Tensor, ...], table: Tensor, neox: bool) -> None:
    """The oracle's mathematics with every product and sum rounded to the heads' dtype."""
    half = table.size(1) // 2
    for x in heads:
        cosines = table[positions, None, :half].to(x.dtype)
        sines = table[positions, None, half:].to(x.dtype)
        rotated = x[..., : 2 * half]
        if neox:
            first, second = rotated[..., :half].clone(), rotated[..., half:].clone()
        else:
            first, second = rotated[..., 0::2].clone(), rotated[..., 1::2].clone()
        turned = first * cosines - second * sines, second * cosines + first * sines
        rotated.copy_(torch.cat(turned, -1) if neox else torch.stack(turned, -1).flatten(-2))


def test_rotary_embedding_by_a_table_row_turns_by_its_angle() -> None:
    # Independent of the oracle: complex multiplication.
    positions = torch.tensor([4, 0, 7])
    angles = torch.outer(torch.arange(8.0), torch.tensor([1.0, 0.1, 0.01, 0.001]))
    table = torch.cat([angles.cos(), angles.sin()], dim=1)
    query, key = torch.randn(3, 2, 8), torch.randn(3, 1, 8)
    expected = torch.view_as_complex(query.view(3, 2, 4, 2)) * torch.polar(
        torch.ones(3, 1, 4), angles[positions].unsqueeze(1)
    )
    ops.rotary_embedding(positions, query, key, table, False)
    torch.testing.assert_close(query, torch.view_as_real(expected).flatten(2))
