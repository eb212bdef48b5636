"""Tokens into text: deltas of streamed requests, stop strings, finished outputs.

Requests that neither stream nor have stop strings are decoded once, when they end; a step spends
no time on them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pagedkv.engine.answer_groups import AnswerGroups
from pagedkv.engine.logprob_store import LogprobStore
from pagedkv.engine.stop_strings import StopStrings
from pagedkv.records import (
    Admitted,
    CompletionOutput,
    FinishedRequest,
    OutputDelta,
    RequestOutput,
)
from pagedkv.request import Request
from pagedkv.text import IncrementalDecoder, Tokenizer


class _Watched:
    """The text so far of a request that must be read token by token."""

    __slots__ = ("_min_tokens", "decoder", "num_tokens", "parts", "stops", "streams")

    def __init__(self, request: Request, tokenizer: Tokenizer, *, streams: bool) -> None:
        params = request.sampling_params
        self.streams = streams
        self.decoder = IncrementalDecoder(tokenizer, skip_special_tokens=params.skip_special_tokens)
        self.stops = StopStrings(params.stop, include=params.include_stop_str_in_output)
        self.parts: list[str] = []
        self.num_tokens = 0
        self._min_tokens = params.min_tokens

    def push(self, token_ids: list[int], *, is_last: bool = False) -> str:
        """Take new tokens; returns what they add to the text. REQUIRES no stop string was found."""
        num_early = min(max(self._min_tokens - self.num_tokens, 0), len(token_ids))
        self.num_tokens += len(token_ids)
        early = self.decoder.push(token_ids[:num_early])  # holds no stop string, whatever it says
        text = self.decoder.push(token_ids[num_early:])
        if is_last:
            text += self.decoder.finish()
        shown = early + self.stops.push(text)
        if is_last and self.stops.matched is None:
            shown += self.stops.finish()
        self.parts.append(shown)
        return shown


class OutputProcessor:
    """Text state of the unfinished requests, by request id."""

    def __init__(self, tokenizer: Tokenizer | None, max_num_seqs: int) -> None:
        self._tokenizer = tokenizer
        self._watched: dict[str, _Watched] = {}
        self._is_watched = np.zeros(max_num_seqs, dtype=np.bool_)  # by slot
        self._groups = AnswerGroups()
        self.logprobs = LogprobStore()

    @property
    def num_watched(self) -> int:
        """Requests and answers with state here."""
        return len(self._watched) + len(self._groups) + len(self.logprobs)

    def check_stream(self, request_id: str, *, streams: bool) -> None:
        if streams and self._tokenizer is None:
            raise ValueError(f"request {request_id!r}: streaming needs a tokenizer")

    def add(
        self,
        request: Request,
        *,
        streams: bool,
        token_ids: Sequence[int] = (),
        forked_from: str | None = None,
    ) -> None:
        """Know a request. token_ids: what a fork starts with, told already in its parent's text.
        forked_from: the parent's id.

        Raises ValueError if it cannot stream.
        """
        params = request.sampling_params
        self.check_stream(request.request_id, streams=streams)
        if streams and request.num_candidates:
            raise ValueError(
                f"request {request.request_id!r}: a beam search cannot stream: which beams are the "
                "best is known only at its end"
            )
        if streams and request.is_group and params.num_forks > params.n:
            raise ValueError(
                f"request {request.request_id!r}: best_of {params.num_forks} above n {params.n} "
                "cannot stream: the best are known only when all have ended"
            )
        self.logprobs.add(request, forked_from)
        if request.is_group:
            self._groups.add(request)
            for k in range(params.num_forks):
                self._watch(request.member(k), streams=streams)
        else:
            self._watch(request, streams=streams)
            state = self._watched.get(request.request_id)
            if state is not None and token_ids:
                state.push(list(token_ids))

    def _watch(self, request: Request, *, streams: bool) -> None:
        if self._tokenizer is not None and (streams or request.sampling_params.stop):
            self._watched[request.request_id] = _Watched(request, self._tokenizer, streams=streams)

    def admit(self, admitted: tuple[Admitted, ...]) -> None:
        """Learn which slots these requests hold from now on."""
        for one in admitted:
            self._is_watched[one.slot] = one.request.request_id in self._watched

    def watched(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Indices into slots of the rows to push."""
        return np.flatnonzero(self._is_watched[slots])

    def is_watched(self, request_id: str) -> bool:
        return request_id in self._watched

    def push(self, request: Request, token_id: int) -> tuple[OutputDelta | None, bool]:
        """One more token of a watched request that goes on.

        Returns the delta of a streamed request, and whether a stop string was found, so that the
        request must be finished.
        """
        state = self._watched[request.request_id]
        text = state.push([token_id])
        delta = self._delta(request, text, [token_id], state.num_tokens) if state.streams else None
        return delta, state.stops.matched is not None

    def finish(self, finished: FinishedRequest) -> tuple[OutputDelta | None, RequestOutput | None]:
        """The output of a request that left the scheduler, None while other answers of its group
        are to come; and what it adds to a stream.
        """
        request = finished.request
        token_ids = finished.token_ids.tolist()
        reason = finished.reason
        stop_reason: str | int | None = self._stop_token(finished)
        state = self._watched.pop(request.request_id, None)
        delta = None
        if state is None:
            text = self._decode(request, self._visible(finished, token_ids))
        else:
            fresh = token_ids[state.num_tokens :]
            added = ""
            if state.stops.matched is None:
                added = state.push(self._visible(finished, fresh), is_last=True)
            if state.stops.matched is not None:
                reason, stop_reason = "stop", state.stops.matched
            text = "".join(state.parts)
            if state.streams:
                delta = dataclasses.replace(
                    self._delta(request, added, fresh, len(token_ids)),
                    finish_reason=reason,
                    stop_reason=stop_reason,
                )
        answer = CompletionOutput(
            0 if request.parent_id is None else request.draw,
            text,
            token_ids,
            reason,
            stop_reason,
            finished.cumulative_logprob,
            self.logprobs.of_answer(request.request_id, 0, len(token_ids)),
        )
        self.logprobs.end_answer(request.request_id)
        if request.parent_id is None:
            output: RequestOutput | None = self._output(finished, answer)
        else:
            output = self._groups.take(finished, answer)
        known = None if output is None else self.logprobs.end_prompt(output.request_id)
        if output is not None and known is not None:
            output = dataclasses.replace(output, prompt_logprobs=known)
        return delta, output

    def _delta(self, request: Request, text: str, token_ids: list[int], end: int) -> OutputDelta:
        """Of tokens up to the end-th. Of a group's answer under the group's id."""
        known = self.logprobs.of_answer(request.request_id, end - len(token_ids), end)
        if request.parent_id is None:
            return OutputDelta(request.request_id, text, token_ids, logprobs=known)
        return OutputDelta(request.parent_id, text, token_ids, request.draw, known)

    @staticmethod
    def _visible(finished: FinishedRequest, token_ids: list[int]) -> list[int]:
        """Tokens whose text is shown: a stop token ends the text, unless it is to be included."""
        is_cut = finished.reason == "stop" and token_ids
        if is_cut and not finished.request.sampling_params.include_stop_str_in_output:
            return token_ids[:-1]
        return token_ids

    @staticmethod
    def _stop_token(finished: FinishedRequest) -> int | None:
        """The caller's stop token that ended a request; None for the end-of-sequence token."""
        if finished.reason == "stop" and finished.token_ids.size:
            last = int(finished.token_ids[-1])
            if last in finished.request.sampling_params.stop_token_ids:
                return last
        return None

    def _decode(self, request: Request, token_ids: list[int]) -> str:
        if self._tokenizer is None:
            return ""
        skip = request.sampling_params.skip_special_tokens
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip)

    def _output(self, finished: FinishedRequest, answer: CompletionOutput) -> RequestOutput:
        return RequestOutput(
            request_id=finished.request.request_id,
            prompt=finished.request.prompt,
            prompt_ids=finished.request.prompt_token_ids,
            outputs=[answer],
            num_cached_tokens=finished.num_cached_tokens,
            num_preemptions=finished.num_preemptions,
            error=finished.error,
        )
