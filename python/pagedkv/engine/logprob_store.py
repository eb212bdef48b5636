"""Log-probabilities of the tokens of unfinished requests that asked for them, until they are told.
They stay here while a request is preempted: nothing is asked of the model twice.
"""

from __future__ import annotations

from collections.abc import Iterator

from pagedkv.engine.model_runner import Sampled
from pagedkv.records import Logprob, ScheduledStep, TokenLogprobs
from pagedkv.request import Request, fork_name
from pagedkv.sampling import TokenScores
from pagedkv.scheduler import Scheduler


class LogprobStore:
    """answers by the id of a request, or of one answer of a group; prompts by the request's."""

    def __init__(self) -> None:
        self._answers: dict[str, list[TokenLogprobs]] = {}
        self._prompts: dict[str, list[TokenLogprobs | None]] = {}

    def __len__(self) -> int:
        return len(self._answers) + len(self._prompts)

    def add(self, request: Request, forked_from: str | None = None) -> None:
        """Know a request. forked_from: the request whose tokens so far are its own too."""
        params = request.sampling_params
        names = [request.request_id]
        if request.is_group:
            names = [fork_name(request.request_id, k) for k in range(params.num_forks)]
        if params.logprobs is not None:
            for name in names:
                self._answers[name] = list(self._answers.get(forked_from or "", ()))
        if params.prompt_logprobs is not None:
            # The first token follows nothing that would make it likely. A fork has its parent's
            # list itself: what one has computed of the prompt, the others find in the cache.
            self._prompts[request.request_id] = self._prompts.get(forked_from or "", [None])

    def take(self, step: ScheduledStep, sampled: Sampled, scheduler: Scheduler) -> None:
        """Learn the scores of a step that ran, before the scheduler does."""
        if sampled.scores is not None:
            for i, one in _by_row(sampled.scores):
                row = int(step.sample_rows[i])
                request = _owner(step, row, scheduler)
                if request is not None and not sampled.failed[i]:
                    name = request.request_id
                    draw = int(step.sample_draws[i])
                    if draw != request.draw:  # the row of answer 0 draws the others' first tokens
                        name = fork_name(request.parent_id or name, draw)
                    self._answers[name].append(one)
        for scores, first in sampled.prompt_scores:
            request = _owner(step, int(scores.rows[0]), scheduler)
            if request is None:
                continue
            known = self._prompts[request.parent_id or request.request_id]
            # Computed once more after a preemption, some are known.
            known += [one for _, one in _by_row(scores)][max(len(known) - first, 0) :]

    def of_answer(self, name: str, begin: int, end: int) -> list[TokenLogprobs] | None:
        """Of tokens [begin, end) of an answer; None if it wants none."""
        known = self._answers.get(name)
        return None if known is None else known[begin:end]

    def end_answer(self, name: str) -> None:
        self._answers.pop(name, None)

    def end_prompt(self, request_id: str) -> list[TokenLogprobs | None] | None:
        """What is known of a prompt, forgotten here; None if it wants none."""
        known = self._prompts.pop(request_id, None)
        return None if known is None else list(known)


def _owner(step: ScheduledStep, row: int, scheduler: Scheduler) -> Request | None:
    """The request of a row; None if it has ended since the step was scheduled."""
    slot = int(step.slots[row])
    is_same = scheduler.slots.seq_ids[slot] == step.seq_ids[row]
    return scheduler.request_at(slot) if is_same else None


def _by_row(scores: TokenScores) -> Iterator[tuple[int, TokenLogprobs]]:
    """(row, what is told of its token): the token itself first."""
    tops = zip(scores.top_ids.tolist(), scores.top_logprobs.tolist(), strict=True)
    for row, token_id, logprob, rank, (ids, logprobs), num_top in zip(
        scores.rows.tolist(),
        scores.token_ids.tolist(),
        scores.logprobs.tolist(),
        scores.ranks.tolist(),
        tops,
        scores.num_tops.tolist(),
        strict=True,
    ):
        told = {token_id: Logprob(logprob, rank)}
        for place, (one, value) in enumerate(zip(ids[:num_top], logprobs, strict=False)):
            told.setdefault(one, Logprob(value, place + 1))
        yield row, told
