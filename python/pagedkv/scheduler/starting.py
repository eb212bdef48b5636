"""Who in the queue starts in this step: slots, tokens and blocks are given out in order of rank."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pagedkv.block_manager import BlockManager, MissReason
from pagedkv.config import SchedulerConfig
from pagedkv.records import Admitted, counted, no_pairs
from pagedkv.scheduler.admission import Admission
from pagedkv.scheduler.decision_log import DecisionLog
from pagedkv.scheduler.entry import Entry
from pagedkv.scheduler.offloading import Offloading
from pagedkv.scheduler.pace import Pace
from pagedkv.scheduler.pending import PendingPrefixes
from pagedkv.scheduler.preemption import Preemption
from pagedkv.scheduler.queue import RankedQueue
from pagedkv.scheduler.running import RunningSet
from pagedkv.scheduler.window import Window

_MAX_BLOCKED_PER_STEP = 8  # queued requests found without room before the others are left alone


@dataclass(slots=True)
class Started:
    """Rows that join the step: query_lens has one for each of admitted. copies, swap_in: lists of
    pairs of blocks, in the order in which to run them.
    """

    admitted: list[Admitted] = field(default_factory=list)
    query_lens: list[int] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    swap_in: list[tuple[int, int]] = field(default_factory=list)

    def join(
        self, rows: NDArray[np.int64], query_lens: NDArray[np.int64], copies: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """These after those of the running sequences."""
        new_rows = np.array([one.slot for one in self.admitted], dtype=np.int64)
        rows = np.concatenate([rows, new_rows])
        query_lens = np.concatenate([query_lens, np.array(self.query_lens, dtype=np.int64)])
        if self.copies:
            copies = np.concatenate([copies, np.array(self.copies, dtype=np.int64)])
        return rows, query_lens, copies

    def add(self, later: Started) -> None:
        """What has started after these."""
        self.admitted += later.admitted
        self.query_lens += later.query_lens
        self.copies += later.copies
        self.swap_in += later.swap_in

    def swapped_in(self) -> NDArray[np.int64]:
        """[n, 2]"""
        return np.array(self.swap_in, dtype=np.int64) if self.swap_in else no_pairs()


class Starting:
    """Moves requests from the queue to the running set."""

    def __init__(
        self,
        manager: BlockManager,
        config: SchedulerConfig,
        running: RunningSet,
        queue: RankedQueue,
        admission: Admission,
        has_prefix_cache: bool,
        log: DecisionLog,
        window: Window,
        offloading: Offloading,
        pace: Pace,
    ) -> None:
        self._manager = manager
        self._running = running
        self._queue = queue
        self._admission = admission
        self._config = config
        self._has_prefix_cache = has_prefix_cache
        self._log = log
        self._window = window
        self._offloading = offloading
        self._pace = pace

    def start_beside(
        self,
        rows: NDArray[np.int64],
        query_lens: NDArray[np.int64],
        num_step: int,
        preemption: Preemption,
    ) -> Started:
        """Start what is queued beside the rows of running sequences."""
        pending = self.pending_beside(rows, query_lens, self._running.slots.num_computed[rows])
        budget = self._pace.most - int(query_lens.sum())
        while True:
            started = self.start(budget, pending, num_step)
            if rows.size or started.admitted or self._manager.num_returning_blocks:
                return started
            # With nothing to run, what swapped-out requests hold in the pool is all that can be in
            # the way; and after that, that the first in the queue is a unit of too many.
            dropped = preemption.drop_one_swapped()
            if dropped is None and len(self._queue):
                dropped = preemption.drop_from_unit(self._queue[0])
            if dropped is None:
                return started

    def pending_beside(
        self, rows: NDArray[np.int64], query_lens: NDArray[np.int64], ends: NDArray[np.int64]
    ) -> PendingPrefixes:
        """What the rows compute of prompts: query_lens tokens up to ends."""
        pending = PendingPrefixes(self._manager, enabled=self._has_prefix_cache)
        pending.add_chunks(self._running.slots, self._running.by_slot, rows, query_lens, ends)
        return pending

    def note_shut_out(self, num_step: int) -> None:
        """Tell the first in the queue that nobody starts in this step, for want of room for those
        that run.
        """
        if len(self._queue) and self._queue[0].preempted_in != num_step:
            self._log.note(self._queue[0].request, "waits", lacks="room")

    def start_ahead(
        self,
        budget: int,
        beside: tuple[NDArray[np.int64], NDArray[np.int64]],
        pending: PendingPrefixes,
        num_step: int,
        started: Started,
    ) -> bool:
        """Start the first in the queue, with its unit, before the running sequences have the blocks
        of this step; so only if no block is lacking that they could take in it. Returns whether it
        has started. Notes no reason if not: it has its turn once more after the others.

        Args:
            budget: tokens, at least 1.
            beside: slots and most tokens of the running sequences that are to have theirs.
        """
        running, table = self._running, self._running.slots
        if table.num_free == 0:
            return False
        promised = self._admission.promised_blocks(
            table, running.order, table.num_computed[running.order]
        )
        promised += self._admission.copied_blocks(table, *beside)
        entry = self._queue[0]
        if self._lack(entry, budget, promised, pending, num_step) is not None:
            return False
        self._take(entry, budget, pending, started)
        return True

    def start(self, budget: int, pending: PendingPrefixes, num_step: int) -> Started:
        """Start in order of rank while slots, tokens (budget) and blocks last. Those without room,
        those preempted in this very step, and those that had better wait for what it computes may
        be passed by others, a bounded number of times.
        """
        running, table, admission = self._running, self._running.slots, self._admission
        started = Started()
        num_blocked = most_overtaken = 0
        promised = admission.promised_blocks(
            table, running.order, table.num_computed[running.order]
        )
        place = 0  # in the queue; those before it were found without room or belong to a unit
        while place < len(self._queue) and num_blocked < _MAX_BLOCKED_PER_STEP:
            entry = self._queue[place]
            if budget == 0 or table.num_free == 0:
                self._log.note(entry.request, "waits", **self._no_place(budget))
                break
            if num_blocked and most_overtaken >= self._config.max_num_overtakes:
                self._log.note(entry.request, "waits", lacks="turn", num_overtaken=most_overtaken)
                break
            if entry is not entry.unit[0]:  # it starts with the first of its unit, or waits with it
                place += 1
                continue
            if self._must_wait(entry, budget, promised, pending, num_step):
                num_blocked += 1
                place += 1
                most_overtaken = max(most_overtaken, entry.num_overtaken)
                continue
            for i in range(place):
                self._queue[i].num_overtaken += 1
            most_overtaken += 1
            num_tokens, kept = self._take(entry, budget, pending, started)
            budget -= num_tokens
            promised += kept
            if self._window.size:  # what it shares with others is not promised to both
                promised = admission.promised_blocks(
                    table, running.order, table.num_computed[running.order]
                )
        return started

    def _take(
        self, entry: Entry, budget: int, pending: PendingPrefixes, started: Started
    ) -> tuple[int, int]:
        """Out of the queue into a slot, with its unit. Returns the tokens that they compute in this
        step, and the blocks that stay promised to them beyond.
        """
        admission, unit, was_swapped = self._admission, entry.unit, entry.is_swapped
        kept = sum(admission.kept_blocks(one) for one in unit)
        for one in unit:
            self._queue.remove(one)
            one.num_overtaken = 0
        if was_swapped:
            query_lens = self._resume(unit, budget, started)
        else:
            query_lens = [self._admit(entry, budget, pending, started)]
        started.query_lens += query_lens
        for new in started.admitted[-len(query_lens) :]:
            kept -= admission.held_blocks(self._running.slots, new.slot)
        return sum(query_lens), kept

    def _must_wait(
        self, entry: Entry, budget: int, promised: int, pending: PendingPrefixes, num_step: int
    ) -> bool:
        """Whether it, and its unit with it, cannot start now, for a reason that is noted."""
        lack = self._lack(entry, budget, promised, pending, num_step)
        if lack:
            for one in entry.unit:
                self._log.note(one.request, "waits", **lack)
        return lack is not None

    def _lack(
        self, entry: Entry, budget: int, promised: int, pending: PendingPrefixes, num_step: int
    ) -> dict[str, int | str] | None:
        """Why it, and its unit with it, cannot start now: what to note of it, nothing if that is
        its preemption in this very step. None: it can.
        """
        if entry.preempted_in == num_step:
            return {}
        size = len(entry.unit)
        if size > self._running.slots.num_free or size > budget:
            return self._no_place(0 if size > budget else budget)
        if not self._admission.has_room(entry, promised, num_running=self._num_others(entry)):
            return {
                "lacks": "blocks",
                "needed": self._admission.needed_blocks(entry),
                "available": self._manager.num_allocatable_blocks,
                "promised": promised,
            }
        if entry.is_swapped:
            return None
        if pending.is_worth_waiting(entry.token_ids, entry.request.extra_key):
            return {"lacks": "prefix"}
        return None

    def _no_place(self, budget: int) -> dict[str, int | str]:
        if budget:
            return {"lacks": "slot", "max_num_seqs": self._running.slots.max_num_seqs}
        if self._pace.is_slow:
            return {"lacks": "pace", "max_num_paced_tokens": self._pace.most}
        return {"lacks": "tokens", "max_num_batched_tokens": self._pace.most}

    def _admit(self, entry: Entry, budget: int, pending: PendingPrefixes, started: Started) -> int:
        """The blocks of its first chunk: prefix match first, size after."""
        token_ids, extra_key = entry.token_ids, entry.request.extra_key
        budget = min(budget, self._window.first_chunk)
        num_before = self._offloading.num_cpu_hits
        cached = self._manager.allocate(
            entry.seq_id,
            token_ids,
            max_new_tokens=budget,
            extra_key=extra_key,
            window=self._window.size,
        )
        query_len = min(token_ids.size - cached, budget)
        num_behind = self._manager.num_freed_blocks(entry.seq_id)
        slot = self._running.enter(
            entry, cached + query_len, self._worst(entry), num_freed_blocks=num_behind
        )
        pending.add(token_ids, cached, cached + query_len, extra_key)
        if entry.num_cached_tokens is None:
            entry.num_cached_tokens = cached
        started.admitted.append(Admitted(entry.request, slot, cached))
        behind = ""
        if num_behind:
            one = "block of them lies behind its window and is"
            many = "blocks of them lie behind its window and are"
            behind = f"; {counted(num_behind, one, many)} not held"
        num_from_cpu = self._offloading.num_cpu_hits - num_before
        coming = counted(num_from_cpu, "comes", "come")
        self._log.note(
            entry.request,
            "admitted",
            query_len=query_len,
            num_cached=cached,
            num_from_cpu=num_from_cpu,
            returning=f" ({coming} back from the CPU)" if num_from_cpu else "",
            num_tokens=int(token_ids.size),
            num_freed_blocks=num_behind,
            behind=behind,
            **self._missed(int(token_ids.size), cached),
        )
        return query_len

    def _missed(self, num_tokens: int, cached: int) -> dict[str, int | str | None]:
        """Why the cached prefix that allocate has just found ends where it does: in words, and as
        the block at which it ends with what is known of that one.
        """
        miss, size = self._manager.last_miss, self._manager.block_size
        evicted_in = evicted_for = None
        if miss.reason is MissReason.CACHING_OFF:
            why = "which is off"
        elif miss.reason is MissReason.NEVER_CACHED:
            why = f"block {cached // size} is not and, as far as remembered, never was"
        elif miss.reason is MissReason.EVICTED:
            evicted_in, evicted_for = miss.evicted_in, self._log.name_of(miss.evicted_for)
            whom = "a request of long ago" if evicted_for is None else repr(evicted_for)
            why = f"block {cached // size} is not: it was evicted in step {evicted_in} for {whom}"
        elif miss.reason is MissReason.ON_CPU:
            cost = self._manager.swap_in_cost
            why = (
                f"block {cached // size} is on the CPU: bringing it back would cost {cost:.1f} "
                "times what computing it costs"
            )
        elif num_tokens <= size:
            why = f"where only full blocks of {size} before the last token are"
        elif num_tokens - cached == size:
            why = "and the last token must be computed, so its block is too"
        else:
            why = "all its full blocks"
        return {
            "missed_block": cached // size,
            "miss_reason": miss.reason.name.lower(),
            "evicted_in": evicted_in,
            "evicted_for": evicted_for,
            "missed": why,
        }

    def _resume(self, unit: list[Entry], budget: int, started: Started) -> list[int]:
        """Their blocks come back from the CPU, what they share once, and they go on where they
        stopped. A block that two of them share is copied by the first that writes it, so the copies
        must wait for the swap. Every one gets a token at least.
        """
        manager = self._manager
        seq_ids = [entry.seq_id for entry in unit]
        pairs = manager.swap_in(seq_ids)
        started.swap_in += pairs
        query_lens: list[int] = []
        together = f" with its unit of {len(unit)} sequences" if len(unit) > 1 else ""
        for i, entry in enumerate(list(unit)):
            entry.leave_unit()
            num_held = manager.num_tokens(entry.seq_id)
            most = min(budget - (len(seq_ids) - 1 - i), self._window.first_chunk)
            query_len = min(entry.token_ids.size - num_held, most)
            budget -= query_len
            query_lens.append(query_len)
            slot = self._running.enter(
                entry,
                num_held + query_len,
                self._worst(entry),
                num_freed_blocks=entry.num_freed_blocks,
            )
            started.admitted.append(Admitted(entry.request, slot, num_held, is_resumed=True))
            self._log.note(
                entry.request,
                "resumed",
                num_blocks=len(pairs),
                num_tokens=num_held,
                num_sequences=len(seq_ids),
                together=together,
            )
        started.copies += map(tuple, manager.append_batch(seq_ids, query_lens).tolist())
        return query_lens

    def _num_others(self, entry: Entry) -> int:
        """Running sequences beside which it must leave room to grow. Not those of its own search:
        beams wait for each other, and fit together.
        """
        return 0 if self._running.is_only(entry.group) else len(self._running)

    def _worst(self, entry: Entry) -> int:
        return self._admission.worst_case(entry.request) if entry.is_reserved else 0
