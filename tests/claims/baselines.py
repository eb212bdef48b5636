"""The baselines in the scheduler's simulation: the same random runs, the same fake model."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from simulation import Simulation
from test_pipelined_simulation import Pipelined

from claims.contiguous import ContiguousManager, ContiguousScheduler
from claims.reserving import Reservation, reserved_tokens
from claims.static_batching import StaticBatching
from claims.step_tables import ContiguousTables
from pagedkv.request import Request


@dataclass
class Contiguous(Simulation):
    """A contiguous region for each request. What it has not, the runs do without: a prefix cache, a
    CPU pool, a sliding window, and a reservation after preemptions, since a region is one.
    """

    policy: ClassVar[str] = "max"
    scheduler_type = ContiguousScheduler
    tables_type = ContiguousTables

    def make_manager(self) -> ContiguousManager:  # type: ignore[override]
        return ContiguousManager(self.num_blocks, self.block_size)

    def __post_init__(self) -> None:
        self.enable_prefix_caching = False
        self.num_cpu_blocks = self.window = 0
        self.reserve_after_preemptions = 10**6
        super().__post_init__()

    def add(self, request: Request) -> None:
        salt = self.reservation(request).salt
        super().add(dataclasses.replace(request, cache_salt=salt))

    def reservation(self, request: Request) -> Reservation:
        """As much as the policy says, and the pool has: of a search in any case for all beams."""
        pool_len = self.num_blocks * self.block_size
        lens = (request.prompt_len, request.max_tokens, self.max_model_len)
        num_tokens = min(reserved_tokens(self.policy, *lens), pool_len)
        if request.num_candidates:
            most = self.num_blocks // request.num_forks * self.block_size
            return Reservation(request.request_id, min(num_tokens, most), request.num_forks)
        most_lanes = self.num_blocks // -(-num_tokens // self.block_size)
        return Reservation(request.request_id, num_tokens, min(request.num_forks, most_lanes))


class PowersOfTwo(Contiguous):
    policy = "pow2"


class Oracle(Contiguous):
    policy = "oracle"


@dataclass
class PipelinedContiguous(Contiguous, Pipelined):
    """Steps are planned while the one before runs."""


class PipelinedOracle(PipelinedContiguous):
    policy = "oracle"


class StaticOracle(Oracle):
    """In batches that wait for each other."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.batching = StaticBatching(self.scheduler, self.num_blocks, self.blocks_of)
        self.scheduler = self.batching  # type: ignore[assignment]

    def fork(self, name: str, n: int) -> None:
        if not self.batching.holds(name):  # it has nothing yet that could be shared
            super().fork(name, n)

    def blocks_of(self, request: Request) -> int:
        wanted = self.reservation(request)
        return wanted.num_lanes * -(-wanted.num_tokens // self.block_size)
