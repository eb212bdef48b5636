"""A request inside the scheduler: where it is, and what outlives its slot."""

from __future__ import annotations

from pagedkv.request import Request


class Entry:
    """While it waits it carries its tokens itself; while it runs its slot does.

    seq_id is given in order of arrival and stays the same through preemptions.
    """

    __slots__ = (
        "num_cached_tokens",
        "num_preemptions",
        "request",
        "seq_id",
        "slot",
        "token_ids",
    )

    def __init__(self, request: Request, seq_id: int) -> None:
        self.request = request
        self.seq_id = seq_id
        self.slot: int | None = None
        self.token_ids = request.prompt_token_ids
        self.num_cached_tokens: int | None = None  # at the first admission; None: not yet admitted
        self.num_preemptions = 0
