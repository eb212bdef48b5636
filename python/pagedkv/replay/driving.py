"""Drives the scheduler and the C++ manager along a source of events, times and answers, with no
model and no cache.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedkv.block_manager import BlockManager
from pagedkv.config import CacheConfig, SchedulerConfig
from pagedkv.records import FinishedRequest, RunFacts, ScheduledStep
from pagedkv.replay import lines
from pagedkv.replay.recording import Abort, Arrival, CacheReset, Event, Fork, Step
from pagedkv.replay.sources import Source
from pagedkv.replay.work import work_of
from pagedkv.request import Request, fork_name
from pagedkv.scheduler import RunView, Scheduler, build_scheduler

Build = Callable[[CacheConfig, SchedulerConfig, RunFacts], tuple[BlockManager, Scheduler]]


class Drive:
    """One replayed run. refused: (key, why) of requests and forks that these settings do not
    admit.
    """

    def __init__(
        self,
        source: Source,
        cache: CacheConfig,
        scheduler: SchedulerConfig,
        facts: RunFacts,
        *,
        build: Build = build_scheduler,
    ) -> None:
        """build: makes the manager and the scheduler, for runs of others than the engine's."""
        self._source = source
        self._window = facts.window
        self._manager, self._scheduler = build(cache, scheduler, facts)
        self._scheduler.log.listener = self._note
        self._notes: list[dict[str, Any]] = []
        self._outside: list[FinishedRequest] = []  # ended between steps
        # Of forks, which may be named here in another order than they were.
        self._keys: dict[str, str] = {}  # request_id -> key
        self._ids: dict[str, str] = {}  # key -> request_id
        self.refused: list[tuple[str, str]] = []
        self._view: RunView | None = None

    def open_view(self) -> RunView:
        """Whoever shows the run looks at it by this, between two steps."""
        self._view = RunView(self._manager, self._scheduler)
        return self._view

    def steps(self) -> Iterator[Step]:
        """Run to the end. Steps are as a recording has them."""
        source, scheduler = self._source, self._scheduler
        events = deque(source.events)
        now_s = 0.0
        while True:
            begin_s = source.begin(now_s)
            while events and source.is_due(events[0], begin_s):
                self._apply(events.popleft())
            if not scheduler.has_work:
                if not events:
                    return
                now_s = max(now_s, source.wakes(events[0]))
                self._apply(events.popleft())
                continue
            yield (step := self._step(begin_s))
            now_s = step.end_s

    def _step(self, begin_s: float) -> Step:
        source, scheduler = self._source, self._scheduler
        rates = scheduler.rates = source.rates(begin_s)
        step = scheduler.schedule()
        assert step is not None, "a scheduler with work has a step"
        work = work_of(step, scheduler.slots, self._window)
        keys, line = self._sampled(step), lines.plain(step)
        answers = source.answers(scheduler, step, keys)
        if answers.failure is None:
            ended = scheduler.update(
                step, answers.token_ids, answers.failed, candidates=answers.candidates
            )
            scheduler.take_first_tokens()
        else:
            ended = scheduler.fail(step, answers.failure)
        for key in keys:
            self._make_forks(key)
        stopped = []
        for key, reason in source.cuts(keys):
            request_id = self._ids.get(key, key)
            if request_id in scheduler:
                ended += scheduler.finish(request_id, reason)
                stopped.append(request_id)
        ends, self._outside = self._outside + ended, []
        end_s = source.end(begin_s, work)
        if self._view is not None:
            self._view.landed(step, ends, begin_s, end_s)
        notes, self._notes = self._notes, []
        return Step(
            start_s=begin_s,
            seconds=end_s - begin_s,
            rates=rates,
            work=work,
            samples=keys,
            token_ids=answers.token_ids.tolist(),
            failed=answers.failed.nonzero()[0].tolist(),
            failure=answers.failure,
            candidates=answers.candidates,
            marks=[],
            stopped=stopped,
            ends=[(self._key(one.request), one.reason, int(one.token_ids.size)) for one in ends],
            statistics=lines.counters(self._manager),
            notes=notes,
            line={"step": line, "ended": lines.ended_lines(ended)},
        )

    def _sampled(self, step: ScheduledStep) -> list[str]:
        """Keys of the sequences that are sampled: of a prompt to be forked those of its answers."""
        keys = []
        slots = step.slots[step.sample_rows].tolist()
        for slot, draw in zip(slots, step.sample_draws.tolist(), strict=True):
            request = self._scheduler.request_at(slot)
            assert request is not None
            if request.parent_id is not None and request.draw != draw:
                keys.append(fork_name(request.parent_id, draw))
            else:
                keys.append(self._key(request))
        return keys

    def _key(self, request: Request) -> str:
        return self._keys.get(request.request_id, request.request_id)

    def _note(self, request: Request, kind: str, num_step: int, numbers: dict[str, Any]) -> None:
        self._notes.append(lines.note_line(request, kind, num_step, numbers))

    # -- events --------------------------------------------------------------------------

    def _apply(self, event: Event) -> None:
        if isinstance(event, Arrival):
            self._add(event)
        elif isinstance(event, Abort):
            request_id = self._source.aborted_id(event)
            request_id = self._ids.get(request_id, request_id)
            if request_id in self._scheduler:
                self._outside += self._scheduler.finish(request_id, "abort")
        elif isinstance(event, CacheReset):
            self._manager.reset_prefix_cache()
        elif isinstance(event, Fork):
            self._fork(event.request_id, event)
        else:
            raise TypeError(f"an event must be one of a recording, got {event!r}")

    def _add(self, arrival: Arrival) -> None:
        try:
            self._scheduler.add(self._source.request(arrival))
        except ValueError as error:
            self.refused.append((arrival.key, str(error)))
        else:
            self._make_forks(arrival.key)

    def _fork(self, request_id: str, fork: Fork) -> list[tuple[Request, NDArray[np.int32]]]:
        parent, like = self._scheduler.request(request_id), None
        if parent is not None:
            like = dataclasses.replace(parent, max_tokens=fork.max_tokens)
        return self._scheduler.fork(request_id, len(fork.fork_keys), like)

    def _make_forks(self, key: str) -> None:
        """Those that are due of a sequence, and in turn of its forks."""
        for fork in self._source.forks_due(key):
            request_id = self._ids.get(key, key)
            try:
                made = self._fork(request_id, fork)
            except ValueError as error:
                self.refused += ((one, str(error)) for one in fork.fork_keys)
                continue
            for one, (request, _) in zip(fork.fork_keys, made, strict=True):
                self._keys[request.request_id] = one
                self._ids[one] = request.request_id
            for one in fork.fork_keys:
                self._make_forks(one)
