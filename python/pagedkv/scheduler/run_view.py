"""RunView: what a picture of a run is made from, as it changes: the manager's snapshot, the queues
with the reason of each wait, and the steps since the last look.

It changes nothing. While it stands among an engine's watchers a step costs it one append; all else
is done in take().
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from pagedkv.block_manager import BlockManager, Snapshot
from pagedkv.records import Activity, FinishedRequest, Landed, QueueLook, ScheduledStep, Seen
from pagedkv.request import Request
from pagedkv.scheduler.entry import Entry
from pagedkv.scheduler.scheduler import Scheduler

MAX_STEPS = 4096  # kept between two looks
# So many of the queue's first are asked for news of why they wait: a step looks at fewer.
MAX_ASKED = 64


class RunView:
    """Belongs to the thread that owns the scheduler; has_news may be read anywhere."""

    def __init__(self, manager: BlockManager, scheduler: Scheduler) -> None:
        self._manager = manager
        self._scheduler = scheduler
        self._steps: deque[Landed] = deque(maxlen=MAX_STEPS)
        self._num_steps = 0  # since the last look
        self._ended: deque[FinishedRequest] = deque(maxlen=MAX_STEPS)
        self._last: QueueLook | None = None
        self._places: tuple[list[Any], ...] = ()  # in the last look
        self._known: set[int] = set()  # seq_ids in the last look
        self._marks: dict[int, object] = {}  # of those that wait, for what was told of them
        self._sits: set[int] = set()  # seq_ids of running ones that were told to wait
        self.has_news = True

    # -- what the engine tells -------------------------------------------------------------

    def added(self, request: Request, time_s: float) -> None:
        self.has_news = True

    def landed(
        self, step: ScheduledStep, ended: list[FinishedRequest], begin_s: float, end_s: float
    ) -> None:
        self._steps.append(Landed(step, begin_s, end_s))
        self._num_steps += 1
        self._ended.extend(ended)
        self.has_news = True

    def aborted(self, ended: list[FinishedRequest], time_s: float) -> None:
        self._ended.extend(ended)
        self.has_news = True

    # -- a look ----------------------------------------------------------------------------

    def take(self) -> tuple[Snapshot, QueueLook, Activity]:
        """The run as it is, and what happened since the last look."""
        self.has_news = False
        steps, self._steps = self._steps, deque(maxlen=MAX_STEPS)
        ended, self._ended = self._ended, deque(maxlen=MAX_STEPS)
        activity = Activity(tuple(steps), tuple(ended), self._num_steps - len(steps))
        self._num_steps = 0
        return self._manager.snapshot(), self._queues(), activity

    def _queues(self) -> QueueLook:
        running, queue = self._scheduler._running, list(self._scheduler._queue)
        seq_ids = running.slots.seq_ids[running.order]
        pinned = {seq_id: name for name, seq_id in self._scheduler.pins.held()}
        places = (
            seq_ids.tolist(),
            [entry.seq_id for entry in queue],
            [entry.is_swapped for entry in queue],
            [*pinned],
        )
        seen: list[Seen] = []
        if self._last is None or places != self._places:
            now = {*places[0], *places[1], *places[3]}
            new = now - self._known
            if new:
                entries = [running.entry_at(slot) for slot in running.order.tolist()]
                seen = [_seen(entry) for entry in (*entries, *queue) if entry.seq_id in new]
                seen += [
                    Seen(seq_id, name, 0, None, None)
                    for seq_id, name in pinned.items()
                    if seq_id in new
                ]
            waiting = set(places[1])
            self._marks = {one: self._marks[one] for one in self._marks if one in waiting}
            self._known, self._places = now, places
            self._last = QueueLook(
                running=seq_ids,
                queued=np.array(places[1], dtype=np.int64),
                is_swapped=np.array(places[2], dtype=np.bool_),
                pinned=np.array(places[3], dtype=np.int64),
                first_seen=(),
                reasons=(),
            )
            asked = queue[:MAX_ASKED]
            asked += [one for one in queue[MAX_ASKED:] if one.seq_id not in self._marks]
        else:
            asked = queue[:MAX_ASKED]
        reasons = (*self._reasons(asked), *self._sitting_out())
        return replace(self._last, first_seen=tuple(seen), reasons=reasons)

    def _reasons(self, asked: list[Entry]) -> Iterator[tuple[int, str]]:
        """Of those whose last decision is not the one that was told."""
        for entry in asked:
            mark = self._scheduler.log.mark(entry.request.request_id)
            if entry.seq_id in self._marks and self._marks[entry.seq_id] == mark:
                continue
            self._marks[entry.seq_id] = mark
            decision = self._scheduler.log.last_decision(entry.request.request_id)
            if decision is None or decision.kind in ("queued", "forked"):
                yield entry.seq_id, "waits its turn behind those before it"
            else:
                yield entry.seq_id, decision.text

    def _sitting_out(self) -> Iterator[tuple[int, str]]:
        """Of running requests that the last step left out, and that go on again."""
        log, entries = self._scheduler.log, self._scheduler._entries
        told, self._sits = self._sits, set()
        for name in log.sitting_out:
            entry, decision = entries.get(name), log.last_decision(name)
            if entry is None or entry.slot is None or decision is None:
                continue
            self._sits.add(entry.seq_id)
            yield entry.seq_id, decision.text
        for seq_id in told - self._sits:
            if seq_id in self._known and seq_id not in self._marks:
                yield seq_id, ""


def _seen(entry: Entry) -> Seen:
    root = None if entry.family is None else entry.family.root
    if entry.group is not None:
        root = entry.group.request.request_id
    name = entry.request.request_id
    return Seen(entry.seq_id, name, entry.rank, entry.request, None if root == name else root)
