"""Attention over the paged cache, and the merge of two attention results.

Only thin calls of the registered operators live here: checks and kernels are in `csrc/`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagedkv.ops.library import CUDA_BUILD_HINT

_paged_attention = torch.ops.pagedkv.paged_attention.default
_merge_attention_states = torch.ops.pagedkv.merge_attention_states.default
_workspace_size = torch.ops.pagedkv.paged_attention_workspace_size.default


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
    """Attention of query tokens over keys and values that lie in blocks, found by block table.

    One call serves any mix of decode rows (one query token) and prefill chunks (many). Sequence s
    has the query rows query_start_loc[s] .. query_start_loc[s + 1]; the last of them stands at
    position seq_lens[s] - 1. For a query at position i and a key at position j:

        logit = scale * dot(query, key)
        logit = soft_cap * tanh(logit / soft_cap)      if soft_cap > 0
        logit = logit + alibi_slope[head] * (j - i)    if alibi_slopes are given
        visible when j <= i (if causal) and i - window < j (if window > 0)

    out is the softmax-weighted sum of the visible values, and lse the natural logarithm of the sum
    of exp(logit). A row that sees no key, as every row of a sequence of length 0, gets out 0 and
    lse -inf. Rows outside every sequence are left as they are. Query head h reads key/value head
    h // (num_heads / num_kv_heads).

    On a GPU bf16 and fp16 go by tensor cores where head_dim is a multiple of 8 (with an fp8 cache
    of 16), block_size one of 8, and all rows begin at multiples of 16 bytes. Anything else is
    computed too, by a plain kernel that reads keys and values once per query head: right, but slow.
    Prefill is fastest with a 16-bit cache and head_dim at most 128 on compute capability 9.0.

    Args:
        out: [num_tokens, num_heads, head_dim], fp32, bf16 or fp16; head_dim at most 256.
        lse: [num_tokens, num_heads] fp32, or None.
        query: [num_tokens, num_heads, head_dim], `out`'s dtype.
        key_cache, value_cache: [num_blocks, num_kv_heads, block_size, head_dim], any strides with
            a contiguous last dimension; `query`'s dtype, float8_e4m3fn or float8_e5m2; block_size
            at most 256; num_heads is a multiple of num_kv_heads.
        block_tables: [num_seqs, max_num_blocks] int32; only the first
            ceil(seq_len / block_size) entries of a row are read. With a window, entries of blocks
            wholly before the first key that the first query sees may hold anything.
        seq_lens: [num_seqs] int32, this step's tokens included; 0 is a padded sequence.
        query_start_loc: [num_seqs + 1] int32, from 0, not decreasing, at most num_tokens.
        max_query_len: the most query tokens of any sequence, or more.
        scale: factor of the dot products, usually head_dim ** -0.5.
        causal: whether a query sees only keys up to its own position.
        window: how many keys a query sees, its own included; 0 is unlimited. Needs causal.
        alibi_slopes: [num_heads] fp32, or None.
        soft_cap: bound of the logits, or 0.
        k_scale, v_scale: [1] or [num_kv_heads] fp32, stored value * scale = real value; with an
            fp8 cache, and only then.
        num_splits: 1 is one pass over each sequence (PagedAttention v1), n > 1 is n pieces of each
            sequence, merged in order (v2), 0 lets the op choose. At most 256.
        prefix_groups: [num_groups, 3] int32, rows (first_seq, num_seqs, num_prefix_blocks): the
            tables of those sequences begin with the same num_prefix_blocks blocks, which all their
            queries see (with a window, as far as any of them sees; read through the first one's
            table). The result is the same, the shared keys may be read once. No sequence is
            in two groups; num_seqs 0 is an empty entry. `pagedkv.block_manager.PrefixGrouper` finds
            those that pay. On a GPU they are data like the tables, and not checked. There, entries
            outside the batch, prefill (more than 64 rows, query tokens x query heads of a KV head)
            and sequences whose first query does not see the whole prefix, as padding or those with
            a shorter window, are attended to alone; so is a group whose first sequence is one.
        workspace: uint8 [at least paged_attention_workspace_size(...)], any contents, or None, and
            the op allocates. Calls that may run at once, on two streams, must not share one.

    Returns:
        Nothing.

    Mutates:
        out, lse, workspace.

    Raises:
        RuntimeError: device, dtype, layout, shape or number not as above. On the CPU also what is
            data: block ids outside the cache, tables too short, more query tokens than
            max_query_len or than the sequence has, groups whose tables differ.

    Example:
        One query, two cached tokens in two blocks of size 1, and equal keys, so that it takes the
        mean of the values 10 and 30:

        >>> keys = torch.zeros(4, 1, 1, 1)
        >>> values = torch.tensor([0.0, 10.0, 20.0, 30.0]).view(4, 1, 1, 1)
        >>> out, lse = torch.empty(1, 1, 1), torch.empty(1, 1)
        >>> tables = torch.tensor([[3, 1]], dtype=torch.int32)
        >>> lens, start = torch.tensor([2]).int(), torch.tensor([0, 1]).int()
        >>> query = torch.ones(1, 1, 1)
        >>> paged_attention(out, lse, query, keys, values, tables, lens, start,
        ...                 max_query_len=1, scale=1.0)
        >>> out.item(), lse  # lse is log(e^0 + e^0)
        (20.0, tensor([[0.6931]]))

    Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with
    PagedAttention", SOSP 2023, equation 4; the one pass with a running maximum is Milakov and
    Gimelshein, "Online normalizer calculation for softmax", 2018; ALiBi is Press et al., "Train
    Short, Test Long", 2022.
    """
    _paged_attention(
        out,
        lse,
        query,
        key_cache,
        value_cache,
        block_tables,
        seq_lens,
        query_start_loc,
        max_query_len=max_query_len,
        scale=scale,
        causal=causal,
        window=window,
        alibi_slopes=alibi_slopes,
        soft_cap=soft_cap,
        k_scale=k_scale,
        v_scale=v_scale,
        num_splits=num_splits,
        prefix_groups=prefix_groups,
        workspace=workspace,
    )


def paged_attention_workspace_size(
    num_tokens: int,
    num_heads: int,
    head_dim: int,
    *,
    num_splits: int = 0,
    num_prefix_groups: int = 0,
    device: torch.device | str = "cpu",
) -> int:
    """Bytes of the workspace that `paged_attention` needs for batches up to a size.

    It does not depend on the lengths; with num_splits 0 or 1 and no prefix groups not on the batch
    either, so that one workspace serves all captured graphs. Prefix groups take two partial results
    per query token and head more, and on a GPU two of 128 rows per multiprocessor.

    Args:
        num_tokens: most query tokens of a call.
        num_heads: query heads.
        head_dim: at most 256.
        num_splits: as for `paged_attention`.
        num_prefix_groups: most rows of prefix_groups, or 0 if the calls have none.
        device: where the tensors will be. On the CPU the size depends on torch.get_num_threads(),
            on a GPU on its number of multiprocessors.

    Returns:
        The number of bytes, a multiple of 16.

    Raises:
        RuntimeError: a number out of range, or a CUDA device without pagedkv's CUDA library.
        ValueError: a device that is neither a CPU nor a CUDA device.

    Example:
        num_splits n takes n partial results, each of head_dim + 2 numbers of 4 bytes, per query
        token and head:

        >>> paged_attention_workspace_size(8, 4, 64, num_splits=2)  # 8 * 4 * 2 * (64 + 2) * 4
        16896
    """
    place = torch.device(device)
    if place.type == "cpu":
        num_workers = torch.get_num_threads()
    elif place.type == "cuda":
        if not hasattr(torch.ops.pagedkv, "paged_attention_num_workers"):
            raise RuntimeError(f"pagedkv's CUDA library is not built: {CUDA_BUILD_HINT}")
        index = torch.cuda.current_device() if place.index is None else place.index
        num_workers = torch.ops.pagedkv.paged_attention_num_workers.default(index)
    else:
        raise ValueError(f"device is {str(place)!r}, expected a cpu or cuda device")
    size: int = _workspace_size(
        num_workers, num_tokens, num_heads, head_dim, num_splits, num_prefix_groups
    )
    return size


def merge_attention_states(
    out: Tensor, lse: Tensor | None, out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> None:
    """Attention over the union of two disjoint sets of keys, from the results over each.

    With weights w = exp(lse), out = (w_a out_a + w_b out_b) / (w_a + w_b) and
    lse = log(w_a + w_b). A side with lse -inf is empty: its out is not read, whatever it holds.
    Both empty gives 0 and -inf.

    Args:
        out: [num_tokens, num_heads, head_dim], fp32, bf16 or fp16; may be `out_a` or `out_b`.
        lse: [num_tokens, num_heads] fp32, or None; may be `lse_a` or `lse_b`.
        out_a, out_b: as `out`.
        lse_a, lse_b: [num_tokens, num_heads] fp32, natural logarithms.

    Returns:
        Nothing.

    Mutates:
        out, lse.

    Raises:
        RuntimeError: device, dtype, layout or shape not as above.

    Example:
        Three keys with mean value 1 and one key with value 5:

        >>> a, b = torch.ones(1, 1, 1), torch.full((1, 1, 1), 5.0)
        >>> lse_a, lse_b = torch.tensor([[3.0]]).log(), torch.tensor([[1.0]]).log()
        >>> out, lse = torch.empty(1, 1, 1), torch.empty(1, 1)
        >>> merge_attention_states(out, lse, a, lse_a, b, lse_b)
        >>> out, lse.exp()
        (tensor([[[2.]]]), tensor([[4.]]))

    Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018, equation 4.
    """
    _merge_attention_states(out, lse, out_a, lse_a, out_b, lse_b)
