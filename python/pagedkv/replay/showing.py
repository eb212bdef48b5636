"""A recorded run, driven again to be looked at: what a picture of it is made from, step by step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from pagedkv.block_manager import Snapshot
from pagedkv.records import Activity, QueueLook
from pagedkv.replay.driving import Drive
from pagedkv.replay.recording import Recording
from pagedkv.replay.sources import AsRecorded


def looks(
    recording: Recording, count: Callable[[], object] = lambda: None
) -> Iterator[tuple[Snapshot, QueueLook, Activity]]:
    """The run before its first step, and behind each. count: is called for each step.

    Raises:
        DivergedError: this version decides otherwise than the one that recorded.
    """
    drive = Drive(AsRecorded(recording), recording.cache, recording.scheduler, recording.facts)
    view = drive.open_view()
    yield view.take()
    for _ in itertools.islice(drive.steps(), len(recording.steps)):  # a cut one could go on
        yield view.take()
        count()
