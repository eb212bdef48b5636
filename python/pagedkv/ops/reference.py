"""The oracle: every operator of `pagedkv.ops` again, in fp32 and plain torch, to be read and
believed.

Same names, signatures and mutated arguments; no block of it is fast. Used by tests and by
benchmarks that check before they measure. Works on any device. Ids are trusted here.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from pagedkv.ops.reference_sampling import sample_tokens as sample_tokens
from pagedkv.ops.reference_sampling import score_tokens as score_tokens
from pagedkv.ops.reference_step import advance_edits as advance_edits
from pagedkv.ops.reference_step import advance_step as advance_step


def quantize(real: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Real values as fp8: divided by the scale, saturated, rounded to nearest even; NaN stays."""
    largest = torch.finfo(dtype).max
    return (real.float() / scale).clamp(-largest, largest).to(dtype)


def _head_scales(scale: Tensor | None, num_kv_heads: int, device: torch.device) -> Tensor:
    """[num_kv_heads, 1] from a scale per tensor, per head, or none."""
    if scale is None:
        return torch.ones(num_kv_heads, 1, device=device)
    return scale.float().expand(num_kv_heads).reshape(num_kv_heads, 1)


def _tokens(cache: Tensor, scale: Tensor | None, block_table: Tensor, num_tokens: int) -> Tensor:
    """One sequence's first tokens as real values, [num_tokens, num_kv_heads, head_dim] fp32."""
    block_size = cache.size(2)
    position = torch.arange(num_tokens, device=cache.device)
    block_ids = block_table[position // block_size].long()
    # Index block and offset together: [num_tokens, num_kv_heads, head_dim].
    stored = cache[block_ids, :, position % block_size, :].float()
    return stored * _head_scales(scale, cache.size(1), cache.device)


def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """See `pagedkv.ops.reshape_and_cache`."""
    block_size = key_cache.size(2)
    for new, cache, scale in ((key, key_cache, k_scale), (value, value_cache, v_scale)):
        for t, slot in enumerate(slot_mapping.tolist()):
            if slot < 0:
                continue
            row = new[t]
            if scale is not None:
                head_scales = _head_scales(scale, cache.size(1), cache.device)
                row = quantize(row, head_scales, cache.dtype)
            cache[slot // block_size, :, slot % block_size, :] = row


def fused_rotary_reshape_and_cache(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos_sin_cache: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    is_neox: bool = True,
    *,
    residual: Tensor | None = None,
    residual_epsilon: float = 0.0,
    bias: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """See `pagedkv.ops.fused_rotary_reshape_and_cache`."""
    rotated, value = _finish_projection(query, key, value, residual, residual_epsilon, bias)
    rotary_embedding(positions, query, rotated, cos_sin_cache, is_neox)
    reshape_and_cache(
        rotated, value, key_cache, value_cache, slot_mapping, k_scale=k_scale, v_scale=v_scale
    )


def fused_norm_rotary_reshape_and_cache(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_norm: Tensor,
    key_norm: Tensor,
    epsilon: float,
    cos_sin_cache: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    is_neox: bool = True,
    *,
    residual: Tensor | None = None,
    residual_epsilon: float = 0.0,
    bias: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """See `pagedkv.ops.fused_norm_rotary_reshape_and_cache`."""
    normed, value = _finish_projection(query, key, value, residual, residual_epsilon, bias)
    rms_norm(query, query, query_norm, epsilon)
    rms_norm(normed, normed, key_norm, epsilon)
    fused_rotary_reshape_and_cache(
        positions,
        query,
        normed,
        value,
        cos_sin_cache,
        key_cache,
        value_cache,
        slot_mapping,
        is_neox,
        k_scale=k_scale,
        v_scale=v_scale,
    )


def _finish_projection(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    residual: Tensor | None,
    epsilon: float,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Scale a projection's result and add the bias: queries in place, keys and values copied."""
    scales = _row_scales(residual, epsilon)
    if isinstance(scales, Tensor):
        scales = scales.unsqueeze(-1)
    parts = [query, key.clone(), value.clone()]
    sizes = [part.size(1) * part.size(2) for part in parts]
    if bias is None:
        bias = query.new_zeros(sum(sizes))
    for part, more in zip(parts, torch.split(bias.float(), sizes), strict=True):
        part.copy_(part.float() * scales + more.view(part.shape[1:]))
    return parts[1], parts[2]


def gather_blocks(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_start_loc: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """See `pagedkv.ops.gather_blocks`."""
    starts = seq_start_loc.tolist()
    for s, (begin, end) in enumerate(itertools.pairwise(starts)):
        key[begin:end] = _tokens(key_cache, k_scale, block_tables[s], end - begin).to(key.dtype)
        value[begin:end] = _tokens(value_cache, v_scale, block_tables[s], end - begin).to(
            value.dtype
        )


def copy_blocks(kv_cache: Tensor, pairs: Tensor) -> None:
    """See `pagedkv.ops.copy_blocks`."""
    for source, destination in pairs.tolist():
        kv_cache[:, :, destination] = kv_cache[:, :, source].clone()


def swap_blocks(source: Tensor, destination: Tensor, pairs: Tensor) -> None:
    """See `pagedkv.ops.swap_blocks`."""
    for source_block, destination_block in pairs.tolist():
        destination[:, :, destination_block] = source[:, :, source_block].to(destination.device)


def paged_attention(
    out: Tensor,
    lse: Tensor | None,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    *,
    max_query_len: int,
    scale: float,
    causal: bool = True,
    window: int = 0,
    alibi_slopes: Tensor | None = None,
    soft_cap: float = 0.0,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    num_splits: int = 0,
    prefix_groups: Tensor | None = None,
    workspace: Tensor | None = None,
) -> None:
    """See `pagedkv.ops.paged_attention`. Splits, groups and workspace change how the work is done,
    never the result, so there is nothing to do with them here."""
    starts = query_start_loc.tolist()
    block_size = key_cache.size(2)
    for s, seq_len in enumerate(seq_lens.tolist()):
        rows = slice(starts[s], starts[s + 1])
        query_len = rows.stop - rows.start
        assert query_len <= max_query_len
        if seq_len == 0:
            out[rows] = 0
            if lse is not None:
                lse[rows] = -math.inf
            continue
        # Whole blocks before the window of the first query are not there to be read.
        skipped = max(0, seq_len - query_len - window + 1) // block_size if window > 0 else 0
        table, num_keys = block_tables[s, skipped:], seq_len - skipped * block_size
        keys = _tokens(key_cache, k_scale, table, num_keys)
        values = _tokens(value_cache, v_scale, table, num_keys)
        sequence_out, sequence_lse = _attend(
            query[rows].float(), keys, values, scale, causal, window, alibi_slopes, soft_cap
        )
        out[rows] = sequence_out.to(out.dtype)
        if lse is not None:
            lse[rows] = sequence_lse


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    causal: bool,
    window: int,
    alibi_slopes: Tensor | None,
    soft_cap: float,
) -> tuple[Tensor, Tensor]:
    """Attention of [query_len, num_heads, head_dim] over [seq_len, num_kv_heads, head_dim], all
    fp32; the queries are the last positions. Returns out and lse."""
    query_len, num_heads, _ = query.shape
    seq_len, num_kv_heads, _ = keys.shape
    group = num_heads // num_kv_heads
    i = torch.arange(seq_len - query_len, seq_len, device=query.device).unsqueeze(1)
    j = torch.arange(seq_len, device=query.device).unsqueeze(0)
    visible = torch.ones(query_len, seq_len, dtype=torch.bool, device=query.device)
    if causal:
        visible &= j <= i
    if window > 0:
        visible &= i - window < j
    out = torch.empty_like(query)
    lse = torch.empty(query_len, num_heads, device=query.device)
    for head in range(num_heads):
        logits = scale * (query[:, head] @ keys[:, head // group].T)
        if soft_cap > 0:
            logits = soft_cap * torch.tanh(logits / soft_cap)
        if alibi_slopes is not None:
            logits = logits + alibi_slopes[head] * (j - i)
        logits = logits.masked_fill(~visible, -math.inf)
        lse[:, head] = torch.logsumexp(logits, dim=1)
        # A row without a visible key is 0 / 0 in softmax, and 0 by definition.
        weights = torch.softmax(logits, dim=1).masked_fill(~visible, 0.0)
        out[:, head] = weights @ values[:, head // group]
    return out, lse


def merge_attention_states(
    out: Tensor, lse: Tensor | None, out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> None:
    """See `pagedkv.ops.merge_attention_states`."""
    largest = torch.maximum(lse_a, lse_b)
    total = torch.zeros_like(largest)
    weighted = torch.zeros_like(out, dtype=torch.float32)
    for side, side_lse in ((out_a, lse_a), (out_b, lse_b)):
        empty = side_lse == -math.inf
        weight = torch.where(empty, 0.0, torch.exp(side_lse - largest))
        total += weight
        weighted += torch.where(empty.unsqueeze(-1), 0.0, weight.unsqueeze(-1) * side.float())
    both_empty = total == 0
    out.copy_(weighted / torch.where(both_empty, 1.0, total).unsqueeze(-1))
    if lse is not None:
        lse.copy_(torch.where(both_empty, -math.inf, largest + torch.log(total)))


def rms_norm(out: Tensor, input: Tensor, weight: Tensor, epsilon: float) -> None:
    """See `pagedkv.ops.rms_norm`."""
    x = input.float()
    mean_square = x.pow(2).mean(dim=-1, keepdim=True)
    out.copy_(x / torch.sqrt(mean_square + epsilon) * weight.float())


def fused_add_rms_norm(input: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> None:
    """See `pagedkv.ops.fused_add_rms_norm`."""
    residual.copy_(residual.float() + input.float())
    rms_norm(input, residual, weight, epsilon)


def rotary_embedding(
    positions: Tensor, query: Tensor, key: Tensor, cos_sin_cache: Tensor, is_neox: bool = True
) -> None:
    """See `pagedkv.ops.rotary_embedding`."""
    rotary_dim = cos_sin_cache.size(1)
    half = rotary_dim // 2
    cosines = cos_sin_cache[positions, :half].unsqueeze(1)
    sines = cos_sin_cache[positions, half:].unsqueeze(1)
    for heads in (query, key):
        if is_neox:
            first, second = heads[..., :half], heads[..., half:rotary_dim]
        else:
            first, second = heads[..., 0:rotary_dim:2], heads[..., 1:rotary_dim:2]
        x, y = first.clone().float(), second.clone().float()
        first.copy_(x * cosines - y * sines)
        second.copy_(y * cosines + x * sines)


def _row_scales(residual: Tensor | None, epsilon: float) -> Tensor | float:
    """What rows of a projection of residual [n, hidden] are multiplied by: fp32 [n, 1]."""
    if residual is None:
        return 1.0
    return 1 / torch.sqrt(residual.float().pow(2).mean(dim=-1, keepdim=True) + epsilon)


def silu_and_mul(
    out: Tensor, input: Tensor, *, residual: Tensor | None = None, residual_epsilon: float = 0.0
) -> None:
    """See `pagedkv.ops.silu_and_mul`."""
    gate, up = (input.float() * _row_scales(residual, residual_epsilon)).chunk(2, dim=-1)
    out.copy_(torch.nn.functional.silu(gate) * up)


def gelu_and_mul(
    out: Tensor,
    input: Tensor,
    approximate: str = "none",
    *,
    residual: Tensor | None = None,
    residual_epsilon: float = 0.0,
) -> None:
    """See `pagedkv.ops.gelu_and_mul`."""
    gate, up = (input.float() * _row_scales(residual, residual_epsilon)).chunk(2, dim=-1)
    out.copy_(torch.nn.functional.gelu(gate, approximate=approximate) * up)


def streamed_linear(
    out: Tensor,
    input: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    epsilon: float = 0.0,
    epilogue: str = "store",
) -> None:
    """See `pagedkv.ops.streamed_linear`."""
    x = input
    if norm_weight is not None:
        x = torch.empty_like(input)
        rms_norm(x, input, norm_weight, epsilon)
    product = x.double() @ weight.double().T  # fp32 sums differ by their order
    if bias is not None:
        product += bias.double()
    product = product.to(input.dtype)
    if epilogue == "silu_and_mul":
        silu_and_mul(out, product)
    elif epilogue == "add":
        out.copy_(out.float() + product.float())
    else:
        assert epilogue == "store"
        out.copy_(product)
