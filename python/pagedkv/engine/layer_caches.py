"""The paged cache as a model's layers take it: with its scales."""

from __future__ import annotations

from pagedkv.kv_cache import KVCache
from pagedkv.models import LayerCache


def layer_caches(cache: KVCache) -> list[LayerCache]:
    """One for each layer."""
    if cache.scales is None:
        return [LayerCache(key, value) for key, value in cache.layers]
    return [
        LayerCache(key, value, k_scale, v_scale)
        for (key, value), (k_scale, v_scale) in zip(cache.layers, cache.scales, strict=True)
    ]
