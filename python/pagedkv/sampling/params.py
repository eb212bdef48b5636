"""Sampling parameters of the running sequences, by slot, as arrays."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pagedkv.sampling_params import SamplingParams

# A slot's row as the device keeps it (op advance_step).
_ROW = np.dtype(
    [
        ("inverse_temperature", np.float32),
        ("top_k", np.int32),
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("seed", np.uint64),
    ]
)


class SlotParams:
    """One row per slot; a row is written when its request is admitted.

    inverse_temperature 0 is greedy, top_k 0, top_p 1 and min_p 0 keep everything: the values that
    SamplingParams allows are brought to these here, so that the sampler has no second spelling to
    know.
    """

    def __init__(self, max_num_seqs: int) -> None:
        table = np.zeros(max_num_seqs, dtype=_ROW)
        self.words = table.view(np.int32).reshape(max_num_seqs, -1)  # all of it
        self.inverse_temperatures = table["inverse_temperature"]
        self.top_k = table["top_k"]
        self.top_p = table["top_p"]
        self.top_p[:] = 1
        self.min_p = table["min_p"]
        self.seeds = table["seed"]
        self.draws = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_candidates = np.zeros(max_num_seqs, dtype=np.int64)  # of a beam; 0: not a beam
        self.wants_logprob = np.zeros(max_num_seqs, dtype=np.bool_)
        self.num_logprobs = np.full(max_num_seqs, -1, dtype=np.int64)  # -1: none is wanted
        # Whether any of the three is asked for: more than the token itself.
        self.wants_more = np.zeros(max_num_seqs, dtype=np.bool_)

    def set(self, slot: int, params: SamplingParams, seed: int, num_candidates: int = 0) -> None:
        self.inverse_temperatures[slot] = 0.0 if params.is_greedy else 1.0 / params.temperature
        # Any k from 2^31 on is larger than every vocabulary: all kept.
        self.top_k[slot] = params.top_k if 0 < params.top_k < 2**31 else 0
        self.top_p[slot] = params.top_p
        self.min_p[slot] = params.min_p
        self.seeds[slot] = seed
        self.wants_logprob[slot] = params.num_forks > 1 and num_candidates == 0
        self.num_candidates[slot] = num_candidates
        self.num_logprobs[slot] = -1 if params.logprobs is None else params.logprobs
        self.wants_more[slot] = (
            self.wants_logprob[slot] or num_candidates > 0 or params.logprobs is not None
        )

    def rows(self, slots: NDArray[np.int64], draws: NDArray[np.int64] | None = None) -> SlotParams:
        """A copy of these slots' rows, in this order. draws: of each row; None: draw 0."""
        picked = SlotParams.__new__(SlotParams)  # every array is another's row
        picked.words = self.words[slots]
        picked.inverse_temperatures = self.inverse_temperatures[slots]
        picked.top_k = self.top_k[slots]
        picked.top_p = self.top_p[slots]
        picked.min_p = self.min_p[slots]
        picked.seeds = self.seeds[slots]
        picked.draws = np.zeros_like(slots) if draws is None else draws
        picked.num_candidates = self.num_candidates[slots]
        picked.wants_logprob = self.wants_logprob[slots]
        picked.num_logprobs = self.num_logprobs[slots]
        picked.wants_more = self.wants_more[slots]
        return picked
