"""The cache: how many blocks, which views, and copies that the runner makes before a step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from fake_model import FakeModel

from pagedkv import ops
from pagedkv.block_manager import BlockManager
from pagedkv.config import CacheConfig, SchedulerConfig
from pagedkv.engine.input_builder import InputBuilder
from pagedkv.engine.model_runner import ModelRunner
from pagedkv.kv_cache import CacheShape, KVCache, empty_pool, num_blocks_for
from pagedkv.records import ScheduledStep

SHAPE = CacheShape(num_layers=3, num_kv_heads=2, head_dim=8, dtype=torch.float16)


def test_the_pool_is_sized_by_blocks_by_bytes_or_by_what_can_be_used() -> None:
    bytes_per_block = 2 * 3 * 2 * 8 * 2 * 16
    assert SHAPE.bytes_per_token * 16 == bytes_per_block

    def blocks(**options: Any) -> int:
        config = CacheConfig(**options)
        return num_blocks_for(config, SHAPE, max_num_seqs=4, max_model_len=100)

    assert blocks(num_gpu_blocks_override=77) == 77
    assert blocks(kv_cache_memory_bytes=10 * bytes_per_block + 1) == 10
    assert blocks() == 4 * 7
    big = CacheShape(num_layers=64, num_kv_heads=8, head_dim=128, dtype=SHAPE.dtype)
    limited = num_blocks_for(CacheConfig(), big, max_num_seqs=256, max_model_len=8192)
    assert limited == 2**30 // (big.bytes_per_token * 16)
    with pytest.raises(ValueError, match=f"one block of 16 tokens takes {bytes_per_block} bytes"):
        blocks(kv_cache_memory_bytes=bytes_per_block - 1)


def test_the_layers_are_views_of_the_one_allocation() -> None:
    cache = KVCache(SHAPE, num_blocks=5, block_size=4)
    assert cache.tensor.shape == (3, 2, 5, 2, 4, 8)
    for layer, (key_cache, value_cache) in enumerate(cache.layers):
        assert key_cache.data_ptr() == cache.tensor[layer, 0].data_ptr()
        assert value_cache.data_ptr() == cache.tensor[layer, 1].data_ptr()
        assert key_cache.shape == value_cache.shape == (5, 2, 4, 8)


def test_a_pool_is_one_run_of_memory_by_blocks_or_by_layers() -> None:
    by_block = empty_pool(SHAPE, 5, 4, block_major=True, device="cpu")
    by_layer = empty_pool(SHAPE, 5, 4, block_major=False, device="cpu")
    assert by_block.shape == by_layer.shape == (3, 2, 5, 2, 4, 8)
    assert all(by_block[:, :, block].is_contiguous() for block in range(5))
    assert not by_block[0].is_contiguous()
    assert all(layer.is_contiguous() for layer in by_layer)
    assert not by_layer[:, :, 0].is_contiguous()
    # On a CPU the cache and what is swapped out are by layers.
    cache = KVCache(SHAPE, 5, 4, num_cpu_blocks=3)
    assert cache.tensor.is_contiguous()
    assert cache.cpu_tensor.is_contiguous()


def test_the_order_of_a_pool_in_memory_changes_no_result() -> None:
    torch.manual_seed(0)
    results = []
    for block_major in (False, True):
        torch.manual_seed(0)
        pool = empty_pool(SHAPE, 5, 4, block_major=block_major, device="cpu")
        pool.copy_(torch.randn(pool.shape))
        out_of_it = empty_pool(SHAPE, 2, 4, block_major=block_major, device="cpu")
        out_of_it.zero_()
        ops.copy_blocks(pool, torch.tensor([[4, 0], [1, 3]]))
        ops.swap_blocks(pool, out_of_it, torch.tensor([[3, 1], [2, 0]]))
        key, value = torch.randn(2, 1, 2, 8).half()
        ops.reshape_and_cache(key, value, *pool[2], torch.tensor([13]))
        out = torch.empty(1, 4, 8).half()
        ops.paged_attention(
            out,
            None,
            torch.randn(1, 4, 8).half(),
            *pool[2],
            torch.tensor([[0, 3]], dtype=torch.int32),
            torch.tensor([6], dtype=torch.int32),
            torch.tensor([0, 1], dtype=torch.int32),
            max_query_len=1,
            scale=0.5,
        )
        results.append((pool.contiguous(), out_of_it.contiguous(), out))
    for by_layer, by_block in zip(*results, strict=True):
        assert torch.equal(by_layer, by_block)


def test_copy_on_write_pairs_run_before_the_step_writes() -> None:
    """A fork shares a half-full block; its next token goes into a copy, and the parent's stays."""
    manager = BlockManager(8, 4, shuffle_seed=1)
    cache = KVCache(CacheShape(1, 1, 1, torch.float32), 8, 4)
    cache.tensor.fill_(-1)
    config = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=8)
    fake = FakeModel(4)
    runner = ModelRunner(
        fake,
        cache,
        InputBuilder(manager, config, max_model_len=16),
        max_num_seqs=2,
        vocab_size=258,
    )
    token_ids = np.array([[10, 11, 12, 13, 14, 15, 20], [10, 11, 12, 13, 14, 15, 21]], np.int32)

    def step(seq_ids: list[int], lens: list[int], copies: Any) -> ScheduledStep:
        return ScheduledStep(
            step_id=0,
            slots=np.array(seq_ids),
            seq_ids=np.array(seq_ids),
            query_lens=np.array(lens),
            sample_rows=np.arange(len(seq_ids)),
            sample_draws=np.zeros(len(seq_ids), dtype=np.int64),
            num_tokens=sum(lens),
            copies=np.asarray(copies, dtype=np.int64).reshape(-1, 2),
            admitted=(),
            preempted=(),
        )

    manager.allocate(0, token_ids[0, :6])
    runner.run(step([0], [6], []), token_ids)
    manager.fork(0, 1)
    copies = manager.append_batch([0, 1], [1, 1])
    assert len(copies) == 1
    runner.run(step([0, 1], [1, 1], copies), token_ids)
    for seq_id, expected in enumerate(token_ids.tolist()):
        table = torch.from_numpy(manager.block_table(seq_id)).long()
        assert cache.layers[0][0][table].reshape(-1)[:7].tolist() == expected


def test_a_pool_beyond_memory_names_the_option_that_sized_it() -> None:
    with pytest.raises(ValueError, match="do not fit in memory: lower num_gpu_blocks_override"):
        KVCache(SHAPE, 2**40, 16)
    with pytest.raises(ValueError, match="do not fit in memory: lower swap_space"):
        KVCache(SHAPE, 1, 16, num_cpu_blocks=2**40)
