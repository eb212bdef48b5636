"""What attention on a GPU is given besides a step's tensors: groups that share a prefix, and memory
for partial results. On a CPU it takes neither.
"""

from __future__ import annotations

from typing import Any

import torch

from pagedkv import ops
from pagedkv.block_manager import PrefixGrouper, prefix_costs
from pagedkv.engine.loaded_model import LoadedModel
from pagedkv.kv_cache import CacheShape


def prefix_grouper(loaded: LoadedModel, shape: CacheShape, block_size: int) -> PrefixGrouper | None:
    """By what sharing costs on a GPU. On a CPU every sequence reads its prefix itself."""
    if loaded.device.type == "cpu":
        return None
    costs: dict[str, Any] = {}  # numbers, of which seqs_per_tile is a whole one
    costs |= prefix_costs(
        loaded.num_heads,
        shape.num_kv_heads,
        shape.head_dim,
        element_bytes=shape.dtype.itemsize,
    )
    return PrefixGrouper(block_size, window=loaded.window, **costs)


def attention_workspace(loaded: LoadedModel, shape: CacheShape) -> torch.Tensor | None:
    """For all layers of all steps without prefix groups, captured or not: a card that fills up
    later does not stop a decode.
    """
    if loaded.device.type == "cpu":
        return None
    # Splits of a sequence take a place for each worker, whatever the tokens are.
    size = ops.paged_attention_workspace_size(
        1, loaded.num_heads, shape.head_dim, device=loaded.device
    )
    return torch.empty(size, dtype=torch.uint8, device=loaded.device)
