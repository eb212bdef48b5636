"""The grouper of sequences that share a prefix, for a model on its device."""

from __future__ import annotations

from typing import Any

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
