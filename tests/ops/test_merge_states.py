"""merge_attention_states against the oracle and against attention over all keys at once."""

from __future__ import annotations

import math

import pytest
import torch
from operands import DTYPES, LAYOUTS, Arena, assert_matches, assert_same
from torch import Tensor

from pagedkv import ops
from pagedkv.ops import reference

SHAPES = {
    "smollm2": (7, 9, 64),
    "odd": (3, 5, 46),
    "one": (1, 1, 1),
    "no_tokens": (0, 4, 64),
    "many": (200, 4, 128),
}


def random_lse(num_tokens: int, num_heads: int) -> Tensor:
    """Natural logarithms, some far apart, and some rows empty."""
    lse = 30 * torch.randn(num_tokens, num_heads)
    lse[torch.rand(num_tokens, num_heads) < 0.3] = -math.inf
    return lse


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_merge_matches_the_oracle(shape, dtype, layout) -> None:
    torch.manual_seed(0)
    arena = Arena()
    lse_a, lse_b = random_lse(*shape[:2]), random_lse(*shape[:2])
    # The out of an empty side is poison.
    out_a = torch.randn(shape).masked_fill((lse_a == -math.inf).unsqueeze(-1), math.nan)
    out_b = torch.randn(shape).masked_fill((lse_b == -math.inf).unsqueeze(-1), math.inf)
    out_a, out_b = arena.make(out_a.to(dtype), layout), arena.make(out_b.to(dtype), "sliced")
    lse_a, lse_b = arena.make(lse_a, "sliced"), arena.make(lse_b).t().contiguous().t()
    out = arena.make(torch.full(shape, math.nan).to(dtype), layout)
    lse = arena.make(torch.full(shape[:2], math.nan), "sliced")
    oracle, oracle_lse = torch.empty(shape), torch.empty(shape[:2])
    reference.merge_attention_states(oracle, oracle_lse, out_a, lse_a, out_b, lse_b)
    arena.remember()
    ops.merge_attention_states(out, lse, out_a, lse_a, out_b, lse_b)
    arena.check_untouched([out, lse])
    assert_matches(out, oracle)
    assert_matches(lse, oracle_lse, what="lse")
    both_empty = (lse_a == -math.inf) & (lse_b == -math.inf)
    assert (out[both_empty] == 0).all()
    assert (lse[both_empty] == -math.inf).all()


def test_without_lse_out_is_the_same() -> None:
    a, b = torch.randn(2, 4, 3, 16)
    lse_a, lse_b = torch.randn(2, 4, 3)
    out, other, lse = torch.empty_like(a), torch.empty_like(a), torch.empty(4, 3)
    ops.merge_attention_states(out, lse, a, lse_a, b, lse_b)
    ops.merge_attention_states(other, None, a, lse_a, b, lse_b)
    assert_same(other, out)


@pytest.mark.parametrize("side", ["a", "b"])
def test_merging_in_place_is_the_same(side) -> None:
    a, b = torch.randn(2, 4, 3, 16)
    lse_a, lse_b = torch.randn(2, 4, 3)
    out, lse = torch.empty_like(a), torch.empty(4, 3)
    ops.merge_attention_states(out, lse, a, lse_a, b, lse_b)
    into, into_lse = (a, lse_a) if side == "a" else (b, lse_b)
    ops.merge_attention_states(into, into_lse, a, lse_a, b, lse_b)
    assert_same(into, out)
    assert_same(into_lse, lse, "lse")


def test_merged_parts_are_the_whole() -> None:
    # Softmax over 50 keys in one go, and over 20 and 30 of them merged.
    torch.manual_seed(0)
    logits, values = torch.randn(6, 2, 50), torch.randn(50, 2, 16)

    def attend(keys: slice) -> tuple[Tensor, Tensor]:
        part = logits[..., keys]
        return torch.einsum("thk,khd->thd", part.softmax(-1), values[keys]), part.logsumexp(-1)

    out, lse = torch.empty(6, 2, 16), torch.empty(6, 2)
    ops.merge_attention_states(out, lse, *attend(slice(0, 20)), *attend(slice(20, 50)))
    whole, whole_lse = attend(slice(0, 50))
    torch.testing.assert_close(out, whole)
    torch.testing.assert_close(lse, whole_lse)
