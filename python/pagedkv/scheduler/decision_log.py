"""Why each request is where it is: what the scheduler decided about it, and the numbers behind it.

Memory is bounded: MAX_PER_REQUEST decisions of each request, equal ones in a row as one, the last
MAX_FINISHED requests that have ended, the names of the last MAX_NAMES sequences. Evictions, which
come in every step of a full pool, are kept as arrays (eviction_log.py).
"""

from __future__ import annotations

import string
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pagedkv.records import Decision, DecisionKind, Explanation, counted
from pagedkv.request import Request
from pagedkv.scheduler.eviction_log import EvictionLog

MAX_PER_REQUEST = 64
MAX_FINISHED = 256
MAX_NAMES = 16384

# {name:one|many} is the number and what it counts; {name:one}: many is one with an s.
_TEXTS: dict[str, str] = {
    "queued": "queued with {prompt_len:prompt token}, at most {max_tokens} to generate, "
    "priority {priority}; {num_queued:request waits|requests wait}, {num_running:runs|run}",
    "forked": "forked from {parent!r} with {num_tokens:token}, {place}",
    "admitted": "starts with a chunk of {query_len:token}; {num_cached} of its "
    "{num_tokens:token is|tokens are} in the prefix cache{returning}, {missed}{behind}",
    "resumed": "resumes{together}: {num_blocks:block comes|blocks come} back from the CPU, "
    "{num_tokens:token} need not be computed again",
    "preempted": "preempted {by}; {way} ({why}); {who} held {num_blocks:block} alone and had "
    "computed {num_tokens:token}",
    "swap_dropped": "its swapped-out blocks are given up {reason}; it will be computed again",
    "finished": "ends: {reason}, {num_generated:token} generated, preempted {num_preemptions:time}",
}

# In the queue: such a wait lasts until the next decision, though nobody looks again in every step.
_WAITS_IN_QUEUE = {
    "blocks": "waits for {needed:block}; {available} can be taken, "
    "{promised:of them is|of them are} promised to running requests, and the watermark stays free",
    "slot": "waits for one of {max_num_seqs:slot} (max_num_seqs)",
    "tokens": "waits, the step's {max_num_batched_tokens:token is|tokens are} used up "
    "(max_num_batched_tokens)",
    "pace": "waits, since others will run for longer than it can: the step's "
    "{max_num_paced_tokens:token is|tokens are} used up (max_num_paced_tokens)",
    "prefix": "waits, the step computes a prefix that it would otherwise compute again",
    "turn": "waits its turn: a request before it waits for blocks and has been passed "
    "{num_overtaken:time}, as often as allowed (max_num_overtakes)",
    "room": "waits, as nobody starts while running requests lack blocks",
    "place": "waits its turn behind those before it",
}

# Of running ones, which keep their blocks.
_SITS_OUT = {
    "urgent": "waits for a more urgent request's prompt: {by!r} gets {num_tokens} of the step's "
    "{max_num_batched_tokens:token}; it keeps its blocks",
    "share": "sits out, the step's {num_tokens:token is|tokens are} used up ({option})",
    "returning": "sits out: the step needs {needed:block}, {available} can be taken, and what "
    "launched steps hold back will be enough",
    "growth": "sits out: the next {num_steps:step} need {needed:block} and {available} can be "
    "taken; it gives up its own then, unless others end",
    "beams": "has computed what it knows, and waits for other beams of its search",
}

_WAITS = _WAITS_IN_QUEUE | _SITS_OUT


