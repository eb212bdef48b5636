"""A request inside the scheduler: where it is, and what outlives its slot."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pagedkv.request import Request, fork_name
from pagedkv.scheduler.beam_search import BeamSearch


class ForkGroup:
    """A request with several answers. Until its prompt is computed only answer 0 has an Entry.

    Of a beam search, search has the scores, and beams its running sequences, best first; they end
    together.
    """

    __slots__ = (
        "beams",
        "first_seq_id",
        "is_forked",
        "names",
        "num_cached_tokens",
        "num_left",
        "num_preemptions",
        "request",
        "search",
    )

    def __init__(self, request: Request, first_seq_id: int) -> None:
        is_search = request.sampling_params.beam_width is not None
        self.search = BeamSearch(request) if is_search else None
        self.beams: list[Entry] = []
        self.first_seq_id = first_seq_id  # member k's is first_seq_id + k
        self.num_cached_tokens = 0
        self.num_preemptions = 0  # of beams that have ended
        self.request = request
        self.is_forked = False
        self.num_left = request.sampling_params.num_forks
        self.names = [fork_name(request.request_id, k) for k in range(self.num_left)]


class Family:
    """A request and the forks made of it, and of them, as they run: names and draws to come."""

    __slots__ = ("next_draw", "root")

    def __init__(self, root: str) -> None:
        self.root = root
        self.next_draw = 1


class Entry:
    """While it waits it carries its tokens itself; while it runs its slot does.

    seq_id is given in order of arrival. key orders all requests, smallest first, and like seq_id
    stays the same through preemptions.
    """

    __slots__ = (
        "blocked_at",
        "candidates",
        "cumulative_logprob",
        "family",
        "group",
        "is_reserved",
        "is_swapped",
        "key",
        "num_cached_tokens",
        "num_freed_blocks",
        "num_overtaken",
        "num_preemptions",
        "preempted_in",
        "request",
        "seq_id",
        "slot",
        "token_ids",
        "unit",
    )

    def __init__(self, request: Request, seq_id: int, rank: int) -> None:
        self.request = request
        self.seq_id = seq_id
        self.key = (rank, seq_id)
        self.slot: int | None = None
        self.token_ids = request.prompt_token_ids
        self.num_cached_tokens: int | None = None  # at the first admission; None: not yet admitted
        self.num_preemptions = 0
        # Of a beam: ids int64 and log-probabilities of what may follow its tokens, best first.
        self.candidates: tuple[NDArray[np.int64], NDArray[np.float64]] | None = None
        self.group: ForkGroup | None = None  # of one of several answers
        self.family: Family | None = None  # once it was forked, or as a fork
        self.cumulative_logprob = 0.0  # while it has no slot
        self.preempted_in = -1  # number of the step that last preempted it
        self.is_reserved = False  # it starts only with its worst-case blocks kept for it
        self.is_swapped = False  # it waits, and holds CPU blocks
        self.num_freed_blocks = 0  # while it has no slot: given back behind a sliding window
        # Itself and those that were swapped out together with it, lowest rank first: they come back
        # together. One list, which they share.
        self.unit = [self]
        self.num_overtaken = 0  # admissions of requests behind it, since it last began to wait
        self.blocked_at: int | None = None  # blocks that could be taken when it last found no room

    @property
    def rank(self) -> int:
        return self.key[0]

    def leave_unit(self) -> None:
        """It is not swapped out any more, whatever becomes of those it went with."""
        self.unit.remove(self)
        self.unit = [self]
        self.is_swapped = False
