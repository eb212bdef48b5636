"""AttentionMetadata: where one step's tokens stand in their sequences and in the cache. LayerCache:
what of the cache belongs to one layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


class LayerCache(NamedTuple):
    """key, value: [num_blocks, num_kv_heads, block_size, head_dim], of the activations' dtype or
    fp8. k_scale, v_scale: [1] or [num_kv_heads] fp32, stored value * scale = real value; of an fp8
    cache, and only there.
    """

    key: torch.Tensor
    value: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class AttentionMetadata:
    """One step of num_seqs sequences with num_tokens tokens together, decode rows and prefill
    chunks alike.

    block_tables: int32 [num_seqs, max_num_blocks]; only the first ceil(seq_len / block_size)
    entries of a row are read, and those of blocks behind a sliding window hold anything.
    seq_lens: int32 [num_seqs], this step's tokens included. query_start_loc: int32 [num_seqs +
    1], sequence s has the tokens query_start_loc[s] .. query_start_loc[s + 1]. slot_mapping:
    int64 [num_tokens], slot = block_id * block_size + offset, -1 writes nothing. max_query_len:
    the most tokens of any sequence. prefix_groups: int32 [num_groups, 3], and workspace: uint8,
    as pagedkv.ops.paged_attention has them, or None; all layers may use one workspace.
    """

    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    slot_mapping: torch.Tensor
    max_query_len: int
    prefix_groups: torch.Tensor | None = None
    workspace: torch.Tensor | None = None
