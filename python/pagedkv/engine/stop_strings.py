"""Finds stop strings in text that arrives in pieces, and holds back what might become one."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Cuts a text at the stop string that is complete first; of two complete at once, the longer.

    That rule sees characters, not pieces: however the text is split, the result is the same. Text
    that could still turn into a stop string is held back until it can no longer, or the text ends.

    Example: stops ("END",): push("the E") -> "the ", push("ND x") -> "" and matched == "END".
    """

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Take the next piece; returns what may be shown of it. REQUIRES matched is None."""
        pending = self._held + text
        ends = [
            (begin + len(stop), begin, stop)
            for stop in self._stops
            if (begin := pending.find(stop)) >= 0
        ]
        if ends:
            end, begin, self.matched = min(ends)
            self._held = ""
            return pending[: end if self._include else begin]
        held_len = self._held_len(pending)
        shown_len = len(pending) - held_len
        self._held = pending[shown_len:]
        return pending[:shown_len]

    def finish(self) -> str:
        """The text ends here: what was held back is ordinary text after all."""
        held, self._held = self._held, ""
        return held

    def _held_len(self, pending: str) -> int:
        """Length of the longest end of pending with which a stop string begins."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for length in range(min(longest, len(pending)), 0, -1):
            tail = pending[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
