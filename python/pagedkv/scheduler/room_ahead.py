"""Room for the steps to come, made while one runs: who sits out the step that is planned ahead, and
who gives up its blocks in it.

A victim must know its last token, so nobody who is in the running step can be one; and blocks that
are given up beside a step can be taken when that has ended. So room is made early: whoever would
have to go within a few steps sits out the next one, and goes in the one after it, and no step has
to wait, neither for tokens nor for blocks that move. If the room comes otherwise meanwhile, since a
request ends, it just goes on.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pagedkv.block_manager import BlockManager
from pagedkv.records import Preempted, ScheduledStep, counted
from pagedkv.scheduler.decision_log import DecisionLog
from pagedkv.scheduler.pins import Pins
from pagedkv.scheduler.preemption import Preemption
from pagedkv.scheduler.running import RunningSet

# Steps that a plan looks at, its own included: in that a victim sits out, in the next it goes, in
# the third its blocks are there.
_NUM_STEPS = 3


class RoomAhead:
    """Chooses; Preemption moves the victims."""

    def __init__(
        self,
        manager: BlockManager,
        running: RunningSet,
        preemption: Preemption,
        pins: Pins,
        log: DecisionLog,
    ) -> None:
        self._manager = manager
        self._running = running
        self._preemption = preemption
        self._pins = pins
        self._log = log

    def make(
        self,
        rows: NDArray[np.int64],
        query_lens: NDArray[np.int64],
        ending: NDArray[np.int64],
        launched: ScheduledStep,
        num_step: int,
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], list[Preempted]]:
        """The rows without those that sit out, and who was preempted. The lowest rank stays.

        REQUIRES room for the rows, and that no request is a group.

        Args:
            ending: slots of sequences that end with the launched step, and then give theirs back.
        """
        preempted: list[Preempted] = []
        if self._has_plenty(rows, query_lens):
            return rows, query_lens, preempted
        table, manager = self._running.slots, self._manager
        leaving = ending  # and those that sit out: their blocks will come back
        while rows.size > 1:
            needed = self._preemption.needed_blocks(rows, self._soon(rows, query_lens))
            available = manager.num_allocatable_blocks
            coming = manager.num_returning_blocks
            coming += manager.num_swap_out_blocks(table.seq_ids[leaving])
            if needed <= available + coming:
                break
            if self._pins.give_up_oldest():
                continue
            victim = self._next_victim(leaving)
            if victim is None:
                break
            if table.seq_ids[victim] in launched.seq_ids:
                leaving = np.append(leaving, victim)
                numbers = {"needed": needed, "available": available, "num_steps": _NUM_STEPS}
                request = self._running.entry_at(victim).request
                self._log.note(request, "waits", lacks="growth", **numbers)
            else:
                steps = f"the next {_NUM_STEPS} steps need"
                by = f"since {steps} {counted(needed, 'block')} and {available} can be taken"
                preempted.append(
                    self._preemption.preempt_alone(victim, needed, available, num_step, by)
                )
            keep = rows != victim
            rows, query_lens = rows[keep], query_lens[keep]
        return rows, query_lens, preempted

    def _has_plenty(self, rows: NDArray[np.int64], query_lens: NDArray[np.int64]) -> bool:
        """Whether the room suffices by far: two blocks for each row, that it has begun and that it
        copies, beside its tokens. Asking the manager about each row costs more.
        """
        num_tokens = _NUM_STEPS * int(query_lens.sum())
        most = num_tokens // self._manager.block_size + 2 * rows.size
        is_reserved = self._running.slots.worst_blocks[self._running.order] > 0
        return most <= self._manager.num_allocatable_blocks and not is_reserved.any()

    def _soon(self, rows: NDArray[np.int64], query_lens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens that each row computes within the steps that are looked at, at most. The last one
        of a request is returned, not computed.
        """
        table = self._running.slots
        computed = table.num_computed[rows]
        known = table.num_tokens[rows] - computed
        soon = np.minimum(_NUM_STEPS * query_lens, known + _NUM_STEPS - 1)
        soon = np.minimum(soon, table.max_len[rows] - 1 - computed)
        most: NDArray[np.int64] = np.maximum(soon, query_lens)
        return most

    def _next_victim(self, leaving: NDArray[np.int64]) -> int | None:
        """The highest rank of those that stay, without a reservation; never the lowest."""
        order, table = self._running.order, self._running.slots
        staying = order[~np.isin(order, leaving)]
        may_go = staying[1:][table.worst_blocks[staying[1:]] == 0]
        return int(may_go[-1]) if may_go.size else None
