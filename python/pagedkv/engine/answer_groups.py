"""Several answers to one prompt become one RequestOutput, when the last of them has ended."""

from __future__ import annotations

import dataclasses

from pagedkv.records import CompletionOutput, FinishedRequest, RequestOutput
from pagedkv.request import Request


class _Group:
    __slots__ = ("answers", "error", "num_cached_tokens", "num_preemptions", "request")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.answers: dict[int, CompletionOutput] = {}
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.error: str | None = None


class AnswerGroups:
    """The groups with answers still to come, by request id."""

    def __init__(self) -> None:
        self._groups: dict[str, _Group] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, request: Request) -> None:
        self._groups[request.request_id] = _Group(request)

    def take(self, finished: FinishedRequest, answer: CompletionOutput) -> RequestOutput | None:
        """One answer has ended; the whole output if it was the last."""
        parent_id = finished.request.parent_id
        assert parent_id is not None
        group = self._groups[parent_id]
        group.answers[finished.request.draw] = answer
        # The first answer's, which computed the prompt; the others found all of it.
        if finished.request.draw == 0:
            group.num_cached_tokens = finished.num_cached_tokens
        group.num_preemptions += finished.num_preemptions
        group.error = group.error or finished.error
        params = group.request.sampling_params
        if len(group.answers) < group.request.num_answers:
            return None
        del self._groups[parent_id]
        answers = [group.answers[k] for k in sorted(group.answers)]
        if group.request.num_answers > params.n:
            answers = sorted(answers, key=_rank)[: params.n]
            answers = [dataclasses.replace(one, index=i) for i, one in enumerate(answers)]
        return RequestOutput(
            request_id=parent_id,
            prompt=group.request.prompt,
            prompt_ids=group.request.prompt_token_ids,
            outputs=answers,
            num_cached_tokens=group.num_cached_tokens,
            num_preemptions=group.num_preemptions,
            error=group.error,
        )


def _rank(answer: CompletionOutput) -> tuple[bool, float]:
    """Best first: answers that failed last, then by cumulative log-probability."""
    assert answer.cumulative_logprob is not None
    return answer.finish_reason == "error", -answer.cumulative_logprob
