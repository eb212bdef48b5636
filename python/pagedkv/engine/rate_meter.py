"""How fast this machine moves blocks and computes prompts, measured as the engine runs. The
scheduler's choice between swapping and computing again goes by it.
"""

from __future__ import annotations

from pagedkv.scheduler import Rates

_WEIGHT = 0.25  # of the newest measurement
_MIN_TOKENS = 32  # a step with fewer says more about its fixed costs than about the rate


class RateMeter:
    """Exponentially weighted means; each first measurement replaces the starting value."""

    def __init__(self) -> None:
        self._link: float | None = None
        self._prefill: float | None = None

    @property
    def rates(self) -> Rates:
        start = Rates()
        return Rates(
            link_bytes_per_s=self._link or start.link_bytes_per_s,
            prefill_tokens_per_s=self._prefill or start.prefill_tokens_per_s,
        )

    def swapped(self, num_bytes: int, seconds: float) -> None:
        if num_bytes and seconds > 0:
            self._link = _mean(self._link, num_bytes / seconds)

    def prefilled(self, num_tokens: int, seconds: float) -> None:
        """A step that held chunks of prompts took this long."""
        if num_tokens >= _MIN_TOKENS and seconds > 0:
            self._prefill = _mean(self._prefill, num_tokens / seconds)


def _mean(old: float | None, new: float) -> float:
    return new if old is None else (1 - _WEIGHT) * old + _WEIGHT * new
