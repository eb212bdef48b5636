"""The one way out of the scheduler: blocks, slot or place in the queue, and name go together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pagedkv.block_manager import BlockManager
from pagedkv.records import FinishedRequest, FinishReason
from pagedkv.scheduler.beams import Beams
from pagedkv.scheduler.decision_log import DecisionLog
from pagedkv.scheduler.entry import Entry
from pagedkv.scheduler.forking import Forking
from pagedkv.scheduler.pins import Pins
from pagedkv.scheduler.queue import RankedQueue
from pagedkv.scheduler.running import RunningSet

End = tuple[Entry, FinishReason, str | None]  # error: None unless the reason is "error"


class Ending:
    """Ends entries that run, that queue, or that have not got so far."""

    def __init__(
        self,
        manager: BlockManager,
        running: RunningSet,
        queue: RankedQueue,
        entries: dict[str, Entry],
        forking: Forking,
        log: DecisionLog,
        beams: Beams,
        pins: Pins,
    ) -> None:
        self._manager = manager
        self._running = running
        self._queue = queue
        self._entries = entries
        self._forking = forking
        self._log = log
        self._beams = beams
        self._pins = pins

    def ends_of(
        self, slots: NDArray[np.int64], new_ids: NDArray[np.int64], bad_slots: NDArray[np.int64]
    ) -> list[End]:
        """Those whose new token is their last, and those whose logits were bad. The slots' new_ids
        are in the slot table already.
        """
        table, entry_at = self._running.slots, self._running.entry_at
        is_stop = (table.stop_ids[slots] == new_ids[:, None]).any(axis=1)
        is_full = table.num_tokens[slots] >= table.max_len[slots]
        ends: list[End] = [
            (entry_at(int(slots[i])), "stop" if is_stop[i] else "length", None)
            for i in np.flatnonzero(is_stop | is_full).tolist()
        ]
        error = (
            "the model produced NaN or infinite logits, or a logits processor did, or the request "
            "forbids every token"
        )
        ends += [(entry_at(slot), "error", error) for slot in bad_slots.tolist()]
        return ends

    def end(self, ends: Sequence[End]) -> list[FinishedRequest]:
        """One record for each; of a group whose prompt is not computed one for each of its answers.
        Of a beam search, which ends whole, those of its best beams: a reason other than "length"
        cuts it short.
        """
        if not ends:
            return []
        return self._end_beams(ends) + self._end([end for end in ends if not _is_beam(end[0])])

    def _end_beams(self, ends: Sequence[End]) -> list[FinishedRequest]:
        """The beams of a search end together."""
        groups: dict[str, End] = {}
        for end in ends:
            if _is_beam(end[0]) and end[0].group is not None:
                groups.setdefault(end[0].group.request.request_id, end)
        finished: list[FinishedRequest] = []
        for entry, reason, error in groups.values():
            group = entry.group
            assert group is not None
            self._release(group.beams)
            cut_short = None if reason == "length" else reason
            finished += self._beams.results(group, cut_short, error)
            for k in range(len(group.names)):
                self._log.finish(
                    group.request.member(k),
                    reason=reason,
                    num_generated=int(entry.token_ids.size) - entry.request.prompt_len,
                    num_preemptions=group.num_preemptions,
                )
            for beam in group.beams:
                del self._entries[beam.request.request_id]
            self._forking.close_group(group)
        return finished

    def _release(self, entries: Sequence[Entry]) -> None:
        """Give back blocks, and slot or place in the queue. The entries keep their tokens."""
        running = [entry for entry in entries if entry.slot is not None]
        holding = [one.seq_id for one in entries if one.slot is not None or one.is_swapped]
        if holding:
            self._manager.free_batch(np.array(holding, dtype=np.int64))
        for entry in running:
            assert entry.slot is not None
            entry.token_ids = self._running.slots.known_token_ids(entry.slot)
        self._running.leave(running)
        for entry in entries:
            if entry.is_swapped:
                entry.leave_unit()
            if entry in self._queue:
                self._queue.remove(entry)

    def _end(self, ends: Sequence[End]) -> list[FinishedRequest]:
        for entry, reason, _ in ends:
            if entry.slot is not None and reason in ("stop", "length"):
                self._pins.take(entry.request, entry.seq_id)
        self._release([entry for entry, _, _ in ends])
        finished: list[FinishedRequest] = []
        for entry, reason, error in ends:
            finished += self._forget(entry, reason, error)
        return finished

    def _forget(
        self, entry: Entry, reason: FinishReason, error: str | None
    ) -> list[FinishedRequest]:
        del self._entries[entry.request.request_id]
        self._log.finish(
            entry.request,
            reason=reason,
            num_generated=int(entry.token_ids.size) - entry.request.prompt_len,
            num_preemptions=entry.num_preemptions,
        )
        is_group = entry.group is not None
        return [
            FinishedRequest(
                request=request,
                token_ids=entry.token_ids[request.prompt_len :],
                reason=reason,
                num_cached_tokens=entry.num_cached_tokens or 0,
                num_preemptions=entry.num_preemptions,
                error=error,
                cumulative_logprob=entry.cumulative_logprob if is_group else None,
            )
            for request in (self._forking.leave_group(entry) if is_group else [entry.request])
        ]


def _is_beam(entry: Entry) -> bool:
    return entry.group is not None and entry.group.search is not None
