"""Beam search as arithmetic on scores: which beams go on with which token, which have finished,
when to stop. Knows no sequence and no block.

The rules are those of transformers' generate: of all continuations the (1 + number of stop ids) *
width best are looked at; those among the first `width` that end are finished hypotheses, ranked by
score / length ** length_penalty; the best `width` that do not end go on.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagedkv.request import Request


@dataclass(frozen=True, slots=True, eq=False)
class Hypothesis:
    """token_ids int32 [num generated]; score: normalised by length; has_stopped: by a stop id."""

    token_ids: NDArray[np.int32]
    logprob: float
    score: float
    has_stopped: bool


@dataclass(frozen=True, slots=True, eq=False)
class Continuation:
    """Beams that go on, best first: parents (indices of the beams before), token_ids, both int64
    [num_beams].
    """

    parents: NDArray[np.int64]
    token_ids: NDArray[np.int64]


class BeamSearch:
    """The search of one request. Its beams are numbered from the best on, anew after each step."""

    def __init__(self, request: Request) -> None:
        params = request.sampling_params
        self.width = params.beam_width or 0
        self.num_candidates = params.num_candidates(len(request.stop_token_ids))
        self.scores = np.zeros(1, dtype=np.float64)  # of the running beams, best first
        self.finished: list[Hypothesis] = []  # best first, at most width
        self._length_penalty = params.length_penalty
        self._early_stopping = params.early_stopping
        self._max_tokens = request.max_tokens
        self._stop_ids = np.array(request.stop_token_ids, dtype=np.int64)
        self._can_improve = True

    def advance(
        self,
        known: list[NDArray[np.int32]],
        token_ids: NDArray[np.int64],
        logprobs: NDArray[np.float64],
    ) -> Continuation | None:
        """Take one step of every running beam.

        Args:
            known: the generated tokens of each running beam, best first.
            token_ids, logprobs: [num_beams, >= num_candidates], the best continuations of each,
                best first.

        Returns:
            what goes on, or None: the search has ended, its result is `finished`.
        """
        length = known[0].size + 1
        width = token_ids.shape[1]
        totals = (self.scores[:, None] + logprobs).ravel()
        # Equal scores: the better beam first, then the order its row came in.
        best = np.argsort(-totals, kind="stable")[: self.num_candidates]
        best = best[np.isfinite(totals[best])]
        chosen, parents, totals = token_ids.ravel()[best], best // width, totals[best]
        stops = np.isin(chosen, self._stop_ids)
        ends = stops | (length >= self._max_tokens)
        self._finish(known, chosen, parents, totals, stops, ends, length)
        going_on = np.flatnonzero(~ends)[: self.width]
        if going_on.size == 0:
            return None
        self.scores = totals[going_on]
        self._can_improve = self._can_improve and self._could_improve(length)
        is_full = len(self.finished) == self.width
        if not self._can_improve or (is_full and self._early_stopping is True):
            return None
        return Continuation(parents[going_on], chosen[going_on])

    def _finish(
        self,
        known: list[NDArray[np.int32]],
        chosen: NDArray[np.int64],
        parents: NDArray[np.int64],
        totals: NDArray[np.float64],
        stops: NDArray[np.bool_],
        ends: NDArray[np.bool_],
        length: int,
    ) -> None:
        """Keep the best hypotheses. A candidate beyond the first `width` only stands by, in case
        those before it all end.
        """
        for i in np.flatnonzero(ends[: self.width]).tolist():
            tokens = np.append(known[parents[i]], np.int32(chosen[i]))
            score = float(totals[i] / length**self._length_penalty)
            self.finished.append(Hypothesis(tokens, float(totals[i]), score, bool(stops[i])))
        self.finished.sort(key=lambda one: -one.score)
        del self.finished[self.width :]

    def _could_improve(self, length: int) -> bool:
        """Whether the best running beam can still beat the worst finished one, by the estimate that
        early_stopping names.
        """
        if len(self.finished) < self.width:
            return True
        if self._early_stopping == "never" and self._length_penalty > 0:
            length = self._max_tokens
        best = self.scores[0] / length**self._length_penalty
        return bool(best > self.finished[-1].score)

    def best_so_far(self, known: list[NDArray[np.int32]]) -> list[Hypothesis]:
        """The finished hypotheses and, of a search cut short, the running beams after them."""
        running = [
            Hypothesis(tokens, float(score), float(score), False)
            for tokens, score in zip(known, self.scores, strict=False)
        ]
        return self.finished + running
