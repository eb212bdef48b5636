"""Who gives up its blocks, for whom, and how they come back: running requests that grow, or a more
urgent one that waits; swapped to the CPU, or computed again (cost_model.py).
"""

from __future__ import annotations

import bisect

import numpy as np
from numpy.typing import NDArray

from pagedkv.block_manager import BlockManager
from pagedkv.config import SchedulerConfig
from pagedkv.records import Preempted, PreemptionChoice, no_pairs
from pagedkv.scheduler.admission import Admission
from pagedkv.scheduler.cost_model import Rates, choose
from pagedkv.scheduler.decision_log import DecisionLog
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
        *,
        bytes_per_block: int,
        log: DecisionLog,
    ) -> None:
        self._manager = manager
        self._config = config
        self._running = running
        self._queue = queue
        self._admission = admission
        self._bytes_per_block = bytes_per_block
        self._log = log
        self._swapped_out: dict[int, NDArray[np.int64]] = {}  # seq_id -> pairs, of this step
        self.rates = Rates()

    def take_swapped_out(self) -> NDArray[np.int64]:
        """Pairs (block, CPU block) [n, 2] since the last call, in the order to run them."""
        if not self._swapped_out:
            return no_pairs()
        pairs = np.concatenate(list(self._swapped_out.values()))
        self._swapped_out.clear()
        return pairs

    def make_room(
        self, rows: NDArray[np.int64], query_lens: NDArray[np.int64], num_step: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], list[Preempted]]:
        """Preempt until the rows' new blocks fit; victims leave the step's rows too. Where blocks
        that launched steps hold back will be enough, the rows with the highest rank sit this step
        out instead: preempting would not make room any sooner.
        """
        running, table = self._running, self._running.slots
        preempted: list[Preempted] = []
        while rows.size:
            needed = self._manager.num_blocks_needed(table.seq_ids[rows], query_lens)
            needed += self._reserved_blocks(rows, query_lens)
            available = self._manager.num_allocatable_blocks
            if needed <= available:
                break
            if needed <= available + self._manager.num_returning_blocks:
                return *self._hold_back(rows, query_lens, available), preempted
            if len(running) == 1:
                if self.drop_one_swapped() is not None:
                    continue
                raise RuntimeError(
                    f"the only running request needs {needed} blocks and {available} are left: "
                    "someone else holds blocks of this manager"
                )
            free_to_go = running.order[table.worst_blocks[running.order] == 0]
            victim = int(free_to_go[-1] if free_to_go.size else running.order[-1])
            entry = running.entry_at(victim)
            by = f"since the step needs {needed} blocks and {available} can be taken"
            choice = self._preempt(entry, num_step, by)
            name = entry.request.request_id
            preempted.append(Preempted(name, victim, needed, available, choice))
            keep = rows != victim
            rows, query_lens = rows[keep], query_lens[keep]
        return rows, query_lens, preempted

    def _hold_back(
        self, rows: NDArray[np.int64], query_lens: NDArray[np.int64], available: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """As many of the rows, from the lowest rank on, as fit into the available blocks."""
        place = np.empty(self._running.slots.max_num_seqs, dtype=np.int64)
        place[self._running.order] = np.arange(len(self._running))
        by_rank = np.argsort(place[rows])

        def needed(num_kept: int) -> int:
            kept = by_rank[:num_kept]
            seq_ids = self._running.slots.seq_ids[rows[kept]]
            return self._manager.num_blocks_needed(
                seq_ids, query_lens[kept]
            ) + self._reserved_blocks(rows[kept], query_lens[kept])

        num_kept = bisect.bisect_right(range(1, rows.size + 1), available, key=needed)
        kept = np.sort(by_rank[:num_kept])
        return rows[kept], query_lens[kept]

    def displace(self, num_step: int) -> list[Preempted]:
        """If the first in the queue has no room, preempt running requests that are less urgent, as
        few as suffice. None, if all of them would not.
        """
        running, admission, head = self._running, self._admission, self._queue[0]
        order, table = running.order, running.slots
        if order.size == 0 or table.ranks[order[-1]] <= head.rank:
            return []
        urgency = head.request.priority
        less_urgent = (table.ranks[order] > head.rank) & (table.priorities[order] > urgency)
        less_urgent &= table.worst_blocks[order] == 0
        if not less_urgent.any():
            return []
        promised = admission.promised_blocks(table, order, table.num_computed[order])
        if table.num_free and (
            admission.has_room(head, promised, num_running=order.size)
            or self._will_have_room(head, promised)
        ):
            return []
        victims, staying = order[less_urgent][::-1], order[~less_urgent]
        needed = admission.needed_blocks(head)
        needed += admission.promised_blocks(table, staying, table.num_computed[staying])
        available = self._manager.num_allocatable_blocks + self._manager.num_returning_blocks
        gained = self._manager.num_swap_out_blocks(table.seq_ids[victims])
        if needed > available + gained:
            return []
        displaced: list[Preempted] = []
        for slot in victims.tolist():
            victim = running.entry_at(slot)
            name = victim.request.request_id
            by = head.request.request_id
            choice = self._preempt(victim, num_step, f"for {by!r}, which has priority {urgency}")
            displaced.append(Preempted(name, slot, needed, available, choice, displaced_by=by))
            order = running.order
            promised = admission.promised_blocks(table, order, table.num_computed[order])
            if admission.has_room(head, promised, num_running=order.size) or self._will_have_room(
                head, promised
            ):
                break
        return displaced

    def _will_have_room(self, entry: Entry, promised: int) -> bool:
        """Whether launched steps hold back what it needs."""
        returning = self._manager.num_returning_blocks
        needed = self._admission.needed_blocks(entry) + promised
        return returning > 0 and needed <= self._manager.num_allocatable_blocks + returning

    def _reserved_blocks(self, rows: NDArray[np.int64], query_lens: NDArray[np.int64]) -> int:
        """Blocks beyond this step's that are kept for running requests with a reservation."""
        order, table = self._running.order, self._running.slots
        reserved = order[table.worst_blocks[order] > 0]
        if reserved.size == 0:
            return 0
        computed = table.num_computed.copy()
        computed[rows] += query_lens
        return self._admission.promised_blocks(table, reserved, computed[reserved])

    def take_last(self, num_step: int) -> Preempted:
        """Preempt the running sequence with the highest rank, for when none of them can go on."""
        if len(self._running) == 0:
            raise RuntimeError(f"{len(self._queue)} requests are queued, yet none can run")
        entry = self._running.entry_at(int(self._running.order[-1]))
        slot, name = int(self._running.order[-1]), entry.request.request_id
        available = self._manager.num_allocatable_blocks
        choice = self._preempt(entry, num_step, "since beams of one search wait for each other")
        return Preempted(name, slot, 0, available, choice)

    def drop_one_swapped(self) -> Entry | None:
        """Give up the CPU blocks of the swapped-out request with the highest rank, and with them
        what it holds in the pool together with others; it will be computed again. For when nothing
        else can make room.
        """
        swapped = [entry for entry in self._queue if entry.is_swapped]
        if not swapped:
            return None
        self.drop_swapped(swapped[-1], "since what they share fills the pool")
        return swapped[-1]

    def drop_swapped(self, entry: Entry, reason: str) -> None:
        """It keeps nothing, and will be computed again."""
        self._manager.free(entry.seq_id)
        self._swapped_out.pop(entry.seq_id, None)
        entry.is_swapped = False
        entry.blocked_at = None
        self._log.note(entry.request, "swap_dropped", reason=reason)

    def _preempt(self, entry: Entry, num_step: int, by: str) -> PreemptionChoice:
        """Back into the queue with its tokens."""
        assert entry.slot is not None
        num_tokens = int(self._running.slots.num_computed[entry.slot])
        choice = self._choose(entry, num_tokens)
        entry.token_ids = self._running.slots.known_token_ids(entry.slot)
        entry.num_preemptions += 1
        entry.is_reserved = entry.num_preemptions >= self._config.reserve_after_preemptions
        entry.preempted_in = num_step
        entry.blocked_at = None
        if choice.swaps:
            pairs = self._manager.swap_out([entry.seq_id])
            self._swapped_out[entry.seq_id] = np.array(pairs, dtype=np.int64)
            entry.is_swapped = True
        else:
            self._manager.free(entry.seq_id)
        self._running.leave([entry])
        self._queue.push(entry)
        self._log.note(
            entry.request,
            "preempted",
            by=by,
            way="its blocks move to the CPU" if choice.swaps else "it will be computed again",
            why=choice.why,
            num_blocks=choice.num_blocks,
            num_tokens=choice.num_tokens,
            num_cpu_free=choice.num_cpu_free,
            swap_us=choice.swap_us,
            recompute_us=choice.recompute_us,
        )
        return choice

    def _choose(self, entry: Entry, num_tokens: int) -> PreemptionChoice:
        return choose(
            self._config.preemption_mode,
            is_waiting_beam=num_tokens == self._running.slots.num_tokens[entry.slot],
            num_blocks=self._manager.num_swap_out_blocks([entry.seq_id]),
            num_cpu_free=self._manager.statistics().num_cpu_free,
            num_tokens=num_tokens,
            bytes_per_block=self._bytes_per_block,
            rates=self.rates,
        )
