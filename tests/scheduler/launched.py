"""Steps launched beside those of a simulation's scheduler, as by an engine that launches the next
step before it has the results of the last. Blocks freed meanwhile drain, a random while; nothing
may be written into one before the steps launched until then have ended.
"""

from __future__ import annotations

import random

import numpy as np

from pagedkv.block_manager import BlockManager
from pagedkv.records import ScheduledStep


class LaunchedSteps:
    """Knows which blocks were given up beside which launched step, from ref counts alone."""

    def __init__(self, manager: BlockManager) -> None:
        self._manager = manager
        self._others: list[int] = []  # ids of steps in flight, oldest first
        self._scheduled: int | None = None  # the scheduler's own newest step in flight
        self._ref_counts = manager.ref_counts().copy()
        self._held_back: dict[int, int] = {}  # block -> the last step launched when it was given up
        self.num_held_back = 0
        self.num_waits = 0

    def __len__(self) -> int:
        return len(self._others)

    def look(self) -> None:
        """Note what was given up since the last look. To be called after every call."""
        ref_counts = self._manager.ref_counts()
        newest = max((*self._others, self._scheduled or 0))
        if newest:
            for block in np.flatnonzero((self._ref_counts > 0) & (ref_counts == 0)).tolist():
                self._held_back[block] = newest
                self.num_held_back += 1
        self._ref_counts = ref_counts.copy()

    def scheduled(self, step: ScheduledStep) -> None:
        self._scheduled = step.step_id

    def launch(self) -> None:
        self._others.append(self._manager.begin_step())

    def end_oldest(self) -> None:
        step_id = self._others.pop(0)
        self._manager.end_step(step_id)
        self._forget(step_id)

    def end_before(self, step: ScheduledStep) -> None:
        """Steps end in the order of their launch."""
        while self._others and self._others[0] < step.step_id:
            self.end_oldest()

    def landed(self, step: ScheduledStep) -> None:
        if self._scheduled == step.step_id:  # another may have been launched since
            self._scheduled = None
        self._forget(step.step_id)

    def end_some(self, rng: random.Random) -> None:
        while self._others and rng.random() < 0.4:
            self.end_oldest()

    def check_written(self, blocks: np.ndarray) -> None:
        """blocks: written by the step that is to be launched now."""
        early = set(blocks.tolist()) & self._held_back.keys()
        assert not early, f"blocks {early} are written while a launched step may still touch them"

    def _forget(self, step_id: int) -> None:
        self._held_back = {b: s for b, s in self._held_back.items() if s > step_id}
