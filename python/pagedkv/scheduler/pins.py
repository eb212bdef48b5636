"""Blocks of requests that have ended, held for somebody who may go on from them. Nobody who runs or
waits is held up by them: they are given up, the oldest first, before anybody is preempted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from pagedkv.block_manager import BlockManager
from pagedkv.request import Request

# Of all sequences pins have the highest seq_ids.
_FIRST_SEQ_ID = 2**62
_MAX_PART = 4  # at most one block in so many is pinned, a shared one counted for each


class Pins:
    """Each is a fork, in the manager, of a sequence that ended."""

    def __init__(self, manager: BlockManager) -> None:
        self._manager = manager
        self._max_blocks = manager.num_blocks // _MAX_PART
        self._held: OrderedDict[str, tuple[int, int]] = OrderedDict()  # name -> seq_id, blocks
        self._next_seq_id = _FIRST_SEQ_ID
        self.is_on = True  # off: nothing is pinned

    def __len__(self) -> int:
        return len(self._held)

    @property
    def num_blocks(self) -> int:
        return sum(blocks for _, blocks in self._held.values())

    def held(self) -> Iterator[tuple[str, int]]:
        """(request_id, seq_id of the fork) of each, the oldest first."""
        return ((name, seq_id) for name, (seq_id, _) in self._held.items())

    def take(self, request: Request, seq_id: int) -> None:
        """Pin what a sequence holds that is about to be freed, if its request wants that."""
        if not (request.keeps_blocks and self.is_on):
            return
        num_blocks = int(self._manager.block_table(seq_id).size)
        if num_blocks > self._max_blocks:
            return
        self.drop(request.request_id)  # a name may be used anew
        self._manager.fork(seq_id, self._next_seq_id)
        self._held[request.request_id] = self._next_seq_id, num_blocks
        self._next_seq_id += 1
        while self.num_blocks > self._max_blocks:
            self.give_up_oldest()

    def drop(self, name: str) -> None:
        """Give up the blocks of a request or of one of its answers, if they are held still."""
        held = self._held.pop(name, None)
        if held is not None:
            self._manager.free(held[0])

    def give_up_oldest(self) -> bool:
        """Whether there was one."""
        if not self._held:
            return False
        self.drop(next(iter(self._held)))
        return True

    def drop_all(self) -> None:
        while self.give_up_oldest():
            pass
