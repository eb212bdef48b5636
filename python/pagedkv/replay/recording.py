"""Reads a recording back, checked: a file that is not one gives one error, with its line.

A last line without its end, as a crash leaves it, is left out.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np

from pagedkv.config import CacheConfig, SchedulerConfig
from pagedkv.records import Candidates, FinishReason, RunFacts
from pagedkv.replay.fields import (
    Line,
    counts_of,
    dataclass_of,
    field,
    list_of,
    seconds,
    token_ids_of,
)
from pagedkv.replay.lines import FORMAT, VERSION
from pagedkv.replay.work import StepWork
from pagedkv.request import Request, fork_name
from pagedkv.sampling_params import SamplingParams
from pagedkv.scheduler import Rates


class RecordingError(ValueError):
    """The file is not a recording; the message has the line and what is wrong with it."""


@dataclass(frozen=True, slots=True, eq=False)
class Arrival:
    """A request came. num_steps of this and the other events: the steps before it. key: the
    request's id, made different where the run used an id again.
    """

    time_s: float
    num_steps: int
    notes: list[Line]
    request: Request
    key: str


@dataclass(frozen=True, slots=True)
class Abort:
    time_s: float
    num_steps: int
    notes: list[Line]
    request_id: str
    key: str


@dataclass(frozen=True, slots=True)
class Fork:
    """num_generated: tokens of the request that its forks start with; max_tokens: of each fork,
    those included.
    """

    time_s: float
    num_steps: int
    notes: list[Line]
    request_id: str
    key: str
    fork_ids: list[str]
    fork_keys: list[str]
    num_generated: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class CacheReset:
    time_s: float
    num_steps: int
    notes: list[Line]


Event = Arrival | Abort | Fork | CacheReset


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """A step as it was. line: the whole of it, as written.

    samples: keys of the sequences that were sampled, one for each of token_ids, which are empty if
    the step failed (failure: the error). marks: of candidates.samples. stopped: ids of requests
    that a stop string ended. ends: (key, reason, tokens generated) of all that ended.
    """

    start_s: float
    seconds: float
    rates: Rates
    work: StepWork
    samples: list[str]
    token_ids: list[int]
    failed: list[int]
    failure: str | None
    candidates: Candidates | None
    marks: list[int]
    stopped: list[str]
    ends: list[tuple[str, FinishReason, int]]
    statistics: Line
    notes: list[Line]
    line: Line

    @property
    def end_s(self) -> float:
        return self.start_s + self.seconds


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """A run. is_plain: its token ids are the real ones; is_cut: its last line was not whole."""

    path: Path
    cache: CacheConfig
    scheduler: SchedulerConfig
    facts: RunFacts
    is_plain: bool
    is_cut: bool
    events: list[Event]
    steps: list[Step]


def load(path: str | os.PathLike[str]) -> Recording:
    """Raises OSError, and RecordingError for what is not a recording of this version."""
    path = Path(path)
    reader = _Reader()
    number, is_cut = 0, False
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            if not raw.endswith(b"\n"):
                is_cut = True
                break
            try:
                reader.take(_parse(raw))
            except RecordingError as error:
                raise RecordingError(f"{path}, line {number}: {error}") from None
            except (KeyError, TypeError, ValueError, OverflowError) as error:
                text = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else error
                raise RecordingError(f"{path}, line {number}: {text}") from None
    if reader.header is None:
        raise RecordingError(f"{path}, line {max(number, 1)}: no recording starts here")
    cache, scheduler, facts, is_plain = reader.header
    return Recording(path, cache, scheduler, facts, is_plain, is_cut, reader.events, reader.steps)


def _parse(raw: bytes) -> Line:
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise RecordingError(f"not JSON: {error}") from None
    if not isinstance(line, dict):
        raise RecordingError(f"a line must be an object, got {type(line).__name__}")
    return line


class _Reader:
    """Takes lines in their order."""

    def __init__(self) -> None:
        self.header: tuple[CacheConfig, SchedulerConfig, RunFacts, bool] | None = None
        self.events: list[Event] = []
        self.steps: list[Step] = []
        self._at: dict[int, str] = {}  # slot -> request_id
        self._keys: dict[str, str] = {}  # request_id -> key
        self._used: set[str] = set()  # keys
        self._groups: dict[str, str] = {}  # key of an answer -> key of its group

    def take(self, line: Line) -> None:
        kind = field(line, "kind", str)
        if self.header is None:
            self.header = _header(line)
        elif kind == "step":
            self.steps.append(self._step(line))
        elif kind in _EVENTS:
            time_s, notes = seconds(line, "time"), list_of(line, "notes", dict)
            self.events.append(_EVENTS[kind](self, line, time_s, len(self.steps), notes))
        else:
            raise RecordingError(f"unknown kind {kind!r}; kinds are step, {', '.join(_EVENTS)}")

    def new_key(self, request_id: str) -> str:
        """For a sequence that is new under this id."""
        key = next(
            key
            for i in itertools.count(1)
            if (key := request_id if i == 1 else f"{request_id} ({i})") not in self._used
        )
        self._used.add(key)
        self._keys[request_id] = key
        return key

    def key(self, request_id: str) -> str:
        """Of a request that is known."""
        return self._keys[request_id]

    def add_answers(self, request: Request, key: str) -> None:
        for k in range(request.num_forks):
            name = fork_name(key, k)
            self._used.add(name)
            self._keys[fork_name(request.request_id, k)] = name
            self._groups[name] = key

    def _end(self, line: Line) -> tuple[str, FinishReason, int]:
        reason = field(line, "reason", str)
        if reason not in get_args(FinishReason):
            raise ValueError(f"reason must be one of {get_args(FinishReason)}, got {reason!r}")
        key = self.key(field(line, "request_id", str))
        return key, cast(FinishReason, reason), field(line, "num_generated", int)

    def _step(self, line: Line) -> Step:
        step = field(line, "step", dict)
        for one in (*list_of(step, "admitted", dict), *list_of(step, "forked", dict)):
            self._at[field(one, "slot", int)] = field(one, "request", str)
        slots = list_of(step, "slots", int)
        rows = list_of(step, "sample_rows", int)
        token_ids, failure = token_ids_of(line, "token_ids"), line.get("failure")
        if failure is not None and not isinstance(failure, str):
            raise TypeError(f"failure must be text, got {failure!r}")
        if len(token_ids) != (0 if failure is not None else len(rows)):
            raise ValueError(f"{len(rows)} rows are sampled, but there are {len(token_ids)} tokens")
        if any(not 0 <= row < len(slots) for row in rows):
            raise ValueError(f"sample_rows {rows} are not rows of the step's {len(slots)}")
        keys = [self._keys[self._at[slots[row]]] for row in rows]
        draws = list_of(step, "sample_draws", int)
        if len(draws) != len(rows):
            raise ValueError(f"{len(rows)} rows are sampled with {len(draws)} draws")
        candidates, marks = _candidates(line.get("candidates"))
        return Step(
            start_s=seconds(line, "start"),
            seconds=seconds(line, "seconds"),
            rates=dataclass_of(Rates, field(line, "rates", dict)),
            work=counts_of(StepWork, field(line, "work", dict)),
            samples=[
                fork_name(self._groups[key], draw) if key in self._groups else key
                for key, draw in zip(keys, draws, strict=True)
            ],
            token_ids=token_ids,
            failed=list_of(line, "failed", int),
            failure=failure,
            candidates=candidates,
            marks=marks,
            stopped=list_of(line, "stopped", str),
            ends=[self._end(one) for one in list_of(line, "ended", dict)],
            statistics=field(line, "statistics", dict),
            notes=list_of(line, "notes", dict),
            line=line,
        )


def _header(line: Line) -> tuple[CacheConfig, SchedulerConfig, RunFacts, bool]:
    if line.get("format") != FORMAT:
        raise RecordingError(f"the header's format must be {FORMAT!r}, got {line.get('format')!r}")
    if line["version"] != VERSION:
        raise RecordingError(
            f"this is version {line['version']!r} of the format, written by pagedkv "
            f"{line.get('pagedkv')!r}; version {VERSION} can be read"
        )
    tokens = line["tokens"]
    if tokens not in ("ids", "pseudonyms"):
        raise RecordingError(f"tokens must be ids or pseudonyms, got {tokens!r}")
    facts = dataclass_of(RunFacts, field(line, "facts", dict))
    for name in ("num_blocks", "bytes_per_token", "max_model_len"):
        if field(line["facts"], name, int) < 1:
            raise ValueError(f"{name} must be at least 1, got {line['facts'][name]}")
    if field(line["facts"], "num_cpu_blocks", int) < 0:
        raise ValueError(f"num_cpu_blocks must be at least 0, got {facts.num_cpu_blocks}")
    return (
        dataclass_of(CacheConfig, field(line, "cache", dict)),
        dataclass_of(SchedulerConfig, field(line, "scheduler", dict)),
        facts,
        tokens == "ids",
    )


def _arrival(
    reader: _Reader, line: Line, time_s: float, num_steps: int, notes: list[Line]
) -> Arrival:
    salt = line["cache_salt"]
    request = Request(
        request_id=field(line, "request_id", str),
        prompt_token_ids=np.array(token_ids_of(line, "prompt"), dtype=np.int32),
        max_tokens=field(line, "max_tokens", int),
        stop_token_ids=tuple(token_ids_of(line, "stop_ids")),
        sampling_params=SamplingParams(
            temperature=0,
            max_tokens=field(line, "max_tokens", int),
            n=field(line, "n", int),
            best_of=line["best_of"],
            beam_width=line["beam_width"],
            length_penalty=line["length_penalty"],
            early_stopping=line["early_stopping"],
        ),
        cache_salt=None if salt is None else str(salt),
        priority=field(line, "priority", int),
        user=None if line.get("user") is None else field(line, "user", str),
    )
    key = reader.new_key(request.request_id)
    if request.is_group:
        reader.add_answers(request, key)
    return Arrival(time_s, num_steps, notes, request, key)


def _abort(reader: _Reader, line: Line, time_s: float, num_steps: int, notes: list[Line]) -> Abort:
    request_id = field(line, "request_id", str)
    return Abort(time_s, num_steps, notes, request_id, reader.key(request_id))


def _fork(reader: _Reader, line: Line, time_s: float, num_steps: int, notes: list[Line]) -> Fork:
    request_id = field(line, "request_id", str)
    key, fork_ids = reader.key(request_id), list_of(line, "fork_ids", str)
    return Fork(
        time_s,
        num_steps,
        notes,
        request_id,
        key,
        fork_ids,
        [reader.new_key(one) for one in fork_ids],
        field(line, "num_generated", int),
        field(line, "max_tokens", int),
    )


def _reset(_: _Reader, __: Line, time_s: float, num_steps: int, notes: list[Line]) -> CacheReset:
    return CacheReset(time_s, num_steps, notes)


_EVENTS: dict[str, Callable[[_Reader, Line, float, int, list[Line]], Event]] = {
    "added": _arrival,
    "aborted": _abort,
    "forked": _fork,
    "cache_reset": _reset,
}


def _candidates(line: Any) -> tuple[Candidates | None, list[int]]:
    if line is None:
        return None, []
    token_ids = np.array(list_of(line, "token_ids", list), dtype=np.int64)
    rows = list_of(line, "logprobs", list)
    logprobs = np.array([[-math.inf if one is None else one for one in row] for row in rows])
    samples, marks = list_of(line, "samples", int), list_of(line, "marks", int)
    shape = (len(samples), token_ids.shape[1])
    if token_ids.shape != shape or logprobs.shape != shape or len(marks) != len(samples):
        raise ValueError("candidates of different lengths")
    return Candidates(np.array(samples, dtype=np.int64), token_ids, logprobs), marks
