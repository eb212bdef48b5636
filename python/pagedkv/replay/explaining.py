"""Why each request of a recorded run was where it was: the decisions in the file, in the words in
which the engine explains them.
"""

from __future__ import annotations

import sys

import numpy as np

from pagedkv.records import Explanation
from pagedkv.replay.fields import Line
from pagedkv.replay.recording import Arrival, Event, Fork, Recording, RecordingError
from pagedkv.request import Request, fork_name
from pagedkv.scheduler.decision_log import DecisionLog

_PROMPT = np.zeros(1, dtype=np.int32)  # a decision is noted for a request, whatever its tokens


def explain(recording: Recording, request_id: str | None = None) -> list[Explanation]:
    """Of one request, of each of its answers if it has several; None: of all, as they came. An id
    that the run used again stands as "id (2)" for the second, and so on.

    Raises:
        KeyError: the recording has no such request.
        RecordingError: a decision in it is not whole.
    """
    reader = _Reader(recording)
    try:
        reader.read()
        if request_id is None:
            return [one for key in reader.requests for one in reader.log.explain(key)]
        found = reader.log.explain(request_id)
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise RecordingError(f"{recording.path}: a decision is not whole: {error!r}") from error
    if not found:
        some = ", ".join(reader.requests[:8]) + (", ..." if len(reader.requests) > 8 else "")
        raise KeyError(
            f"request {request_id!r} is not in {recording.path}, which has "
            f"{len(reader.requests)}: {some}"
        )
    return found


class _Reader:
    """Notes the recording's decisions once more, in their order."""

    def __init__(self, recording: Recording) -> None:
        self.log = DecisionLog(recording.cache.block_size, max_finished=sys.maxsize)
        self.requests: list[str] = []  # keys, forks included
        self._recording = recording
        self._keys: dict[str, str] = {}  # request_id -> key
        self._num_sequences = 0

    def read(self) -> None:
        events = iter(self._recording.events)
        event = next(events, None)
        for number, step in enumerate(self._recording.steps):
            while event is not None and event.num_steps <= number:
                self._take(event)
                event = next(events, None)
            for note in step.notes:
                self._note(note)
            evicted = step.line["step"]["evicted"]
            if evicted:
                # Decisions of a step carry its number.
                self.log.evictions.add(
                    step.line["step"]["step_id"], np.array(evicted, dtype=np.int64)
                )
        while event is not None:
            self._take(event)
            event = next(events, None)

    def _take(self, event: Event) -> None:
        if isinstance(event, Arrival):
            self._add(event.request.request_id, event.key)
            if event.request.is_group:
                for k in range(event.request.num_forks):
                    key = fork_name(event.key, k)
                    self._keys[event.request.member(k).request_id] = key
                    self._name(key)
            else:
                self._name(event.key)
        elif isinstance(event, Fork):
            for request_id, key in zip(event.fork_ids, event.fork_keys, strict=True):
                self._add(request_id, key)
                self._name(key)
        for note in event.notes:
            self._note(note)

    def _add(self, request_id: str, key: str) -> None:
        self._keys[request_id] = key
        self.requests.append(key)

    def _name(self, key: str) -> None:
        """Sequences are numbered as they come."""
        self.log.name(self._num_sequences, key)
        self._num_sequences += 1

    def _note(self, note: Line) -> None:
        parent_id = note["parent_id"]
        request = Request(
            self._keys[note["request_id"]],
            _PROMPT,
            1,
            parent_id=None if parent_id is None else self._keys[parent_id],
        )
        self.log.step = note["step"]
        self.log.note(request, note["kind"], **note["numbers"])
