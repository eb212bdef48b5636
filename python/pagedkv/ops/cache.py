"""Moving keys and values: into the paged cache, out of it, between blocks and between pools.

Only thin calls of the registered operators live here: checks and kernels are in `csrc/`.
"""

from __future__ import annotations

import torch
from torch import Tensor

_reshape_and_cache = torch.ops.pagedkv.reshape_and_cache.default
_fused_rotary_reshape_and_cache = torch.ops.pagedkv.fused_rotary_reshape_and_cache.default
_fused_norm_rotary_reshape_and_cache = torch.ops.pagedkv.fused_norm_rotary_reshape_and_cache.default
_gather_blocks = torch.ops.pagedkv.gather_blocks.default
_copy_blocks = torch.ops.pagedkv.copy_blocks.default
_swap_blocks = torch.ops.pagedkv.swap_blocks.default


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
    """Write the keys and values of new tokens into their slots of the paged cache.

    Row t goes to slot_mapping[t] = block_id * block_size + offset. Into an fp8 cache goes
    real / scale, rounded to nearest even; what is too large becomes the largest finite number.

    Args:
        key, value: [at least num_tokens, num_kv_heads, head_dim], fp32, bf16 or fp16.
        key_cache, value_cache: [num_blocks, num_kv_heads, block_size, head_dim], any strides with
            a contiguous last dimension; `key`'s dtype, float8_e4m3fn or float8_e5m2.
        slot_mapping: [num_tokens] int64, each slot at most once; a negative slot writes nothing.
        k_scale, v_scale: [1] or [num_kv_heads] fp32, above 0; with an fp8 cache, and only then.

    Returns:
        Nothing.

    Mutates:
        key_cache, value_cache.

    Raises:
        RuntimeError: device, dtype, layout or shape not as above; on the CPU also a slot outside
            the cache or a scale that is not above 0, before anything is written.

    Example:
        >>> cache = torch.zeros(2, 1, 2, 1)  # 2 blocks of 2 tokens
        >>> key = torch.tensor([5.0, 6.0, 7.0]).view(3, 1, 1)
        >>> reshape_and_cache(key, key, cache, torch.zeros_like(cache), torch.tensor([3, -1, 0]))
        >>> cache.flatten()  # slot 3 is block 1, offset 1; token 1 is padding
        tensor([7., 0., 0., 5.])

    Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with
    PagedAttention", SOSP 2023, section 4.
    """
    _reshape_and_cache(
        key, value, key_cache, value_cache, slot_mapping, k_scale=k_scale, v_scale=v_scale
    )


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
    """Rotate queries in place and keys on their way into the cache, and write the values there.

    `rotary_embedding` and then `reshape_and_cache`, bit for bit, in one pass over the query, key
    and value: what an attention layer does before it attends. Only `key` differs: it stays as it
    was. A token of a negative slot has its query rotated and writes nothing.

    With `residual` or `bias` the three are a projection's bare result, which is finished first:
    row t is multiplied by 1 / sqrt(mean(residual[t] ** 2) + residual_epsilon) and the bias is
    added. So an RMS norm before the projection needs no pass of its own, with its weights folded
    into the projection's (see `silu_and_mul`). What has been finished is not rounded before it is
    rotated or stored, but on the CPU.

    Args:
        positions: [num_tokens] int64, each below max_position.
        query: [num_tokens, num_heads, head_dim], fp32, bf16 or fp16.
        key, value: [num_tokens, num_kv_heads, head_dim], `query`'s dtype.
        cos_sin_cache: [max_position, rotary_dim] fp32: cosines, then sines; rotary_dim is even and
            at most head_dim.
        key_cache, value_cache: [num_blocks, num_kv_heads, block_size, head_dim], any strides with
            a contiguous last dimension; `query`'s dtype, float8_e4m3fn or float8_e5m2.
        slot_mapping: [num_tokens] int64, each slot at most once; a negative slot writes nothing.
        is_neox: which elements are a pair, as in `rotary_embedding`.
        residual: [num_tokens, hidden], `query`'s dtype: what the three are projections of.
        residual_epsilon: at least 0.
        bias: [(num_heads + 2 * num_kv_heads) * head_dim], `query`'s dtype: the queries', keys' and
            values'.
        k_scale, v_scale: [1] or [num_kv_heads] fp32, above 0; with an fp8 cache, and only then.

    Returns:
        Nothing.

    Mutates:
        query, key_cache, value_cache.

    Raises:
        RuntimeError: device, dtype, layout or shape not as above; on the CPU also a position
            outside the table, a slot outside the cache or a scale that is not above 0, before
            anything is written.

    Example:
        >>> table = torch.tensor([[1.0, 0.0], [0.0, 1.0]])  # position 1 turns by a right angle
        >>> query, key = torch.tensor([[[3.0, 4.0]]]), torch.tensor([[[1.0, 0.0]]])
        >>> key_cache, value_cache = torch.zeros(2, 1, 1, 2), torch.zeros(2, 1, 1, 2)
        >>> fused_rotary_reshape_and_cache(
        ...     torch.tensor([1]), query, key, key, table, key_cache, value_cache, torch.tensor([1])
        ... )
        >>> query.flatten(), key_cache[1].flatten(), value_cache[1].flatten()
        (tensor([-4.,  3.]), tensor([0., 1.]), tensor([1., 0.]))
        >>> where, slot, r = torch.tensor([0]), torch.tensor([1]), torch.tensor([[2.0, 2.0]])
        >>> bias = torch.tensor([0.0, 0.0, 1.0, 1.0, 2.0, 2.0])
        >>> fused_rotary_reshape_and_cache(
        ...     where, query, key, key, table, key_cache, value_cache, slot, residual=r, bias=bias
        ... )
        >>> query.flatten(), key_cache[1].flatten(), value_cache[1].flatten()  # divided by 2
        (tensor([-2.0000,  1.5000]), tensor([1.5000, 1.0000]), tensor([2.5000, 2.0000]))

    Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021,
    equation 34; Kwon et al., "Efficient Memory Management for Large Language Model Serving with
    PagedAttention", SOSP 2023, section 4.
    """
    _fused_rotary_reshape_and_cache(
        positions,
        query,
        key,
        value,
        cos_sin_cache,
        key_cache,
        value_cache,
        slot_mapping,
        is_neox,
        residual=residual,
        residual_epsilon=residual_epsilon,
        bias=bias,
        k_scale=k_scale,
        v_scale=v_scale,
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
    """`fused_rotary_reshape_and_cache` of queries and keys that are normed head by head before.

    What an attention layer with norms of queries and keys does before it attends. The norms are
    `rms_norm`'s, rounded as there.

    Args:
        query_norm, key_norm: [head_dim], `query`'s dtype.
        epsilon: of the norms, at least 0. Others: as of `fused_rotary_reshape_and_cache`.

    Returns:
        Nothing.

    Mutates:
        query, key_cache, value_cache.

    Raises:
        RuntimeError: as `fused_rotary_reshape_and_cache`; a negative or not finite epsilon.

    Example:
        >>> table = torch.tensor([[0.0, 1.0]])  # position 0 turns by a right angle
        >>> query, key = torch.tensor([[[3.0, 4.0]]]), torch.tensor([[[1.0, 1.0]]])
        >>> key_cache, value_cache = torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 1, 2)
        >>> first, ones = torch.tensor([0]), torch.ones(2)
        >>> fused_norm_rotary_reshape_and_cache(
        ...     first, query, key, key, ones, 2 * ones, 0.0, table, key_cache, value_cache, first
        ... )
        >>> query.flatten()  # (3, 4) / sqrt(12.5), turned
        tensor([-1.1314,  0.8485])
        >>> key_cache.flatten(), value_cache.flatten()
        (tensor([-2.,  2.]), tensor([1., 1.]))

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, equation 4; Henry et
    al., "Query-Key Normalization for Transformers", 2020.
    """
    _fused_norm_rotary_reshape_and_cache(
        positions,
        query,
        key,
        value,
        query_norm,
        key_norm,
        epsilon,
        cos_sin_cache,
        key_cache,
        value_cache,
        slot_mapping,
        is_neox,
        residual=residual,
        residual_epsilon=residual_epsilon,
        bias=bias,
        k_scale=k_scale,
        v_scale=v_scale,
    )


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
    """Copy the first tokens of sequences out of the paged cache, one sequence after another.

    Row seq_start_loc[i] + j becomes token j of sequence i, as real values (stored * scale).

    Args:
        key, value: [num_tokens, num_kv_heads, head_dim], fp32, bf16 or fp16.
        key_cache, value_cache: [num_blocks, num_kv_heads, block_size, head_dim], any strides with
            a contiguous last dimension; `key`'s dtype, float8_e4m3fn or float8_e5m2.
        block_tables: [num_seqs, max_num_blocks] int32; entries past a sequence's end are not read.
        seq_start_loc: [num_seqs + 1] int32, from 0, not decreasing, at most num_tokens at the end.
        k_scale, v_scale: [1] or [num_kv_heads] fp32; with an fp8 cache, and only then.

    Returns:
        Nothing.

    Mutates:
        key, value: the rows below seq_start_loc[-1].

    Raises:
        RuntimeError: device, dtype, layout or shape not as above; on the CPU also offsets that
            fall, a table too short or a block id outside the cache.

    Example:
        >>> cache = torch.arange(6.0).view(3, 1, 2, 1)  # 3 blocks of 2 tokens
        >>> key = torch.empty(3, 1, 1)
        >>> tables, start = torch.tensor([[2, 0]]).int(), torch.tensor([0, 3]).int()
        >>> gather_blocks(key, torch.empty_like(key), cache, cache, tables, start)
        >>> key.flatten()  # block 2, then the first token of block 0
        tensor([4., 5., 0.])

    Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with
    PagedAttention", SOSP 2023, section 4.
    """
    _gather_blocks(
        key,
        value,
        key_cache,
        value_cache,
        block_tables,
        seq_start_loc,
        k_scale=k_scale,
        v_scale=v_scale,
    )


def copy_blocks(kv_cache: Tensor, pairs: Tensor) -> None:
    """Copy whole blocks within a pool, in all layers: what a copy-on-write asks for.

    The effect is that of running the pairs one after another. On a GPU it is one launch for all
    layers and up to 3,072 pairs.

    Args:
        kv_cache: [num_layers, 2, num_blocks, num_kv_heads, block_size, head_dim], any cache dtype,
            any strides with a contiguous last dimension.
        pairs: [num_pairs, 2] int64 on the CPU, rows (source block, destination block).

    Returns:
        Nothing.

    Mutates:
        kv_cache: the destination blocks.

    Raises:
        RuntimeError: device, dtype, layout or shape not as above; a block id outside the pool.
            Nothing has been copied then.

    Example:
        >>> pool = torch.arange(3.0).view(1, 1, 3, 1, 1, 1).repeat(1, 2, 1, 1, 1, 1)
        >>> copy_blocks(pool, torch.tensor([[2, 0]]))
        >>> pool[0, 0].flatten()
        tensor([2., 1., 2.])

    Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with
    PagedAttention", SOSP 2023, section 4.4.
    """
    _copy_blocks(kv_cache, pairs)


def swap_blocks(source: Tensor, destination: Tensor, pairs: Tensor) -> None:
    """Copy whole blocks from one pool into another one, in all layers: swapping in or out.

    The effect is that of running the pairs one after another.

    With a GPU it is work on the current stream, in its order; the call returns before it has run.
    To overlap it with the model, call it on a stream of its own, behind an event of whoever wrote
    the source, and let whoever uses the destination wait for an event recorded after it. Until that
    event the pinned pool must stay allocated and unwritten. Runs of 256 KiB and more (a block-major
    pool) go by the copy engines, beside the model's kernels; shorter ones by a kernel.

    Args:
        source, destination: [num_layers, 2, num_blocks_of_each, num_kv_heads, block_size,
            head_dim], one dtype, any strides with a contiguous last dimension; on one device, or
            one on a GPU and the other in (pinned) CPU memory.
        pairs: [num_pairs, 2] int64 on the CPU, rows (source block, destination block).

    Returns:
        Nothing.

    Mutates:
        destination: the destination blocks.

    Raises:
        RuntimeError: device, dtype, layout or shape not as above; a block id outside its pool.
            Nothing has been copied then.

    Example:
        >>> pool = torch.arange(3.0).view(1, 1, 3, 1, 1, 1).repeat(1, 2, 1, 1, 1, 1)
        >>> swapped = torch.zeros(1, 2, 2, 1, 1, 1)
        >>> swap_blocks(pool, swapped, torch.tensor([[2, 0], [1, 1]]))
        >>> swapped[0, 0].flatten()
        tensor([2., 1.])

    Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with
    PagedAttention", SOSP 2023, section 4.5.
    """
    _swap_blocks(source, destination, pairs)
