"""What a step that has ended changes: new tokens, what becomes findable, who is done, and what is
left of a step that failed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pagedkv.records import Candidates, FinishedRequest, ScheduledStep
from pagedkv.scheduler.ahead import Ahead
from pagedkv.scheduler.beams import Beams
from pagedkv.scheduler.ending import Ending
from pagedkv.scheduler.entry import Entry
from pagedkv.scheduler.forking import Forking
from pagedkv.scheduler.in_flight import InFlight
from pagedkv.scheduler.preemption import Preemption
from pagedkv.scheduler.running import RunningSet


class Landing:
    """Steps land in the order of their launch. The methods are Scheduler's, documented there."""

    def __init__(
        self,
        running: RunningSet,
        entries: dict[str, Entry],
        forking: Forking,
        in_flight: InFlight,
        ahead: Ahead,
        preemption: Preemption,
        beams: Beams,
        ending: Ending,
    ) -> None:
        self._running = running
        self._entries = entries
        self._forking = forking
        self._in_flight = in_flight
        self._ahead = ahead
        self._preemption = preemption
        self._beams = beams
        self._ending = ending

    def update(
        self,
        step: ScheduledStep,
        token_ids: NDArray[np.int64],
        failed: NDArray[np.bool_] | None,
        logprobs: NDArray[np.float64] | None,
        candidates: Candidates | None,
    ) -> list[FinishedRequest]:
        if token_ids.shape != step.sample_rows.shape:
            raise ValueError(
                f"step {step.step_id} samples {step.sample_rows.size} rows, "
                f"got token ids of shape {token_ids.shape}"
            )
        has_bad_rows = failed is not None and bool(failed.any())
        computed = self._in_flight.land(step, has_bad_rows=has_bad_rows)
        table = self._running.slots
        alive = table.seq_ids[step.slots] == step.seq_ids
        sampled_alive = alive[step.sample_rows]
        # A prompt to be forked is sampled once for each answer; the first is the row's own.
        is_own = step.sample_draws == table.draws[step.slots[step.sample_rows]]
        bad_rows = np.empty(0, dtype=np.int64)
        if failed is not None and failed.any():
            bad_rows = step.sample_rows[failed & sampled_alive & is_own]
            alive[bad_rows] = False
            sampled_alive = alive[step.sample_rows] & ~failed
        own = sampled_alive & is_own
        if candidates is not None:
            self._beams.take(step, own, candidates)
            own &= ~table.is_beam[step.slots[step.sample_rows]]
        rows = step.sample_rows[own]
        slots, new_ids = step.slots[rows], token_ids[own]
        if logprobs is not None:
            table.cumulative_logprobs[slots] += logprobs[own]
        forked = None
        if not is_own.all():
            others = np.flatnonzero(sampled_alive & ~is_own)
            forked = self._forking.fork_groups(step, others, token_ids, logprobs)
            slots = np.concatenate([slots, forked.slots])
            new_ids = np.concatenate([new_ids, forked.new_ids])
        table.accept(slots, new_ids)
        self._in_flight.publish(
            step, alive, rows, new_ids, computed, None if forked is None else forked.slots
        )

        ends = self._ending.ends_of(slots, new_ids, step.slots[bad_rows])
        if forked is not None:
            ends += [(entry, reason, None) for entry, reason in forked.ended]
        ended = self._ending.end(ends)
        if ends:
            self._ahead.queue_may_start()
        if candidates is not None:
            done = self._beams.advance()
            ended += self._ending.end([(beam, "length", None) for beam in done])
        return ended

    def fail_rows(
        self, step: ScheduledStep, rows: Sequence[int], error: str
    ) -> list[FinishedRequest]:
        self._ahead.queue_may_start()
        seq_ids = self._running.slots.seq_ids
        alive = [row for row in rows if seq_ids[step.slots[row]] == step.seq_ids[row]]
        return self._ending.end(
            [(self._running.entry_at(int(step.slots[row])), "error", error) for row in alive]
        )

    def fail(self, step: ScheduledStep, error: str) -> list[FinishedRequest]:
        was_published = self._in_flight.is_published
        self._in_flight.land(step, has_failed=True)
        self._ahead.queue_may_start()
        for one in step.preempted:
            entry = self._entries.get(one.request_id)
            if entry is not None and entry.is_swapped:
                self._preemption.drop_swapped(entry, "since the step that moved them failed")
        alive = self._running.slots.seq_ids[step.slots] == step.seq_ids
        ending = [self._running.entry_at(int(slot)) for slot in step.slots[alive]]
        if was_published and len(self._in_flight):
            ending += self._started_on_cached(self._in_flight.oldest)
        return self._ending.end([(entry, "error", error) for entry in ending])

    def _started_on_cached(self, step: ScheduledStep) -> list[Entry]:
        """Who started in a step on what it found in the prefix cache, and is alive."""
        found = [one for one in step.admitted if one.num_cached_tokens and not one.is_resumed]
        entries = [self._entries.get(one.request.request_id) for one in found]
        return [entry for entry in entries if entry is not None and entry.slot is not None]
