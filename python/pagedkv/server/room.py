"""Room: how many prompts a server has taken on, from their arrival to the end of their answers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pagedkv.server.errors import Refusal


class Room:
    """A bound on the queue. Used on one event loop."""

    def __init__(self, num_places: int) -> None:
        self.num_places = num_places
        self.num_taken = 0

    @contextmanager
    def taken(self, num_prompts: int) -> Iterator[None]:
        """Hold places. Raises Refusal (429) if there are not so many: come back later."""
        self.take(num_prompts)
        try:
            yield
        finally:
            self.give_back(num_prompts)

    def take(self, num_prompts: int) -> None:
        if self.num_taken + num_prompts > self.num_places:
            raise Refusal(
                429,
                f"{self.num_taken} prompts run or wait, of at most {self.num_places}; "
                "try again later",
                code="queue_full",
                headers={"retry-after": "1"},
            )
        self.num_taken += num_prompts

    def give_back(self, num_prompts: int) -> None:
        self.num_taken -= num_prompts
