"""The systems that are compared, each as the way to make its manager and its scheduler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from claims.contiguous import ContiguousManager, ContiguousScheduler
from claims.reserving import Reservation, reserved_tokens
from claims.static_batching import StaticBatching
from pagedkv.block_manager import BlockManager
from pagedkv.config import CacheConfig, SchedulerConfig
from pagedkv.records import RunFacts
from pagedkv.replay.driving import Build
from pagedkv.request import Request
from pagedkv.scheduler import Scheduler, build_scheduler


@dataclass(frozen=True, slots=True)
class System:
    """policy: how much of a contiguous cache is reserved, None: the cache is paged. is_static:
    batches wait for each other.
    """

    name: str
    policy: str | None
    is_static: bool = False

    def salt(self, name: str, prompt_len: int, output_len: int, num_lanes: int, most: int) -> str:
        """A contiguous request's cache_salt. most: tokens of the context."""
        assert self.policy is not None
        tokens = reserved_tokens(self.policy, prompt_len, output_len, most)
        return Reservation(name, tokens, num_lanes).salt

    @property
    def build(self) -> Build:
        return build_scheduler if self.policy is None else self._build_contiguous

    def _build_contiguous(
        self, cache: CacheConfig, config: SchedulerConfig, facts: RunFacts
    ) -> tuple[BlockManager, Scheduler]:
        manager: Any = ContiguousManager(facts.num_blocks, cache.block_size)
        scheduler: Any = ContiguousScheduler(
            manager, config, max_model_len=facts.max_model_len, enable_prefix_caching=False
        )
        if self.is_static:
            scheduler = StaticBatching(scheduler, facts.num_blocks, blocks_of(cache.block_size))
        return cast(BlockManager, manager), cast(Scheduler, scheduler)


def blocks_of(block_size: int) -> Callable[[Request], int]:
    """Blocks of a request's region."""

    def count(request: Request) -> int:
        wanted = Reservation.of_key(request.extra_key)
        return wanted.num_lanes * -(-wanted.num_tokens // block_size)

    return count


PAGED = System("paged", None)
MAX = System("contiguous, max", "max")
POW2 = System("contiguous, pow2", "pow2")
ORACLE = System("contiguous, oracle", "oracle")
STATIC = System("contiguous, max, static", "max", is_static=True)
SYSTEMS = (PAGED, ORACLE, POW2, MAX)
