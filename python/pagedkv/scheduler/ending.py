"""The one way out of the scheduler: blocks, slot or place in the queue, and name go together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pagedkv.block_manager import BlockManager
from pagedkv.records import FinishedRequest, FinishReason
from pagedkv.scheduler.decision_log import DecisionLog
from pagedkv.scheduler.entry import Entry
from pagedkv.scheduler.forking import Forking
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
    ) -> None:
        self._manager = manager
        self._running = running
        self._queue = queue
        self._entries = entries
        self._forking = forking
        self._log = log

    def end(self, ends: Sequence[End]) -> list[FinishedRequest]:
        """One record for each, in their order; of a group whose prompt is not computed one for each
        of its answers.
        """
        if not ends:
            return []
        running = [entry for entry, _, _ in ends if entry.slot is not None]
        holding = [
            entry.seq_id for entry, _, _ in ends if entry.slot is not None or entry.is_swapped
        ]
        if holding:
            self._manager.free_batch(np.array(holding, dtype=np.int64))
        for entry in running:
            assert entry.slot is not None
            entry.token_ids = self._running.slots.known_token_ids(entry.slot)
        self._running.leave(running)
        finished: list[FinishedRequest] = []
        for entry, reason, error in ends:
            if entry in self._queue:
                self._queue.remove(entry)
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