class _Words(string.Formatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        return counted(value, *format_spec.split("|")) if format_spec else str(value)


class _Note:
    """One decision, put into words only when somebody asks."""

    __slots__ = ("kind", "last_step", "numbers", "step")

    def __init__(self, kind: DecisionKind, step: int, numbers: dict[str, Any]) -> None:
        self.kind = kind
        self.step = self.last_step = step
        self.numbers = numbers

    def decision(self) -> Decision:
        text = _WAITS[self.numbers["lacks"]] if self.kind == "waits" else _TEXTS[self.kind]
        return Decision(
            self.kind,
            self.step,
            self.last_step,
            self.numbers,
            _Words().vformat(text, (), self.numbers),
        )

    @property
    def leaves_in_queue(self) -> bool:
        """Whether the request is in the queue from then on, until the next decision about it."""
        if self.kind == "waits":
            return self.numbers["lacks"] in _WAITS_IN_QUEUE
        if self.kind == "forked":
            return not self.numbers["has_slot"]
        return self.kind in ("queued", "preempted", "swap_dropped")

    def until(self, step: int) -> list[Decision]:
        """Up to this step, the last before the next decision about the request."""
        decision = self.decision()
        if not self.leaves_in_queue or step <= self.last_step:
            return [decision]
        if self.kind == "waits":
            return [replace(decision, last_step=step)]
        numbers = {"lacks": "place"}
        text = _WAITS["place"]
        return [decision, Decision("waits", self.last_step + 1, step, numbers, text)]


class _Log:
    __slots__ = ("first", "notes", "num_forgotten", "parent_id")

    def __init__(self, parent_id: str | None, first: _Note) -> None:
        self.parent_id = parent_id
        self.first = first
        self.notes: deque[_Note] = deque(maxlen=MAX_PER_REQUEST - 1)
        self.num_forgotten = 0


class DecisionLog:
    """Written by the scheduler's parts; step is the number of the step being built. listener, if
    there is one, hears of every decision: (request, kind, step, numbers).
    """

    def __init__(self, block_size: int = 1, *, max_finished: int = MAX_FINISHED) -> None:
        self.step = 0
        self.listener: Callable[[Request, DecisionKind, int, dict[str, Any]], None] | None = None
        self.evictions = EvictionLog(block_size)
        self._names: OrderedDict[int, str] = OrderedDict()  # by seq_id
        self._max_finished = max_finished
        self._logs: dict[str, _Log] = {}
        self._finished: OrderedDict[str, None] = OrderedDict()
        self._sitting_out: dict[str, None] = {}  # in the step sat_out_in
        self._sat_out_in = 0

    def name(self, seq_id: int, request_id: str) -> None:
        """Remember whose sequence this is."""
        self._names[seq_id] = request_id
        if len(self._names) > MAX_NAMES:
            self._names.popitem(last=False)

    def name_of(self, seq_id: int) -> str | None:
        return self._names.get(seq_id)

    @property
    def sitting_out(self) -> dict[str, None]:
        """Running requests that the last step leaves out."""
        return self._sitting_out if self._sat_out_in == self.step else {}

    def note(self, request: Request, kind: DecisionKind, **numbers: Any) -> None:
        """Remember a decision. One that repeats the last, for the same reason, prolongs it."""
        if self.listener is not None:
            self.listener(request, kind, self.step, numbers)
        name = request.request_id
        if kind == "waits" and numbers["lacks"] in _SITS_OUT:
            if self._sat_out_in != self.step:
                self._sitting_out = {}
                self._sat_out_in = self.step
            self._sitting_out[name] = None
        log = self._logs.get(name)
        if log is None or name in self._finished:  # the name may be used anew
            self._finished.pop(name, None)
            self._logs[name] = _Log(request.parent_id, _Note(kind, self.step, numbers))
            return
        last = log.notes[-1] if log.notes else log.first
        if (
            kind == last.kind == "waits"
            and last.numbers["lacks"] == numbers["lacks"]
            and (last.leaves_in_queue or last.last_step >= self.step - 1)
        ):
            last.last_step, last.numbers = self.step, numbers
            return
        log.num_forgotten += len(log.notes) == log.notes.maxlen
        log.notes.append(_Note(kind, self.step, numbers))

    def finish(self, request: Request, **numbers: Any) -> None:
        """Note the end of a request and keep its log among those of the last ones."""
        self.note(request, "finished", **numbers)
        self._finished[request.request_id] = None
        if len(self._finished) > self._max_finished:
            oldest, _ = self._finished.popitem(last=False)
            del self._logs[oldest]

    def mark(self, name: str) -> object:
        """Another one after each decision about an unfinished request."""
        note = self._last_note(name)
        return None if note is None else (note.last_step, id(note))

    def last_decision(self, name: str) -> Decision | None:
        """About an unfinished request; None: there is none."""
        note = self._last_note(name)
        return None if note is None else note.decision()

    def _last_note(self, name: str) -> _Note | None:
        log = self._logs.get(name)
        if log is None:
            return None
        return log.notes[-1] if log.notes else log.first

    def explain(self, name: str) -> list[Explanation]:
        """Of the request, or of each of its answers if it has several; none if it is not known (any
        more).
        """
        if name in self._logs:
            return [self._explanation(name, self._logs[name])]
        return [
            self._explanation(member, log)
            for member, log in self._logs.items()
            if log.parent_id == name
        ]

    def _explanation(self, name: str, log: _Log) -> Explanation:
        notes = [log.first, *log.notes]
        ends = [note.step - 1 for note in notes[1:]]
        ends.append(notes[-1].last_step if name in self._finished else self.step)
        if log.num_forgotten:
            ends[0] = log.first.last_step
        decisions = [one for note, end in zip(notes, ends, strict=True) for one in note.until(end)]
        # A name may be used anew, for another sequence.
        seq_ids = [seq_id for seq_id, owner in self._names.items() if owner == name]
        if seq_ids:
            decisions += self.evictions.decisions(seq_ids[-1])
            decisions.sort(key=lambda one: (one.step, one.kind == "finished"))
        return Explanation(name, tuple(decisions), log.num_forgotten)
