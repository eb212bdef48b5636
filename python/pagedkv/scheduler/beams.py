"""Beam search among the running sequences: each beam is a sequence that shares its blocks with the
beams it has its past in common with. When every beam of a request has its candidates, the search
(beam_search.py) says which go on: the first that goes on from a beam takes over its sequence, the
others are forked from it, and beams that nothing goes on from are freed.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pagedkv.block_manager import BlockManager
from pagedkv.records import Candidates, FinishedRequest, FinishReason, ScheduledStep
from pagedkv.scheduler.beam_search import BeamSearch, Continuation
from pagedkv.scheduler.entry import Entry, ForkGroup
from pagedkv.scheduler.forking import Forking
from pagedkv.scheduler.queue import RankedQueue
from pagedkv.scheduler.running import RunningSet


class Beams:
    """Moves the beams of a step's groups on. A beam that has computed all it knows, and waits for
    the others, runs with nothing to compute.
    """

    def __init__(
        self,
        manager: BlockManager,
        running: RunningSet,
        queue: RankedQueue,
        entries: dict[str, Entry],
        forking: Forking,
    ) -> None:
        self._manager = manager
        self._running = running
        self._queue = queue
        self._entries = entries
        self._forking = forking

    def take(
        self, step: ScheduledStep, is_usable: NDArray[np.bool_], candidates: Candidates
    ) -> None:
        """Note what each beam of the step may go on with. is_usable: [num_samples]."""
        for j, i in enumerate(candidates.samples.tolist()):
            if is_usable[i]:
                entry = self._running.entry_at(int(step.slots[step.sample_rows[i]]))
                # Rows are as wide as the widest search beside it, which may be another next time.
                k = entry.request.num_candidates
                entry.candidates = (candidates.token_ids[j, :k], candidates.logprobs[j, :k])

    def advance(self) -> list[Entry]:
        """Move on the groups whose beams are all ready. Returns a beam of each whose search has
        ended.

        REQUIRES that what the step computed is published.
        """
        ended: list[Entry] = []
        moves: list[tuple[ForkGroup, BeamSearch, Continuation]] = []
        for group in self._forking.groups.values():
            search = group.search
            if search is None or not all(map(self._is_ready, group.beams)):
                continue
            if not group.is_forked:
                group.is_forked = True
                group.num_cached_tokens = group.beams[0].num_cached_tokens or 0
            known = [self._generated(beam) for beam in group.beams]
            pairs = [beam.candidates for beam in group.beams if beam.candidates is not None]
            going_on = search.advance(
                known,
                np.stack([ids for ids, _ in pairs]),
                np.stack([values for _, values in pairs]),
            )
            if going_on is None:
                ended.append(group.beams[0])
            else:
                moves.append((group, search, going_on))
        if moves:
            self._move(moves)
        return ended

    def _is_ready(self, beam: Entry) -> bool:
        slot, table = beam.slot, self._running.slots
        has_all = slot is not None and table.num_computed[slot] == table.num_tokens[slot]
        return has_all and beam.candidates is not None

    def _generated(self, beam: Entry) -> NDArray[np.int32]:
        token_ids = beam.token_ids
        if beam.slot is not None:
            token_ids = self._running.slots.known_token_ids(beam.slot)
        return token_ids[beam.request.prompt_len :]

    def _move(self, moves: list[tuple[ForkGroup, BeamSearch, Continuation]]) -> None:
        """Free the beams that end, fork those that go on in several ways, add the new tokens. One
        call of the manager for each of the three.
        """
        table = self._running.slots
        dead = [
            beam
            for group, _, going_on in moves
            for i, beam in enumerate(group.beams)
            if i not in going_on.parents
        ]
        for beam in dead:
            assert beam.group is not None
            beam.group.num_preemptions += beam.num_preemptions
        if dead:
            self._manager.free_batch(np.array([beam.seq_id for beam in dead], dtype=np.int64))
            self._running.leave(dead)
            for beam in dead:
                del self._entries[beam.request.request_id]
        parents: list[int] = []
        children: list[int] = []
        slots: list[int] = []
        new_ids: list[int] = []
        for group, _, going_on in moves:
            old, group.beams = group.beams, []
            for parent, token_id in zip(
                going_on.parents.tolist(), going_on.token_ids.tolist(), strict=True
            ):
                beam = old[parent]
                if beam in group.beams:
                    beam = self._forking.new_beam(group, beam)
                    beam.candidates = None
                    if beam.slot is None:
                        beam.token_ids = np.append(beam.token_ids, np.int32(token_id))
                        self._queue.push(beam)
                        self._forking.note(beam, old[parent])
                    else:
                        parents.append(old[parent].seq_id)
                        children.append(beam.seq_id)
                group.beams.append(beam)
                if beam.slot is not None:
                    slots.append(beam.slot)
                    new_ids.append(token_id)
            for beam in group.beams:
                beam.candidates = None
        if children:
            self._manager.fork_batch(
                np.array(parents, dtype=np.int64), np.array(children, dtype=np.int64)
            )
        rows, ids = np.array(slots, dtype=np.int64), np.array(new_ids, dtype=np.int64)
        table.token_ids[rows, table.num_tokens[rows]] = ids
        table.num_tokens[rows] += 1
        self._manager.publish_batch(
            table.seq_ids[rows], ids, np.ones_like(rows), table.num_computed[rows]
        )

    def results(
        self, group: ForkGroup, reason: FinishReason | None, error: str | None
    ) -> list[FinishedRequest]:
        """The n best hypotheses. reason: why the search was cut short; None: it has ended."""
        assert group.search is not None
        params = group.request.sampling_params
        found = group.search.best_so_far([self._generated(beam) for beam in group.beams])
        num_preemptions = group.num_preemptions + sum(one.num_preemptions for one in group.beams)
        finished = []
        for k in range(params.n):
            one = found[k] if k < len(found) else None
            finished.append(
                FinishedRequest(
                    request=group.request.member(k),
                    token_ids=np.empty(0, dtype=np.int32) if one is None else one.token_ids,
                    reason=reason or ("stop" if one is not None and one.has_stopped else "length"),
                    num_cached_tokens=group.num_cached_tokens,
                    num_preemptions=num_preemptions if k == 0 else 0,
                    error=error,
                    cumulative_logprob=0.0 if one is None else one.logprob,
                )
            )
        return finished
