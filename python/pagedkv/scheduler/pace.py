"""How many tokens the next step may hold.

A product of few rows takes the time of reading its weights, so beside a few hundred decodes some
more tokens cost little; thousands at once cost their full price, and hold all decodes up. So where
nobody is in a hurry, prompts get only what fills a step up to max_num_paced_tokens, and the time of
the decodes pays for most of it.

Who is in a hurry: a prompt whose answer may become as long as the longest rest of a running one.
The list of requests would be done later if it waited. One that may only become shorter can begin
later and still be done before. Lengths are bounds: where a long answer ends early, those that wait
are compared with the next one.
"""

from __future__ import annotations

from pagedkv.config import SchedulerConfig
from pagedkv.scheduler.queue import RankedQueue
from pagedkv.scheduler.running import RunningSet


class Pace:
    """Asks queue and running set; changes neither.

    most: tokens that the step which is made may hold, as look() found. is_slow: whether that is for
    want of hurry.
    """

    def __init__(self, config: SchedulerConfig, running: RunningSet, queue: RankedQueue) -> None:
        self._config = config
        self._running = running
        self._queue = queue
        self.most = config.max_num_batched_tokens
        self.is_slow = False

    def look(self) -> int:
        """Returns most, for the step that is to be made now."""
        config = self._config
        self.is_slow = config.max_num_paced_tokens > 0 and not self._has_hurry()
        self.most = config.max_num_paced_tokens if self.is_slow else config.max_num_batched_tokens
        return self.most

    def _has_hurry(self) -> bool:
        """Whether a prompt may be the last to end."""
        table, order = self._running.slots, self._running.order
        is_decode = table.num_tokens[order] - table.num_computed[order] <= 1
        rest = table.max_len[order] - table.num_tokens[order]
        most = int(rest[~is_decode].max(initial=0))
        if self._queue:
            head = self._queue[0]  # of those that wait, the others come after it
            length = head.request.prompt_len + head.request.max_tokens
            most = max(most, length - head.token_ids.size)
        return most >= int(rest[is_decode].max(initial=0))
