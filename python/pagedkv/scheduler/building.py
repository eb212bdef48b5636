"""The one way to make a scheduler on its block manager: the engine's, and the one that a replay
drives, so that both decide alike.
"""

from __future__ import annotations

from pagedkv.block_manager import BlockManager
from pagedkv.config import CacheConfig, SchedulerConfig
from pagedkv.records import RunFacts
from pagedkv.scheduler.scheduler import Scheduler


def build_scheduler(
    cache: CacheConfig, scheduler: SchedulerConfig, facts: RunFacts
) -> tuple[BlockManager, Scheduler]:
    """A new manager and a new scheduler on it. The pools' sizes are those of facts."""
    manager = BlockManager(
        facts.num_blocks,
        cache.block_size,
        num_cpu_blocks=facts.num_cpu_blocks,
        watermark=cache.watermark,
        enable_prefix_caching=cache.enable_prefix_caching,
        enable_kv_offloading=cache.enable_kv_offloading,
    )
    return manager, Scheduler(
        manager,
        scheduler,
        max_model_len=facts.max_model_len,
        enable_prefix_caching=cache.enable_prefix_caching,
        bytes_per_block=facts.bytes_per_token * cache.block_size,
        window=facts.window,
    )
