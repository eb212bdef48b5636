"""The cache on a GPU: block-major, with pinned memory for what is swapped out."""

from __future__ import annotations

import torch

from pagedkv.kv_cache import CacheShape, KVCache


def test_the_cache_is_block_major_and_survives_a_swap(device) -> None:
    shape = CacheShape(num_layers=3, num_kv_heads=2, head_dim=64, dtype=torch.bfloat16)
    cache = KVCache(shape, num_blocks=6, block_size=16, num_cpu_blocks=4, device=device)
    assert cache.tensor.device == device
    assert cache.cpu_tensor.is_pinned()
    for pool in (cache.tensor, cache.cpu_tensor):
        assert pool.shape[:2] == (3, 2)
        assert all(pool[:, :, block].is_contiguous() for block in range(pool.size(2)))
    cache.tensor.copy_(torch.randn(cache.tensor.shape, device=device))
    before = cache.tensor.clone()
    cache.swap_out(torch.tensor([[5, 0], [2, 3]]))
    cache.tensor[:, :, [5, 2]] = torch.nan
    cache.swap_in(torch.tensor([[0, 1], [3, 4]]))
    cache.copy_blocks(torch.tensor([[1, 5]]))
    torch.cuda.synchronize()
    assert torch.equal(cache.tensor[:, :, 1], before[:, :, 5])
    assert torch.equal(cache.tensor[:, :, 4], before[:, :, 2])
    assert torch.equal(cache.tensor[:, :, 5], before[:, :, 5])
    assert torch.equal(cache.tensor[:, :, [0, 3]], before[:, :, [0, 3]])
