"""Continuous batching over the block manager: which rows the next step holds, who waits, who gives
up its blocks, who is done.

schedule() -> the engine runs the step -> update() or fail(); schedule_ahead() plans the next one
while it runs. Every request has a rank that never changes (queue.py). Blocks are taken from the
highest rank and given to the lowest, so whoever runs with the lowest rank always advances. The
manager owns block tables; the slot table owns token ids.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pagedkv.block_manager import BlockManager
from pagedkv.config import SchedulerConfig
from pagedkv.records import (
    Candidates,
    FinishedRequest,
    FinishReason,
    Preempted,
    ScheduledStep,
    no_pairs,
)
from pagedkv.request import Request
from pagedkv.sampling_params import checked_num_forks
from pagedkv.scheduler import invariants
from pagedkv.scheduler.admission import Admission
from pagedkv.scheduler.ahead import Ahead
from pagedkv.scheduler.beams import Beams
from pagedkv.scheduler.cost_model import Rates
from pagedkv.scheduler.decision_log import DecisionLog
from pagedkv.scheduler.ending import Ending
from pagedkv.scheduler.entry import Entry
from pagedkv.scheduler.forking import Forking
from pagedkv.scheduler.in_flight import InFlight
from pagedkv.scheduler.landing import Landing
from pagedkv.scheduler.offloading import Offloading
from pagedkv.scheduler.pace import Pace
from pagedkv.scheduler.pins import Pins
from pagedkv.scheduler.preemption import Preemption
from pagedkv.scheduler.queue import RankedQueue, rank_of
from pagedkv.scheduler.room_ahead import RoomAhead
from pagedkv.scheduler.rows import singles_first, unfinished
from pagedkv.scheduler.running import RunningSet
from pagedkv.scheduler.starting import Started, Starting
from pagedkv.scheduler.step_tokens import StepTokens
from pagedkv.scheduler.window import Window


class Scheduler:
    """Owner of the waiting queue, the running set and their slots. One thread.

    Invariants: I8 a request is in exactly one of waiting, swapped and running; all are in order of
    rank; between steps num_computed equals the manager's num_tokens.
    """

    def __init__(
        self,
        manager: BlockManager,
        config: SchedulerConfig,
        *,
        max_model_len: int,
        enable_prefix_caching: bool = True,
        bytes_per_block: int = 1,
        window: int = 0,
    ) -> None:
        self.config = config
        self.max_model_len = max_model_len
        self.log = DecisionLog(manager.block_size)
        self._running = RunningSet(config.max_num_seqs, max_model_len)
        self.slots = self._running.slots
        self._manager = manager
        self._entries: dict[str, Entry] = {}
        self._queue = RankedQueue()
        self._next_seq_id = 0
        self._num_steps = 0  # calls of schedule
        self._stalled: tuple[Preempted, ...] = ()  # since the last step
        self.window = Window(manager, window, config.max_num_batched_tokens)
        self._admission = Admission(manager, max_model_len, self.window, self._running)
        parts = (manager, config, self._running, self._queue, self._admission)
        self.pins = Pins(manager)
        costs = (bytes_per_block, enable_prefix_caching)
        self._preemption = Preemption(*parts, *costs, self.log, self.pins)
        self._offloading = Offloading(manager, bytes_per_block)
        self._pace = Pace(config, self._running, self._queue)
        rest = (enable_prefix_caching, self.log, self.window, self._offloading, self._pace)
        self._starting = Starting(*parts, *rest)
        places = (self._running, self._queue)
        self._tokens = StepTokens(config, *places, self._starting, self.log, self._pace)
        self._forking = Forking(manager, *places, self._entries, self.log)
        shared = (manager, self._running, self._queue, self._entries, self._forking)
        self._beams = Beams(*shared)
        told = (self._forking, self._preemption, self._offloading, self.window, self.log)
        self._in_flight = InFlight(manager, self._running, *told)
        looked_at = (manager, self._running, self._queue, self._forking, self._preemption)
        self._ahead = Ahead(*looked_at, self.window, config, self._pace)
        self._room_ahead = RoomAhead(manager, self._running, self._preemption, self.pins, self.log)
        self._ending = Ending(*shared, self.log, self._beams, self.pins)
        steps = (self._in_flight, self._ahead, self._preemption)
        self._landing = Landing(
            self._running, self._entries, self._forking, *steps, self._beams, self._ending
        )

    # -- questions ---------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Those without blocks, swapped-out ones not counted."""
        return len(self._queue) - self.num_swapped

    @property
    def num_swapped(self) -> int:
        return sum(entry.is_swapped for entry in self._queue)

    @property
    def rates(self) -> Rates:
        """What the choice between swapping and computing again goes by; the engine sets it."""
        return self._preemption.rates

    @rates.setter
    def rates(self, rates: Rates) -> None:
        self._preemption.rates = rates
        self._offloading.weigh(rates)

    @property
    def has_work(self) -> bool:
        return bool(self._entries)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries or request_id in self._forking.groups

    def request_at(self, slot: int) -> Request | None:
        """The running request that holds a slot."""
        entry = self._running.by_slot[slot]
        return None if entry is None else entry.request

    def request(self, request_id: str) -> Request | None:
        """An unfinished request; None for another id, that of a group included."""
        entry = self._entries.get(request_id)
        return None if entry is None or entry.group is not None else entry.request

    def names_by_seq_id(self) -> dict[int, str]:
        """seq_id -> request_id of every unfinished request."""
        return {entry.seq_id: name for name, entry in self._entries.items()}

    def check_admissible(self, request: Request) -> None:
        """Raise ValueError with the numbers if the request can never run here. Queues nothing."""
        self._forking.check_names(request)
        if request.priority and self.config.scheduling_policy == "fcfs":
            raise ValueError(
                f"request {request.request_id!r}: priority is {request.priority}, but "
                "scheduling_policy is 'fcfs': make it 'priority', or leave the priority 0"
            )
        if request.num_candidates and request.num_forks > self.config.max_num_seqs:
            raise ValueError(
                f"request {request.request_id!r} searches with {request.num_forks} beams at once, "
                f"but max_num_seqs is {self.config.max_num_seqs}"
            )
        self._admission.check(request)

    # -- arrivals and ends -------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request. Raises ValueError as check_admissible does."""
        self.check_admissible(request)
        config = self.config
        rank = rank_of(
            config.scheduling_policy,
            request.priority,
            self._num_steps,
            config.priority_ageing_steps,
        )
        if request.is_group:
            entry = self._forking.open_group(request, self._next_seq_id, rank)
            names = self._forking.groups[request.request_id].names
        else:
            entry, names = Entry(request, self._next_seq_id, rank), [request.request_id]
        self._name_sequences(names)
        self._entries[entry.request.request_id] = entry
        self.log.note(
            entry.request,
            "queued",
            prompt_len=request.prompt_len,
            max_tokens=request.max_tokens,
            priority=request.priority,
            num_queued=len(self._queue),
            num_running=len(self._running),
        )
        self._queue.push(entry)
        self._ahead.queue_may_start()

    def finish(
        self, request_id: str, reason: FinishReason, *, error: str | None = None
    ) -> list[FinishedRequest]:
        """End a request now, wherever it is; blocks it held return to the pool once no launched
        step can touch them. Of a group every answer that has not ended, each with a record.

        Raises KeyError for a request that is not here.
        """
        group = self._forking.groups.get(request_id)
        entries = self._forking.members(group) if group else [self._entries[request_id]]
        self._ahead.queue_may_start()
        return self._ending.end([(entry, reason, error) for entry in entries])

    def fork(
        self, request_id: str, n: int, like: Request | None = None
    ) -> list[tuple[Request, NDArray[np.int32]]]:
        """Make n forks of an unfinished request, between steps: their requests, and the tokens each
        starts with beyond the prompt. like: what they are but for name and draw; None: the request
        itself. Raises ValueError, and changes nothing, if that cannot be.

        REQUIRES that like has the prompt and the stop ids of the request.
        """
        self._in_flight.require_none("fork before or after")
        n = checked_num_forks(n)
        entry = self._entries.get(request_id)
        if entry is None or entry.group is not None:
            kind = "asks for several answers" if request_id in self else "is not running"
            raise ValueError(f"request {request_id!r} {kind}: it cannot be forked")
        if like is not None:
            self._admission.check(like)
        forks = self._forking.fork_running(entry, like or entry.request, n, self._next_seq_id)
        self._name_sequences([request.request_id for request, _ in forks])
        return forks

    def num_generated(self, request_id: str) -> int:
        """Tokens of an unfinished request beyond its prompt."""
        return self._forking.num_generated(self._entries[request_id])

    def _name_sequences(self, names: list[str]) -> None:
        """The next seq_ids are taken, one by each name."""
        for seq_id, name in enumerate(names, self._next_seq_id):
            self.log.name(seq_id, name)
        self._next_seq_id += len(names)

    def take_first_tokens(self) -> list[tuple[Request, int]]:
        """First tokens of answers 1, 2, .. of groups that were forked since the last call."""
        return self._forking.take_first_tokens()

    # -- a step ------------------------------------------------------------------------

    def schedule(self) -> ScheduledStep | None:
        """The next step, or None when nothing is left to run, or nothing that could before a step
        ends that others have launched on this manager. Its blocks are taken and its tokens count as
        computed from here on.
        """
        self._in_flight.require_none("update or fail it first")
        if not self._entries:
            return None
        self._num_steps += 1
        self.log.step = self._in_flight.last_step_id + 1
        displaced = self._preemption.displace(self._num_steps) if self._queue else []
        if self._queue and len(self._running):
            displaced += self._preemption.make_way(self._num_steps)
        order, remaining = unfinished(self._running.order, self.slots)
        remaining = self.window.chunks(self.slots, order, remaining)
        started, rows, query_lens = self._tokens.share(order, remaining, self._num_steps)
        num_wanted = rows.size
        rows, query_lens, preempted = self._preemption.make_room(rows, query_lens, self._num_steps)
        copies = no_pairs()
        if rows.size:
            copies = self._manager.append_batch(self.slots.seq_ids[rows], query_lens)
        self.slots.num_computed[rows] += query_lens
        has_room = not preempted and rows.size == num_wanted
        rows, query_lens, copies = started.join(rows, query_lens, copies)
        if self._queue and has_room:
            later = self._starting.start_beside(rows, query_lens, self._num_steps, self._preemption)
            rows, query_lens, copies = later.join(rows, query_lens, copies)
            started.add(later)
        elif self._queue:
            self._starting.note_shut_out(self._num_steps)
        if rows.size == 0:
            self._stalled += (*displaced, *preempted)
            if self._manager.num_returning_blocks:
                return None
            # Beams that wait for others of their search hold the slots or blocks these need.
            self._stalled += (self._preemption.take_last(self._num_steps),)
            return self.schedule()
        if started.admitted:
            rows, query_lens = singles_first(rows, query_lens)
        gone, self._stalled = (*self._stalled, *displaced, *preempted), ()
        self._ahead.looked_at_queue(query_lens, has_changed=bool(started.admitted or gone))
        return self._in_flight.launch(rows, query_lens, copies, started, gone)

    def schedule_ahead(self) -> ScheduledStep | None:
        """The step after the one in flight, before its tokens are known: each of its sampled rows
        goes on with one that is PENDING in the slot table until update(), and what queues may start
        beside. None where more depends on them (ahead.py), and unless just one is in flight.
        """
        planned = self._ahead.rows(self._in_flight.oldest) if len(self._in_flight) == 1 else None
        if planned is None:
            return None
        rows, query_lens, ending = planned
        self._num_steps += 1
        self.log.step = self._in_flight.last_step_id + 1
        num_wanted = rows.size
        self._tokens.note_waits(rows, query_lens, Started(), ending)
        rows, query_lens, gone = self._room_ahead.make(
            rows, query_lens, ending, self._in_flight.oldest, self._num_steps
        )
        copies = self._manager.append_batch(self.slots.seq_ids[rows], query_lens)
        self.slots.num_computed[rows] += query_lens
        started = Started()
        if gone or rows.size < num_wanted:
            self._ahead.queue_may_start()
            self._starting.note_shut_out(self._num_steps)
        elif self._ahead.may_start:
            self._in_flight.publish_early()
            started = self._starting.start_beside(
                rows, query_lens, self._num_steps, self._preemption
            )
            rows, query_lens, copies = started.join(rows, query_lens, copies)
            if started.admitted:
                rows, query_lens = singles_first(rows, query_lens)
            self._ahead.looked_at_queue(query_lens, has_changed=bool(started.admitted))
        return self._in_flight.launch(rows, query_lens, copies, started, tuple(gone))

    def update(
        self,
        step: ScheduledStep,
        token_ids: NDArray[np.int64],
        failed: NDArray[np.bool_] | None = None,
        logprobs: NDArray[np.float64] | None = None,
        candidates: Candidates | None = None,
    ) -> list[FinishedRequest]:
        """Take the results of a step that ran: token_ids, failed and logprobs [num_samples],
        aligned with step.sample_rows; logprobs where there are groups, candidates of the beams.

        Computed blocks become findable, except those of failed rows, whose requests end with an
        error. Rows of requests that ended while the step ran are ignored. Returns the requests that
        this step ended.
        """
        return self._landing.update(step, token_ids, failed, logprobs, candidates)

    def fail_rows(
        self, step: ScheduledStep, rows: Sequence[int], error: str
    ) -> list[FinishedRequest]:
        """Some rows of a launched step were not computed: their requests end with the error before
        update(), which then publishes nothing of them.
        """
        return self._landing.fail_rows(step, rows, error)

    def fail(self, step: ScheduledStep, error: str) -> list[FinishedRequest]:
        """A launched step did not finish: its requests end with the error, nothing of it is
        published, others go on. Whether its swaps ran is not known, so those that it swapped out
        will be computed again, and what the prefix cache moved is forgotten.
        """
        return self._landing.fail(step, error)

    def check_invariants(self) -> None:
        """Raise AssertionError if the books are wrong: I8, order, slots, counts (invariants.py)."""
        invariants.check(self)
