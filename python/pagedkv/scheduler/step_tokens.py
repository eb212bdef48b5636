"""Who gets a step's tokens: the running sequences (rows.py), and before the prompts among them that
are less urgent a more urgent request which waits.

The rule. Under "priority" the first in the queue starts before running prompts of a higher rank and
a less urgent priority get their chunks, and takes what it can use of the tokens that decodes and
the other prompts leave; then the next in the queue likewise. Only what is left goes to the less
urgent prompts. One that gets none sits the step out: it keeps its slot and its blocks, and is not
preempted. From the next step on the rest of the urgent prompt goes first by its rank alone.

Nobody starts ahead who lacks a slot, or a block that running sequences could miss, or who had
better wait for a prefix that one of them computes: then these share the tokens as though nobody
waited, so no step is idle for a request that cannot use it. Only the first in the queue starts
ahead, so it overtakes nobody who waits; and whom it passes among the running has a higher rank, so
that ageing (queue.py) bounds how often that happens to them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pagedkv.config import SchedulerConfig
from pagedkv.scheduler.decision_log import DecisionLog
from pagedkv.scheduler.pace import Pace
from pagedkv.scheduler.queue import RankedQueue
from pagedkv.scheduler.rows import share_budget
from pagedkv.scheduler.running import RunningSet
from pagedkv.scheduler.starting import Started, Starting


class StepTokens:
    """Shares out as many of them as the pace allows."""

    def __init__(
        self,
        config: SchedulerConfig,
        running: RunningSet,
        queue: RankedQueue,
        starting: Starting,
        log: DecisionLog,
        pace: Pace,
    ) -> None:
        self._config = config
        self._running = running
        self._queue = queue
        self._starting = starting
        self._log = log
        self._pace = pace

    def share(
        self, order: NDArray[np.int64], remaining: NDArray[np.int64], num_step: int
    ) -> tuple[Started, NDArray[np.int64], NDArray[np.int64]]:
        """Start who goes ahead, and share the rest between the running sequences.

        Args:
            order: slots of the running sequences with tokens left to compute, lowest rank first.
            remaining: tokens that each may compute in this step, at least 1.

        Returns:
            what has started, and the slots and token counts of the rows beside it. Their blocks are
            there.
        """
        budget, table = self._pace.look(), self._running.slots
        rows, query_lens = share_budget(order, remaining, budget)
        started, passed = Started(), self._passed(order, remaining)
        if passed.any():
            ends = table.num_computed[rows] + query_lens
            pending = self._starting.pending_beside(rows, query_lens, ends)
        while passed.any():
            left = budget - sum(started.query_lens) - int(remaining[~passed].sum())
            if left <= 0 or not self._starting.start_ahead(
                left, (order, remaining), pending, num_step, started
            ):
                break
            passed = self._passed(order, remaining)
        if started.admitted:
            budget -= sum(started.query_lens)
            rows, query_lens = share_budget(order, remaining, budget)
        self.note_waits(rows, query_lens, started, np.empty(0, dtype=np.int64))
        return started, rows, query_lens

    def _passed(self, order: NDArray[np.int64], remaining: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of the running are prompts that the first in the queue goes ahead of."""
        table = self._running.slots
        if not self._queue or order.size == 0 or table.ranks[order[-1]] <= self._queue[0].rank:
            return np.zeros(order.size, dtype=np.bool_)
        head = self._queue[0]
        is_less_urgent = table.priorities[order] > head.request.priority
        return is_less_urgent & (table.ranks[order] > head.rank) & (remaining > 1)

    def note_waits(
        self,
        rows: NDArray[np.int64],
        query_lens: NDArray[np.int64],
        started: Started,
        ending: NDArray[np.int64],
    ) -> None:
        """Tell running requests that get no tokens beside these why: prompts that go first, above
        all the more urgent one that has most of them; or that they wait for other beams.

        REQUIRES that the rows' tokens do not count as computed yet.

        Args:
            ending: slots of those that need none any more.
        """
        table, order = self._running.slots, self._running.order
        ahead = [one.slot for one in started.admitted]
        if rows.size + len(ahead) + ending.size == order.size:
            return
        left_out = order[~np.isin(order, np.concatenate([rows, ending, np.array(ahead, int)]))]
        is_prompt = table.num_tokens[rows] - table.num_computed[rows] > 1
        slots = np.concatenate([rows[is_prompt], np.array(ahead, dtype=np.int64)])
        counts = np.concatenate([query_lens[is_prompt], np.array(started.query_lens, np.int64)])
        for slot in left_out.tolist():
            request = self._running.entry_at(slot).request
            if table.num_computed[slot] == table.num_tokens[slot]:
                self._log.note(request, "waits", lacks="beams")
                continue
            goes_first = table.priorities[slots] < table.priorities[slot]
            goes_first &= table.ranks[slots] < table.ranks[slot]
            if not goes_first.any():
                option = "max_num_paced_tokens" if self._pace.is_slow else "max_num_batched_tokens"
                numbers = {"num_tokens": self._pace.most, "option": option}
                self._log.note(request, "waits", lacks="share", **numbers)
                continue
            most = int(np.where(goes_first, counts, 0).argmax())
            self._log.note(
                request,
                "waits",
                lacks="urgent",
                by=self._running.entry_at(int(slots[most])).request.request_id,
                num_tokens=int(counts[most]),
                max_num_batched_tokens=self._pace.most,
            )
