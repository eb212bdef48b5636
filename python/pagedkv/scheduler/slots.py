"""State of the running sequences, by slot: one row per sequence, as arrays, so that a step costs no
Python object per sequence.

The scheduler is the only writer; the engine's input builder reads token_ids.
"""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

from pagedkv.records import PENDING
from pagedkv.request import Request

FREE = -1


class SlotTable:
    """Rows of running sequences.

    Interval of a row of token_ids, by owner:
        [0, prompt_len)             the request's prompt
        [prompt_len, num_tokens)    generated; the last is PENDING where is_pending
        [num_tokens, ...)           nobody's; not initialised
    num_computed[slot] <= num_tokens[slot] counts the tokens whose K/V a launched step has computed
    or is computing.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int) -> None:
        self.max_num_seqs = max_num_seqs
        self.token_ids = np.empty((max_num_seqs, max_model_len), dtype=np.int32)
        self.seq_ids = np.full(max_num_seqs, FREE, dtype=np.int64)
        self.num_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_computed = np.zeros(max_num_seqs, dtype=np.int64)
        self.is_pending = np.zeros(max_num_seqs, dtype=np.bool_)
        # Leading blocks given back behind a sliding window.
        self.num_freed_blocks = np.zeros(max_num_seqs, dtype=np.int64)
        self.max_len = np.zeros(max_num_seqs, dtype=np.int64)  # prompt_len + max_tokens
        self.draws = np.zeros(max_num_seqs, dtype=np.int64)  # k of fork k
        self.reads_tokens = np.zeros(max_num_seqs, dtype=np.bool_)  # to change its logits
        # Tokens to draw for a row that reaches its end: several where a prompt is to be forked.
        self.is_beam = np.zeros(max_num_seqs, dtype=np.bool_)
        self.num_answers = np.ones(max_num_seqs, dtype=np.int64)
        self.cumulative_logprobs = np.zeros(max_num_seqs, dtype=np.float64)
        self.ranks = np.zeros(max_num_seqs, dtype=np.int64)
        self.priorities = np.zeros(max_num_seqs, dtype=np.int64)
        # Blocks kept for a row until its end; 0: none beyond those it holds.
        self.worst_blocks = np.zeros(max_num_seqs, dtype=np.int64)
        # Ids that end a row, padded with -1, which no token equals; as wide as the widest request
        # so far.
        self.stop_ids = np.full((max_num_seqs, 1), -1, dtype=np.int64)
        # A heap: the lowest slot first keeps the tables dense.
        self._free = list(range(max_num_seqs))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(
        self,
        request: Request,
        seq_id: int,
        token_ids: NDArray[np.int32],
        *,
        rank: int,
        worst_blocks: int,
    ) -> int:
        """Give a sequence a slot. REQUIRES num_free > 0."""
        slot = heapq.heappop(self._free)
        self.token_ids[slot, : token_ids.size] = token_ids
        self.seq_ids[slot] = seq_id
        self.num_tokens[slot] = token_ids.size
        self.num_computed[slot] = 0
        self.is_pending[slot] = False
        self.num_freed_blocks[slot] = 0
        self.max_len[slot] = request.prompt_len + request.max_tokens
        self.draws[slot] = request.draw
        self.num_answers[slot] = 1
        self.reads_tokens[slot] = request.reads_tokens
        self.is_beam[slot] = request.sampling_params.beam_width is not None
        self.cumulative_logprobs[slot] = 0.0
        self.ranks[slot] = rank
        self.priorities[slot] = request.priority
        self.worst_blocks[slot] = worst_blocks
        num_stop_ids = len(request.stop_token_ids)
        if num_stop_ids > self.stop_ids.shape[1]:
            wider = np.full((self.max_num_seqs, 2 * num_stop_ids), -1, dtype=np.int64)
            wider[:, : self.stop_ids.shape[1]] = self.stop_ids
            self.stop_ids = wider
        self.stop_ids[slot] = -1
        self.stop_ids[slot, :num_stop_ids] = request.stop_token_ids
        return slot

    def release(self, slot: int) -> None:
        """Take a slot back. Its row stays as it is until the slot is taken again."""
        if self.seq_ids[slot] == FREE:
            raise RuntimeError(f"slot {slot} is free already")
        self.seq_ids[slot] = FREE
        heapq.heappush(self._free, slot)

    def expect(self, slots: NDArray[np.int64]) -> None:
        """Count the token that a launched step chooses for each, where it is not counted yet."""
        slots = slots[~self.is_pending[slots]]
        self.token_ids[slots, self.num_tokens[slots]] = PENDING
        self.num_tokens[slots] += 1
        self.is_pending[slots] = True

    def accept(self, slots: NDArray[np.int64], new_ids: NDArray[np.int64]) -> None:
        """Write the token that was chosen for each."""
        self.num_tokens[slots] += ~self.is_pending[slots]
        self.is_pending[slots] = False
        self.token_ids[slots, self.num_tokens[slots] - 1] = new_ids

    def known_token_ids(self, slot: int) -> NDArray[np.int32]:
        """A copy of the row's prompt and generated tokens."""
        return self.token_ids[slot, : self.num_tokens[slot] - self.is_pending[slot]].copy()

    def check_invariants(self) -> None:
        """Free slots are exactly those without a sequence; sequences and counts make sense."""
        free = sorted(self._free)
        empty = np.flatnonzero(self.seq_ids == FREE).tolist()
        if free != empty:
            raise AssertionError(f"free slots {free} are not the empty ones {empty}")
        used = np.flatnonzero(self.seq_ids != FREE)
        if np.unique(self.seq_ids[used]).size != used.size:
            raise AssertionError(f"a sequence holds two slots: {self.seq_ids[used].tolist()}")
        for name, wrong in (
            ("num_computed > num_tokens", self.num_computed > self.num_tokens),
            ("num_tokens > max_len", self.num_tokens > self.max_len),
        ):
            if wrong[used].any():
                raise AssertionError(f"{name} in slots {used[wrong[used]].tolist()}")
