"""Whether a recording's run, driven again under its own settings, decides what it decided: every
row, block, preemption, reason and counter of every step.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from pagedkv.replay.driving import Drive
from pagedkv.replay.fields import Line, field
from pagedkv.replay.recording import Recording, Step
from pagedkv.replay.sources import AsRecorded, DivergedError

_REMEMBERED = {"miss_reason", "evicted_in", "evicted_for", "missed"}


def first_difference(
    recording: Recording, on_step: Callable[[], None] = lambda: None
) -> str | None:
    """What the first step that is decided otherwise differs in; None: there is none."""
    drive = Drive(AsRecorded(recording), recording.cache, recording.scheduler, recording.facts)
    notes = _notes_by_step(recording)
    try:
        replayed = itertools.islice(drive.steps(), len(recording.steps))
        for number, (old, new) in enumerate(itertools.zip_longest(recording.steps, replayed), 1):
            on_step()
            if new is None:
                return f"step {number} was recorded, but there is nothing left to run"
            for what, was, now in _pairs(old, new, next(notes)):
                if was != now:
                    return (
                        f"step {number} differs in {what}: recorded {was!r:.200}, got {now!r:.200}"
                    )
    except (DivergedError, ValueError, KeyError, IndexError) as error:
        return str(error)
    return None


def _pairs(old: Step, new: Step, notes: list[Line]) -> Iterator[tuple[str, object, object]]:
    yield "statistics", old.statistics, new.statistics
    yield "what ended", old.line["ended"], new.line["ended"]
    for was, now in itertools.zip_longest(notes, new.notes):
        yield "reasons", _decided(was), _decided(now)


def _decided(note: Line | None) -> Line | None:
    """Without what is remembered of evicted blocks, which depends on the key of the block hash and
    on nothing else: the same miss may be told with or without its cause.
    """
    if note is None:
        return None
    numbers = field(note, "numbers", dict)
    return note | {"numbers": {name: numbers[name] for name in numbers.keys() - _REMEMBERED}}


def _notes_by_step(recording: Recording) -> Iterator[list[Line]]:
    """The notes of each step, after those of the events that came before it."""
    events = iter([*recording.events])
    event = next(events, None)
    for number, step in enumerate(recording.steps):
        notes: list[Line] = []
        while event is not None and event.num_steps <= number:
            notes += event.notes
            event = next(events, None)
        yield notes + step.notes
