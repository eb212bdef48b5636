"""What an engine tells of a run to whoever records or watches it: everything that decides what the
scheduler does, in order. The engine calls, on its own thread; an observer raises nothing and keeps
none of the arrays.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pagedkv.block_manager import BlockManager
from pagedkv.config import EngineConfig
from pagedkv.records import (
    Candidates,
    DecisionKind,
    FinishedRequest,
    RunFacts,
    ScheduledStep,
)
from pagedkv.request import Request
from pagedkv.scheduler import Rates, SlotTable


class RunObserver(Protocol):
    """Times are seconds of the engine's clock."""

    def begins(self, config: EngineConfig, facts: RunFacts, time_s: float) -> None: ...

    def noted(
        self, request: Request, kind: DecisionKind, num_step: int, numbers: dict[str, Any]
    ) -> None:
        """A decision of the scheduler; what follows next (an arrival, a step) is its occasion."""

    def added(self, request: Request, time_s: float) -> None: ...

    def aborted(self, request_id: str, time_s: float) -> None: ...

    def forked(
        self,
        request_id: str,
        fork_ids: list[str],
        num_generated: int,
        max_tokens: int,
        time_s: float,
    ) -> None:
        """num_generated: tokens of the parent that the forks start with, which count for their
        max_tokens.
        """

    def cache_reset(self, time_s: float) -> None: ...

    def sampled(
        self,
        step: ScheduledStep,
        table: SlotTable,
        rates: Rates,
        token_ids: NDArray[np.int64],
        failed: NDArray[np.bool_],
        candidates: Candidates | None,
    ) -> None:
        """A step has run; table: as it was scheduled. The three last: as in Scheduler.update."""

    def step_failed(
        self, step: ScheduledStep, table: SlotTable, rates: Rates, error: str
    ) -> None: ...

    def step_ended(
        self,
        manager: BlockManager,
        stopped: list[str],
        ended: list[FinishedRequest],
        begin_s: float,
        end_s: float,
    ) -> None:
        """After sampled or step_failed. stopped: requests that a stop string ended."""


class StepWatcher(Protocol):
    """Whoever counts or shows what happens and decides nothing by it. There may be several, and
    steps stay pipelined. Times are seconds of the engine's clock.
    """

    def added(self, request: Request, time_s: float) -> None:
        """A request was queued, or made by a fork."""

    def landed(
        self, step: ScheduledStep, ended: list[FinishedRequest], begin_s: float, end_s: float
    ) -> None:
        """A step has ended, well or not. ended: requests that ended with it."""

    def aborted(self, ended: list[FinishedRequest], time_s: float) -> None:
        """A request was ended between two steps, all of its answers."""


class NoObserver:
    """Nobody watches."""

    def noted(self, *_: object) -> None: ...

    def added(self, *_: object) -> None: ...

    def aborted(self, *_: object) -> None: ...

    def forked(self, *_: object) -> None: ...

    def cache_reset(self, *_: object) -> None: ...

    def sampled(self, *_: object) -> None: ...

    def step_failed(self, *_: object) -> None: ...

    def step_ended(self, *_: object) -> None: ...
