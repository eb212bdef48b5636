"""The steps that are launched and have not ended: how one is made of its rows, and what of it
becomes findable when it ends.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pagedkv.block_manager import BlockManager
from pagedkv.records import Preempted, ScheduledStep
from pagedkv.scheduler.decision_log import DecisionLog
from pagedkv.scheduler.forking import Forking
from pagedkv.scheduler.offloading import Offloading
from pagedkv.scheduler.preemption import Preemption
from pagedkv.scheduler.running import RunningSet
from pagedkv.scheduler.starting import Started
from pagedkv.scheduler.window import Window


class InFlight:
    """Oldest first, each with what its rows have computed when it ends: by then the slot table
    counts the step after it too.
    """

    def __init__(
        self,
        manager: BlockManager,
        running: RunningSet,
        forking: Forking,
        preemption: Preemption,
        offloading: Offloading,
        window: Window,
        log: DecisionLog,
    ) -> None:
        self._manager = manager
        self._running = running
        self._forking = forking
        self._preemption = preemption
        self._offloading = offloading
        self._window = window
        self._log = log
        self._steps: list[tuple[ScheduledStep, NDArray[np.int64]]] = []
        self.last_step_id = 0
        self.is_published = False  # the oldest, early

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def oldest(self) -> ScheduledStep:
        return self._steps[0][0]

    def publish_early(self) -> None:
        """What the oldest step computes of prompts is findable from here on, while it runs: whoever
        finds it runs behind it. REQUIRES that all its rows are on their way. Once for each step.
        """
        step, computed = self._steps[0]
        alive = self._running.slots.seq_ids[step.slots] == step.seq_ids
        rows = np.flatnonzero(alive & (step.query_lens > 1))
        if rows.size == 0:
            return
        nothing = np.zeros(rows.size, dtype=np.int64)
        self._manager.publish_batch(step.seq_ids[rows], nothing[:0], nothing, computed[rows])
        self.is_published = True

    def require_none(self, hint: str) -> None:
        if self._steps:
            raise RuntimeError(f"step {self.oldest.step_id} is in flight: {hint}")

    def launch(
        self,
        rows: NDArray[np.int64],
        query_lens: NDArray[np.int64],
        copies: NDArray[np.int64],
        started: Started,
        preempted: tuple[Preempted, ...],
    ) -> ScheduledStep:
        """The step of these rows, in flight from here on."""
        table = self._running.slots
        evicted = self._manager.take_evicted()
        if len(evicted):
            self._log.evictions.add(self._log.step, evicted)
        reaches_end = table.num_computed[rows] == table.num_tokens[rows]
        sample_rows, draws = self._forking.expand(rows, np.flatnonzero(reaches_end))
        swap_out, swap_in = self._offloading.join(
            self._preemption.take_swapped_out(), started.swapped_in()
        )
        step = ScheduledStep(
            step_id=self._manager.begin_step(),
            slots=rows,
            seq_ids=table.seq_ids[rows],
            query_lens=query_lens,
            sample_rows=sample_rows,
            sample_draws=draws,
            num_tokens=int(query_lens.sum()),
            copies=copies,
            admitted=tuple(started.admitted),
            preempted=preempted,
            forked=self._forking.take_in_new_slots(),
            swap_out=swap_out,
            swap_in=swap_in,
            evicted=evicted,
        )
        self._steps.append((step, table.num_computed[rows]))
        self.last_step_id = step.step_id
        return step

    def land(
        self, step: ScheduledStep, *, has_failed: bool = False, has_bad_rows: bool = False
    ) -> NDArray[np.int64]:
        """It has ended. Returns what its rows have computed now. Had it been published early and is
        not as it should be, so hardly ever, the whole prefix cache is forgotten.
        """
        if not self._steps or self.oldest is not step:
            raise RuntimeError(f"step {step.step_id} is not the one in flight")
        self._manager.end_step(step.step_id, has_failed=has_failed)
        if self.is_published and (has_failed or has_bad_rows):
            self._manager.reset_prefix_cache()
        self.is_published = False
        return self._steps.pop(0)[1]

    def publish(
        self,
        step: ScheduledStep,
        alive: NDArray[np.bool_],
        sampled_rows: NDArray[np.int64],
        new_ids: NDArray[np.int64],
        computed: NDArray[np.int64],
        forked_slots: NDArray[np.int64] | None,
    ) -> None:
        """Make the computed full blocks of the rows that are alive findable, and tell the manager
        the new ids: one of each sampled row, then one of each fork.
        """
        counts = np.zeros(step.slots.size, dtype=np.int64)
        counts[sampled_rows] = 1
        if not alive.all():
            counts, computed = counts[alive], computed[alive]
        slots, table = step.slots[alive], self._running.slots
        if forked_slots is not None:
            slots = np.concatenate([slots, forked_slots])
            counts = np.concatenate([counts, np.ones(forked_slots.size, dtype=np.int64)])
            computed = np.concatenate([computed, table.num_computed[forked_slots]])
        self._manager.publish_batch(table.seq_ids[slots], new_ids, counts, computed)
        self._window.free_behind(table, slots)
