"""What a recorded run's sequences answered, so that another run of the same requests can answer
alike whenever it asks: outputs do not depend on how requests are scheduled.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pagedkv.records import FinishReason
from pagedkv.replay.recording import Arrival, Fork, Recording

_FILLERS = 2**31 - 1  # from here down: tokens that no recording has


@dataclass(slots=True)
class Script:
    """token_ids: what one sequence generated, those from before a fork included. cut: why it ended
    there; None: it ends by itself, at a stop id or at max_tokens.
    """

    token_ids: list[int] = field(default_factory=list)
    cut: FinishReason | None = "abort"  # the recording ended first


Continuations = tuple[NDArray[np.int64], NDArray[np.float64]]


class Scripts:
    """By key of the sequence."""

    def __init__(self, recording: Recording) -> None:
        self._scripts: dict[str, Script] = {}
        self._beams: dict[tuple[str, int], Continuations] = {}
        self._num_fillers = 0
        forks = [event for event in recording.events if isinstance(event, Fork)]
        stop_ids: dict[str, tuple[int, ...]] = {}
        self._groups: dict[str, str] = {}
        for event in recording.events:
            if isinstance(event, Arrival):
                request = event.request
                stop_ids[event.key] = request.stop_token_ids
                for k in range(request.num_forks if request.is_group else 0):
                    stop_ids[f"{event.key}-{k}"] = request.stop_token_ids
                    if request.num_candidates:
                        self._groups[f"{event.key}-{k}"] = event.key
            elif isinstance(event, Fork):
                stop_ids |= dict.fromkeys(event.fork_keys, stop_ids[event.key])
        for number, step in enumerate(recording.steps):
            while forks and forks[0].num_steps <= number:
                self._fork(forks.pop(0))
            for i, (key, token_id) in enumerate(zip(step.samples, step.token_ids, strict=False)):
                if i not in step.failed:
                    self.of(key).token_ids.append(token_id)
            if step.candidates is not None:
                for j, i in enumerate(step.candidates.samples.tolist()):
                    group = self._groups[step.samples[i]]
                    pair = step.candidates.token_ids[j], step.candidates.logprobs[j]
                    self._beams[group, step.marks[j]] = pair
            for key, reason, _ in step.ends:
                script = self.of(key)
                ids = script.token_ids
                by_itself = reason == "length" or (
                    reason == "stop" and bool(ids) and ids[-1] in stop_ids[key]
                )
                script.cut = None if by_itself else reason

    def _fork(self, fork: Fork) -> None:
        for key in fork.fork_keys:
            self.of(key).token_ids += self.of(fork.key).token_ids[: fork.num_generated]

    def of(self, key: str) -> Script:
        return self._scripts.setdefault(key, Script())

    def token(self, key: str, index: int) -> int:
        """Token `index` of a sequence; where it goes beyond what is recorded, one that nothing
        else has.
        """
        token_ids = self.of(key).token_ids
        if index < len(token_ids):
            return token_ids[index]
        self._num_fillers += 1
        return _FILLERS - self._num_fillers

    def beam(self, group: str, mark: int) -> Continuations | None:
        """What may follow a beam; None: the recording has nothing of it."""
        return self._beams.get((group, mark))
