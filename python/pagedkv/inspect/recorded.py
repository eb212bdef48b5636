"""A recorded run as the lines that a page shows: what a live view would have sent, a frame for each
step.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

from pagedkv._core import Snapshot
from pagedkv.inspect.frames import Frame, FrameEncoder, start_frame
from pagedkv.records import Activity, QueueLook, RunFacts


def recorded_lines(
    facts: RunFacts,
    *,
    block_size: int,
    max_num_seqs: int,
    looks: Iterable[tuple[Snapshot, QueueLook, Activity]],
) -> Iterator[bytes]:
    """looks: at the run before its first step, and behind each; every one is a frame."""
    encoder = FrameEncoder()
    frame = start_frame(
        model=facts.model,
        block_size=block_size,
        num_blocks=facts.num_blocks,
        num_cpu_blocks=facts.num_cpu_blocks,
        max_num_seqs=max_num_seqs,
        shows_text=False,
    )
    yield _line(frame)
    for look in looks:
        yield _line(encoder.next(*look) or {"kind": "frame"})


def _line(frame: Frame) -> bytes:
    return json.dumps(frame, separators=(",", ":")).encode() + b"\n"
