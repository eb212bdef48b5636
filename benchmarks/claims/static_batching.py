"""Static batching: who comes while a batch runs waits until all of it has ended. A front of the
scheduler, which does the rest as ever; rows that have ended are not computed on, as they were in
engines that could not leave them out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from pagedkv.records import FinishedRequest, FinishReason, ScheduledStep
from pagedkv.request import Request
from pagedkv.scheduler import Scheduler


class StaticBatching:
    """Holds arrivals back, and gives the scheduler a batch when it has nothing left: as many as fit
    at once, in order of arrival. What is not here is the scheduler's.
    """

    def __init__(
        self, scheduler: Scheduler, num_blocks: int, blocks_of: Callable[[Request], int]
    ) -> None:
        """blocks_of: what a request may take of the pool's num_blocks at most."""
        self._scheduler = scheduler
        self._num_blocks = num_blocks
        self._blocks_of = blocks_of
        self._waiting: deque[Request] = deque()
        self.batches: list[int] = []  # sizes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "rates":
            self._scheduler.rates = value
        else:
            object.__setattr__(self, name, value)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._scheduler or self.holds(request_id)

    def holds(self, request_id: str) -> bool:
        """Whether it waits for the batch to end."""
        return self._held(request_id) is not None

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work or bool(self._waiting)

    @property
    def num_waiting(self) -> int:
        return self._scheduler.num_waiting + len(self._waiting)

    def add(self, request: Request) -> None:
        self._scheduler.check_admissible(request)
        self._waiting.append(request)

    def finish(
        self, request_id: str, reason: FinishReason, *, error: str | None = None
    ) -> list[FinishedRequest]:
        held = self._held(request_id)
        if held is None:
            return self._scheduler.finish(request_id, reason, error=error)
        self._waiting.remove(held)
        self._scheduler.add(held)
        return self._scheduler.finish(request_id, reason, error=error)

    def schedule(self) -> ScheduledStep | None:
        if not self._scheduler.has_work and self._waiting:
            self._begin()
        return self._scheduler.schedule()

    def _held(self, request_id: str) -> Request | None:
        return next((one for one in self._waiting if one.request_id == request_id), None)

    def _begin(self) -> None:
        num_left, num_seqs = self._num_blocks, 0
        most = self._scheduler.config.max_num_seqs
        size = 0
        while self._waiting:
            head = self._waiting[0]
            num_left -= self._blocks_of(head)
            num_seqs += head.num_forks
            if size and (num_left < 0 or num_seqs > most):
                break
            self._scheduler.add(self._waiting.popleft())
            size += 1
        self.batches.append(size)
