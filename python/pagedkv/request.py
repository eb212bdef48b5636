"""One request as a value: token ids and limits, resolved and checked by the engine before anything
is queued.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pagedkv.numbers import integer
from pagedkv.sampling_params import SamplingParams

MAX_PRIORITY = 2**31


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """What the scheduler and the sampler need to know of a request.

    Args:
        request_id: the caller's name for it, unique among unfinished requests.
        prompt_token_ids: int32 [prompt_len], at least one.
        max_tokens: most tokens to generate, already cut to what the context holds.
        stop_token_ids: ids that end it, the end-of-sequence ids included unless they are ignored.
        sampling_params: as the caller gave them.
        seed: of this request's draws; the caller's or one the engine chose.
        prompt: the prompt's text, where there was one.
        cache_salt: prefixes are shared only between requests with the same salt, so a tenant cannot
            learn from timing what others have asked. None: shared with all that have none.
        priority: lower is more urgent; other than 0 only under scheduling_policy "priority".
        draw: k of fork k; its tokens are drawn with (seed, k).
        parent_id: of one of several answers to a prompt, the id of the request that asked for them.
        user: whose it is, in the words of whoever asked: a label in records, nothing else.
        keeps_blocks: hold its blocks when it has ended, as scheduler/pins.py says.
        bad_token_ids: each of sampling_params.bad_words as token ids, in its spellings.
    """

    request_id: str
    prompt_token_ids: NDArray[np.int32]
    max_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0
    prompt: str | None = None
    cache_salt: str | None = None
    priority: int = 0
    draw: int = 0
    parent_id: str | None = None
    user: str | None = None
    keeps_blocks: bool = False
    bad_token_ids: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if self.prompt_token_ids.ndim != 1 or self.prompt_token_ids.size == 0:
            raise ValueError(f"request {self.request_id!r} has an empty prompt")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        priority = integer("priority", self.priority, low=-MAX_PRIORITY, high=MAX_PRIORITY)
        object.__setattr__(self, "priority", priority)

    @property
    def extra_key(self) -> bytes:
        """What the prefix cache hashes beside the tokens."""
        return b"" if self.cache_salt is None else self.cache_salt.encode()

    @property
    def num_forks(self) -> int:
        """Sequences that are generated for the prompt."""
        return self.sampling_params.num_forks

    @property
    def num_answers(self) -> int:
        """Sequences that the scheduler reports: of a beam search only the best."""
        is_search = self.sampling_params.beam_width is not None
        return self.sampling_params.n if is_search else self.num_forks

    @property
    def num_candidates(self) -> int:
        """Continuations of each beam that a beam search looks at; 0: no beam search."""
        return self.sampling_params.num_candidates(len(self.stop_token_ids))

    @property
    def reads_tokens(self) -> bool:
        """Whether the host changes its logits by what its tokens are, so that it must know them
        before a step is launched; penalties are the device's.
        """
        has_words = any(len(ids) > 1 for ids in self.bad_token_ids)
        return bool(self.sampling_params.logits_processors or has_words)

    @property
    def is_group(self) -> bool:
        """Whether it stands for several answers, each of which is a Request of its own."""
        return self.parent_id is None and self.sampling_params.num_forks > 1

    def member(self, k: int) -> Request:
        """Answer k of a group."""
        name = fork_name(self.request_id, k)
        return dataclasses.replace(self, request_id=name, draw=k, parent_id=self.request_id)

    @property
    def prompt_len(self) -> int:
        return int(self.prompt_token_ids.size)


def fork_name(request_id: str, k: int) -> str:
    """How fork k of a request is called."""
    return f"{request_id}-{k}"
