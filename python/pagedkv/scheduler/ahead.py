"""The rows of the step after the one that runs, before its tokens are known: what can be planned
without them.

A row that gets a token goes on with it, whatever it is; whether it ends the request is learnt one
step late, and costs one row that is thrown away. What queues starts beside such rows in order of
arrival, and finds the prefixes that the running step computes. Who will have to give up its blocks
soon leaves beside them (room_ahead.py). Everything else waits for the tokens: room that is lacking
at once, answers that are forked from a prompt, beams, windows, urgent requests, and requests whose
logits the host changes by their tokens: functions and bad words of several tokens.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pagedkv.block_manager import BlockManager
from pagedkv.config import SchedulerConfig
from pagedkv.records import ScheduledStep
from pagedkv.scheduler.forking import Forking
from pagedkv.scheduler.pace import Pace
from pagedkv.scheduler.preemption import Preemption
from pagedkv.scheduler.queue import RankedQueue
from pagedkv.scheduler.rows import share_budget, unfinished
from pagedkv.scheduler.running import RunningSet
from pagedkv.scheduler.window import Window


class Ahead:
    """Plans; takes no blocks."""

    def __init__(
        self,
        manager: BlockManager,
        running: RunningSet,
        queue: RankedQueue,
        forking: Forking,
        preemption: Preemption,
        window: Window,
        config: SchedulerConfig,
        pace: Pace,
    ) -> None:
        self._manager = manager
        self._running = running
        self._queue = queue
        self._forking = forking
        self._preemption = preemption
        self._window = window
        self._config = config
        self._pace = pace
        # Whether those that queue were all looked at, none could start, and nothing has changed.
        self._none_can_start = False

    @property
    def may_start(self) -> bool:
        """Whether the queue is to be looked at."""
        return bool(self._queue) and not self._none_can_start

    def looked_at_queue(self, query_lens: NDArray[np.int64], *, has_changed: bool) -> None:
        """A step of these rows was made, and what queues was looked at. has_changed: somebody
        started or was preempted. While it computes a prompt, others may wait for its prefix; while
        blocks are on their way back to the pool, for these.
        """
        is_fcfs = self._config.scheduling_policy == "fcfs"
        is_decode = int(query_lens.sum()) == query_lens.size
        is_idle = is_fcfs and is_decode and not has_changed and bool(self._queue)
        self._none_can_start = is_idle and self._manager.num_returning_blocks == 0

    def queue_may_start(self) -> None:
        """Something has come or gone since."""
        self._none_can_start = False

    def rows(
        self, running: ScheduledStep
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]] | None:
        """Slots and token counts of the step after the running one, as share_budget has them, and
        slots of those that end with the running one. None: it has to wait for the tokens, or there
        is nothing to compute.
        """
        if self.may_start and self._config.scheduling_policy != "fcfs":
            return None
        if self._forking.groups or self._window.size:
            return None
        table = self._running.slots
        if table.reads_tokens[self._running.order].any():
            return None
        slots = running.slots[running.sample_rows]
        is_alive = table.seq_ids[slots] == running.seq_ids[running.sample_rows]
        table.expect(slots[is_alive])
        order = self._running.order
        ends = table.is_pending[order] & (table.num_tokens[order] >= table.max_len[order])
        ending = order[ends]
        order, remaining = unfinished(order[~ends], table)
        if order.size == 0:
            return None
        rows, query_lens = share_budget(order, remaining, self._pace.look())
        has_room = self._preemption.has_room(rows, query_lens)
        return (rows, query_lens, ending) if has_room else None
