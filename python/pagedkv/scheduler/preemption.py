"""Who gives up its blocks, and for whom: running requests that grow, or a more urgent one that
waits.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pagedkv.block_manager import BlockManager
from pagedkv.config import SchedulerConfig
from pagedkv.records import Preempted
from pagedkv.scheduler.admission import Admission
from pagedkv.scheduler.entry import Entry
from pagedkv.scheduler.queue import RankedQueue
from pagedkv.scheduler.running import RunningSet


class Preemption:
    """Moves victims from the running set to the queue. Victims are taken from the highest rank; one
    whose worst case is reserved is never among them.
    """

    def __init__(
        self,
        manager: BlockManager,
        config: SchedulerConfig,
        running: RunningSet,
        queue: RankedQueue,
        admission: Admission,
    ) -> None:
        self._manager = manager
        self._config = config
        self._running = running
        self._queue = queue
        self._admission = admission

    def make_room(
        self, rows: NDArray[np.int64], query_lens: NDArray[np.int64], num_step: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], list[Preempted]]:
        """Preempt until the rows' new blocks fit; victims leave the step's rows too."""
        running, table = self._running, self._running.slots
        preempted: list[Preempted] = []
        while rows.size:
            needed = self._manager.num_blocks_needed(table.seq_ids[rows], query_lens)
            needed += self._reserved_blocks(rows, query_lens)
            available = self._manager.num_allocatable_blocks
            if needed <= available:
                break
            if len(running) == 1:
                raise RuntimeError(
                    f"the only running request needs {needed} blocks and {available} are left: "
                    "someone else holds blocks of this manager"
                )
            free_to_go = running.order[table.worst_blocks[running.order] == 0]
            victim = int(free_to_go[-1] if free_to_go.size else running.order[-1])
            entry = running.entry_at(victim)
            preempted.append(Preempted(entry.request.request_id, victim, needed, available))
            self._preempt(entry, num_step)
            keep = rows != victim
            rows, query_lens = rows[keep], query_lens[keep]
        return rows, query_lens, preempted

    def displace(self, num_step: int) -> list[Preempted]:
        """If the first in the queue has no room, preempt running requests that are less urgent, as
        few as suffice. None, if all of them would not.
        """
        running, admission, head = self._running, self._admission, self._queue[0]
        order, table = running.order, running.slots
        if order.size == 0 or table.ranks[order[-1]] <= head.rank:
            return []
        urgency = head.request.priority
        victims = [
            one
            for one in map(running.entry_at, order[::-1].tolist())
            if one.rank > head.rank and one.request.priority > urgency and not one.is_reserved
        ]
        if not victims:
            return []
        promised = admission.promised_blocks(table, order, table.num_computed[order])
        if table.num_free and admission.has_room(head, promised, is_alone=False):
            return []
        staying = np.setdiff1d(order, [one.slot for one in victims])
        needed = admission.needed_blocks(head)
        needed += admission.promised_blocks(table, staying, table.num_computed[staying])
        available = self._manager.num_allocatable_blocks
        gained = self._manager.num_swap_out_blocks([one.seq_id for one in victims])
        if needed > available + gained:
            return []
        displaced: list[Preempted] = []
        for victim in victims:
            assert victim.slot is not None
            name, by = victim.request.request_id, head.request.request_id
            displaced.append(Preempted(name, victim.slot, needed, available, displaced_by=by))
            self._preempt(victim, num_step)
            order = running.order
            promised = admission.promised_blocks(table, order, table.num_computed[order])
            if admission.has_room(head, promised, is_alone=order.size == 0):
                break
        return displaced

    def _reserved_blocks(self, rows: NDArray[np.int64], query_lens: NDArray[np.int64]) -> int:
        """Blocks beyond this step's that are kept for running requests with a reservation."""
        order, table = self._running.order, self._running.slots
        reserved = order[table.worst_blocks[order] > 0]
        if reserved.size == 0:
            return 0
        computed = table.num_computed.copy()
        computed[rows] += query_lens
        return self._admission.promised_blocks(table, reserved, computed[reserved])

    def _preempt(self, entry: Entry, num_step: int) -> None:
        """Back into the queue with its tokens; its K/V will be computed again, or found in the
        prefix cache.
        """
        assert entry.slot is not None
        entry.token_ids = self._running.slots.known_token_ids(entry.slot)
        entry.num_preemptions += 1
        entry.is_reserved = entry.num_preemptions >= self._config.reserve_after_preemptions
        entry.preempted_in = num_step
        entry.blocked_at = None
        self._manager.free(entry.seq_id)
        self._running.leave([entry])
        self._queue.push(entry)
