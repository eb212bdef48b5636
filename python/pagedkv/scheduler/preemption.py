"""Who gives up its blocks, for whom, and how they come back: running requests that grow, or a more
urgent one that waits; swapped to the CPU, or computed again (cost_model.py).

The forks and beams of one request are swapped as a unit, what they share once. Computed again they
are one by one, for each that goes leaves what it shares to the others.
"""

from __future__ import annotations

import bisect
import dataclasses

import numpy as np
from numpy.typing import NDArray

from pagedkv.block_manager import BlockManager
from pagedkv.config import SchedulerConfig
from pagedkv.records import Preempted, PreemptionChoice, counted, no_pairs
from pagedkv.scheduler.admission import Admission
from pagedkv.scheduler.cost_model import Rates, choose
from pagedkv.scheduler.decision_log import DecisionLog
from pagedkv.scheduler.entry import Entry
from pagedkv.scheduler.pins import Pins
from pagedkv.scheduler.queue import RankedQueue
from pagedkv.scheduler.running import RunningSet


def _will_wait_for_slots(entry: Entry) -> bool:
    """Whether it is a beam whose search needs more slots than it has, when none is free."""
    group = entry.group
    if group is None or group.search is None:
        return False
    return not group.is_forked or any(beam.slot is None for beam in group.beams)


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
        bytes_per_block: int,
        enable_prefix_caching: bool,
        log: DecisionLog,
        pins: Pins,
    ) -> None:
        self._manager = manager
        self._config = config
        self._running = running
        self._queue = queue
        self._admission = admission
        self._bytes_per_block = bytes_per_block
        self._has_prefix_cache = enable_prefix_caching
        self._log = log
        self._pins = pins
        # Units swapped out for this step, and their pairs.
        self._swapped_out: list[tuple[list[Entry], NDArray[np.int64]]] = []
        self.rates = Rates()

    def take_swapped_out(self) -> NDArray[np.int64]:
        """Pairs (block, CPU block) [n, 2] since the last call, in the order to run them."""
        if not self._swapped_out:
            return no_pairs()
        pairs = np.concatenate([pairs for _, pairs in self._swapped_out])
        self._swapped_out.clear()
        return pairs

    def make_room(
        self, rows: NDArray[np.int64], query_lens: NDArray[np.int64], num_step: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], list[Preempted]]:
        """Preempt until the rows' new blocks fit; victims leave the step's rows too. Where blocks
        that launched steps hold back will be enough, the rows with the highest rank sit this step
        out instead: preempting would not make room any sooner.
        """
        running = self._running
        preempted: list[Preempted] = []
        while rows.size:
            needed = self.needed_blocks(rows, query_lens)
            available = self._manager.num_allocatable_blocks
            if needed <= available:
                break
            if self._pins.give_up_oldest():
                continue
            if needed <= available + self._manager.num_returning_blocks:
                return *self._hold_back(rows, query_lens, available), preempted
            if len(running) == 1:
                if self.drop_one_swapped() is not None:
                    continue
                raise RuntimeError(
                    f"the only running request needs {needed} blocks and {available} are left: "
                    "someone else holds blocks of this manager"
                )
            victim = self._next_victim()
            if victim is None:  # who has a reservation goes after all that the others hold
                if self.drop_one_swapped() is not None:
                    continue
                victim = int(running.order[-1])
            by = f"since the step needs {counted(needed, 'block')} and {available} can be taken"
            gone, choice = self._preempt(
                self._unit_of(victim, keeps=running.order[0]), num_step, by
            )
            for slot, name in gone.items():
                preempted.append(Preempted(name, slot, needed, available, choice))
            keep = ~np.isin(rows, list(gone))
            rows, query_lens = rows[keep], query_lens[keep]
        return rows, query_lens, preempted

    def has_room(self, rows: NDArray[np.int64], query_lens: NDArray[np.int64]) -> bool:
        """Whether nobody need be preempted for these rows."""
        return self.needed_blocks(rows, query_lens) <= self._manager.num_allocatable_blocks

    def preempt_alone(
        self, slot: int, needed: int, available: int, num_step: int, by: str
    ) -> Preempted:
        """A sequence without others of its request, whose last token is known. needed, available:
        the numbers behind it.
        """
        gone, choice = self._preempt([self._running.entry_at(slot)], num_step, by)
        return Preempted(gone[slot], slot, needed, available, choice)

    def needed_blocks(self, rows: NDArray[np.int64], query_lens: NDArray[np.int64]) -> int:
        """Blocks that a step of these rows takes, and those that must stay for reservations."""
        seq_ids = self._running.slots.seq_ids[rows]
        needed = self._manager.num_blocks_needed(seq_ids, query_lens)
        return needed + self._reserved_blocks(rows, query_lens)

    def make_way(self, num_step: int) -> list[Preempted]:
        """If the lowest rank is a beam that waits for one of its search which has no slot: the
        highest rank gives it its own, though not one with a reservation that goes on to its end by
        itself. What the other goes on to compute would be thrown away later, once it waits too.
        """
        order, table = self._running.order, self._running.slots
        if table.num_free or not table.is_beam[order[0]]:
            return []
        group = self._running.entry_at(int(order[0])).group
        assert group is not None
        is_waiting = table.num_computed[order[0]] == table.num_tokens[order[0]]
        if not is_waiting or all(beam.slot is not None for beam in group.beams):
            return []
        for slot in order[:0:-1].tolist():
            entry = self._running.entry_at(slot)
            may_go = table.worst_blocks[slot] == 0 or _will_wait_for_slots(entry)
            if may_go and entry.group is not group:
                return [self._take(slot, num_step)]
        return []

    def _next_victim(self) -> int | None:
        """The highest rank without a reservation. Rather than the lowest rank of all, which always
        goes on, a beam that waits for others, reserved or not. None: there is neither.
        """
        order, table = self._running.order, self._running.slots
        free_to_go = order[table.worst_blocks[order] == 0]
        if free_to_go.size and free_to_go[-1] != order[0]:
            return int(free_to_go[-1])
        waits = table.is_beam[order] & (table.num_computed[order] == table.num_tokens[order])
        waiting = order[1:][waits[1:]]
        if waiting.size:
            return int(waiting[-1])
        return int(free_to_go[-1]) if free_to_go.size else None

    def _hold_back(
        self, rows: NDArray[np.int64], query_lens: NDArray[np.int64], available: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """As many of the rows, from the lowest rank on, as fit into the available blocks."""
        place = np.empty(self._running.slots.max_num_seqs, dtype=np.int64)
        place[self._running.order] = np.arange(len(self._running))
        by_rank = np.argsort(place[rows])

        def needed(num_kept: int) -> int:
            kept = by_rank[:num_kept]
            return self.needed_blocks(rows[kept], query_lens[kept])

        num_kept = bisect.bisect_right(range(1, rows.size + 1), available, key=needed)
        for row in by_rank[num_kept:].tolist():
            request = self._running.entry_at(int(rows[row])).request
            numbers = {"needed": needed(rows.size), "available": available}
            self._log.note(request, "waits", lacks="returning", **numbers)
        kept = np.sort(by_rank[:num_kept])
        return rows[kept], query_lens[kept]

    def displace(self, num_step: int) -> list[Preempted]:
        """If the first in the queue has no room, preempt running requests that are less urgent, as
        few as suffice. None, if all of them would not. Pinned blocks go before.
        """
        running, admission, head = self._running, self._admission, self._queue[0]
        order, table = running.order, running.slots
        while len(self._pins):
            promised = admission.promised_blocks(table, order, table.num_computed[order])
            if admission.has_room(head, promised, num_running=order.size):
                break
            self._pins.give_up_oldest()
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
        by = head.request.request_id
        for victim in victims.tolist():
            if running.by_slot[victim] is None:
                continue  # it went with its unit
            why = f"for {by!r}, which has priority {urgency}"
            gone, choice = self._preempt(self._unit_of(victim), num_step, why)
            for slot, name in gone.items():
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
        return self._take(int(self._running.order[-1]), num_step)

    def _take(self, slot: int, num_step: int) -> Preempted:
        available = self._manager.num_allocatable_blocks
        by = "since beams of one search wait for each other"
        return self.preempt_alone(slot, 0, available, num_step, by)

    def drop_one_swapped(self) -> Entry | None:
        """Give up what a swapped-out request holds in the pool together with others, and with it
        its CPU blocks; it will be computed again. The highest rank of those that hold any; for when
        nothing else can make room.
        """
        for entry in reversed(list(self._queue)):
            if entry.is_swapped and (self._manager.block_table(entry.seq_id) >= 0).any():
                self.drop_swapped(entry, "since what they share fills the pool")
                return entry
        return None

    def drop_from_unit(self, entry: Entry) -> Entry | None:
        """The highest rank of a swapped-out unit that has no room even in an empty pool is computed
        again instead, so that the others come back.
        """
        if not entry.is_swapped:
            return None
        last = entry.unit[-1]
        self.drop_swapped(last, "since its unit has no room in the pool")
        return last

    def drop_swapped(self, entry: Entry, reason: str) -> None:
        """It keeps nothing, and will be computed again; those it went with keep what is theirs."""
        self._manager.free(entry.seq_id)
        entry.leave_unit()
        entry.blocked_at = None
        self._forget_pairs()
        self._log.note(entry.request, "swap_dropped", reason=reason)

    def _forget_pairs(self) -> None:
        """A CPU block that nobody holds any more may be given out again in this very step."""
        tables = [
            self._manager.block_table(one.seq_id) for unit, _ in self._swapped_out for one in unit
        ]
        held = -1 - np.concatenate([np.empty(0, dtype=np.int32), *tables])
        self._swapped_out = [
            (unit, pairs[np.isin(pairs[:, 1], held)]) for unit, pairs in self._swapped_out
        ]

    def _unit_of(self, victim: int, *, keeps: int | None = None) -> list[Entry]:
        """The running sequences that are swapped out together with a slot's: of its group those
        without a reservation. Not if that took `keeps`, the slot that has to go on: then it goes
        alone.
        """
        running = self._running
        entry = running.entry_at(victim)
        if entry.group is None or not entry.group.is_forked:
            return [entry]
        slots = [
            slot
            for slot in running.order.tolist()
            if slot == victim
            or (
                running.entry_at(slot).group is entry.group and not running.slots.worst_blocks[slot]
            )
        ]
        return [entry] if keeps in slots else [running.entry_at(slot) for slot in slots]

    def _preempt(
        self, unit: list[Entry], num_step: int, by: str
    ) -> tuple[dict[int, str], PreemptionChoice]:
        """Back into the queue with their tokens: the unit, or, to be computed again, the last of
        it. Returns the names of those that went, by the slots they had, and how and why.
        """
        choice = self._choose(unit)
        if not choice.swaps and len(unit) > 1:
            size, why = len(unit), choice.why
            unit = unit[-1:]
            choice = dataclasses.replace(
                self._choose(unit), swaps=False, why=f"for its unit of {size} sequences {why}"
            )
        slots = self._running.slots
        if choice.swaps:
            pairs = self._manager.swap_out([entry.seq_id for entry in unit])
            self._swapped_out.append((unit, np.array(pairs, dtype=np.int64)))
        gone: dict[int, str] = {}
        for entry in unit:
            assert entry.slot is not None
            gone[entry.slot] = entry.request.request_id
            entry.token_ids = slots.known_token_ids(entry.slot)
            entry.num_preemptions += 1
            entry.is_reserved = entry.num_preemptions >= self._config.reserve_after_preemptions
            entry.preempted_in = num_step
            entry.blocked_at = None
            entry.is_swapped = choice.swaps
            if choice.swaps:
                entry.unit = unit
            else:
                self._manager.free(entry.seq_id)
        self._running.leave(unit)
        together = f"its unit of {choice.num_sequences} sequences"
        for entry in unit:
            self._queue.push(entry)
            self._log.note(
                entry.request,
                "preempted",
                by=by,
                way="its blocks move to the CPU" if choice.swaps else "it will be computed again",
                who=together if choice.num_sequences > 1 else "it",
                **dataclasses.asdict(choice),
            )
        return gone, choice

    def _choose(self, unit: list[Entry]) -> PreemptionChoice:
        table = self._running.slots
        slots = [entry.slot for entry in unit if entry.slot is not None]
        computed = table.num_computed[slots]
        seq_ids = [entry.seq_id for entry in unit]
        statistics = self._manager.statistics()
        return choose(
            self._config.preemption_mode,
            is_waiting_beam=bool((computed == table.num_tokens[slots]).any()),
            num_blocks=self._manager.num_swap_out_blocks(seq_ids),
            num_cpu_free=statistics.num_cpu_free + statistics.num_cpu_cached_idle,
            num_tokens=int(computed.sum()) - self._num_shared_tokens(seq_ids, computed),
            bytes_per_block=self._bytes_per_block,
            rates=self.rates,
            num_sequences=len(unit),
        )

    def _num_shared_tokens(self, seq_ids: list[int], computed: NDArray[np.int64]) -> int:
        """Of the tokens of several sequences those that one of them computes for the others: all
        but the first find its full blocks in the prefix cache.
        """
        if len(seq_ids) == 1 or not self._has_prefix_cache:
            return 0
        size = self._manager.block_size
        tables = [
            self._manager.block_table(seq_id)[: num_tokens // size]
            for seq_id, num_tokens in zip(seq_ids, computed.tolist(), strict=True)
        ]
        blocks = np.concatenate(tables)
        blocks = blocks[blocks >= 0]
        return (blocks.size - np.unique(blocks).size) * size
