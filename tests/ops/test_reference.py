"""The oracle itself, against torch's attention and against sums written out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from pagedkv.ops import reference


def paged(keys: Tensor, values: Tensor, block_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Caches and table that hold one sequence's [seq_len, num_kv_heads, head_dim] in shuffled
    blocks, NaN elsewhere."""
    seq_len, num_kv_heads, head_dim = keys.shape
    num_used = -(-seq_len // block_size)
    caches = [torch.full((num_used + 3, num_kv_heads, block_size, head_dim), math.nan)] * 2
    caches = [cache.clone() for cache in caches]
    table = torch.randperm(num_used + 3)[:num_used]
    for j in range(seq_len):
        for cache, rows in zip(caches, (keys, values), strict=True):
            cache[table[j // block_size], :, j % block_size] = rows[j]
    return caches[0], caches[1], table.int().unsqueeze(0)


def run(query: Tensor, keys: Tensor, values: Tensor, **options: object) -> tuple[Tensor, Tensor]:
    out = torch.full_like(query, math.nan)
    lse = torch.full(query.shape[:2], math.nan)
    caches = paged(keys, values, block_size=4)
    lens, starts = torch.tensor([len(keys)]).int(), torch.tensor([0, len(query)]).int()
    reference.paged_attention(
        out, lse, query, *caches, lens, starts, max_query_len=len(query), scale=0.3, **options
    )
    return out, lse


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("query_len", [1, 5, 11])
def test_attention_is_torch_s_attention(query_len: int, causal: bool) -> None:
    torch.manual_seed(0)
    query, keys = torch.randn(query_len, 6, 8), torch.randn(11, 2, 8)
    values = torch.randn(11, 2, 8)
    out, lse = run(query, keys, values, causal=causal)
    visible = torch.ones(query_len, 11, dtype=torch.bool).tril(11 - query_len)
    expected = functional.scaled_dot_product_attention(
        query.transpose(0, 1),
        keys.transpose(0, 1),
        values.transpose(0, 1),
        attn_mask=visible if causal else None,
        scale=0.3,
        enable_gqa=True,
    )
    torch.testing.assert_close(out, expected.transpose(0, 1))
    logits = 0.3 * torch.einsum("qhd,khd->hqk", query, keys.repeat_interleave(3, dim=1))
    if causal:
        logits = logits.masked_fill(~visible, -math.inf)
    torch.testing.assert_close(lse, logits.logsumexp(-1).T)


def test_window_alibi_and_soft_cap_are_the_written_formula() -> None:
    torch.manual_seed(0)
    query, keys, values = torch.randn(3, 2, 4), torch.randn(7, 1, 4), torch.randn(7, 1, 4)
    slopes = torch.tensor([0.5, 0.25])
    out, lse = run(query, keys, values, window=3, alibi_slopes=slopes, soft_cap=2.0)
    for row, position in enumerate((4, 5, 6)):
        for head in range(2):
            weights = {}
            for j in range(position - 2, position + 1):  # three keys, its own included
                logit = 0.3 * float(query[row, head] @ keys[j, 0])
                logit = 2.0 * math.tanh(logit / 2.0) + float(slopes[head]) * (j - position)
                weights[j] = math.exp(logit)
            total = sum(weights.values())
            expected = sum(weight / total * values[j, 0] for j, weight in weights.items())
            torch.testing.assert_close(out[row, head], expected)
            assert lse[row, head].item() == pytest.approx(math.log(total), rel=1e-5)


def test_rows_of_an_empty_sequence_are_zero_and_rows_outside_stay() -> None:
    out, lse = torch.full((3, 1, 4), 7.0), torch.full((3, 1), 7.0)
    cache = torch.full((1, 1, 2, 4), math.nan)
    reference.paged_attention(
        out,
        lse,
        torch.randn(3, 1, 4),
        cache,
        cache,
        torch.tensor([[99]]).int(),
        torch.tensor([0]).int(),
        torch.tensor([0, 2]).int(),
        max_query_len=2,
        scale=1.0,
    )
    assert out[:, 0, 0].tolist() == [0.0, 0.0, 7.0]
    assert lse.flatten().tolist() == [-math.inf, -math.inf, 7.0]


def test_quantising_saturates_and_keeps_nan() -> None:
    real = torch.tensor([1.0, 1e6, -math.inf, math.nan, 0.0])
    stored = reference.quantize(real, torch.tensor([0.5]), torch.float8_e4m3fn).float()
    assert stored[:3].tolist() == [2.0, 448.0, -448.0]
    assert math.isnan(stored[3])
    assert stored[4] == 0
