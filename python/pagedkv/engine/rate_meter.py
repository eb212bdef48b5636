"""How fast this machine moves blocks and computes prompts, measured as the engine runs. The
scheduler's choice between swapping and computing again goes by it.
"""

from __future__ import annotations

from pagedkv.scheduler import Rates

_WEIGHT = 0.25  # of the newest measurement
_MIN_TOKENS = 32  # a step with fewer says nothing about the rate
# The time of a step with at most so many tokens is that of launching its kernels and reading the
# weights, more or less; with more it is that of multiplying.
_MAX_FEW_TOKENS = 512


class RateMeter:
    """Exponentially weighted means; each first measurement replaces the starting value. Of steps
    with few tokens the shortest.

    A step takes at least its fixed costs, so one that takes not even twice as long as the shortest
    only says how fast prompts are computed at least.

    What the machine has once shown to be able to stays: the shortest step, and the rate that
    prompts have at least. Later steps of short prompts, or beside many decodes, show far less (32
    tokens in 5 ms are 6,400 tokens/s, where 2,000 tokens take 10 ms), and by that long victims
    would be moved which are sooner computed again. The price: if the machine becomes slower for
    good, by a factor f, computing again is taken to cost up to f times too little. Then only
    victims whose two ways differ by less than f are sent the wrong one, and that costs them less
    than f times the other.
    """

    def __init__(self) -> None:
        self._link: float | None = None
        self._prefill: float | None = None
        self._least_prefill = 0.0
        self._step_s: float | None = None

    @property
    def rates(self) -> Rates:
        start = Rates()
        return Rates(
            link_bytes_per_s=self._link or start.link_bytes_per_s,
            prefill_tokens_per_s=max(self._prefill or 0.0, self._least_prefill)
            or start.prefill_tokens_per_s,
            step_s=self._step_s or start.step_s,
        )

    def swapped(self, num_bytes: int, seconds: float) -> None:
        if num_bytes and seconds > 0:
            self._link = _mean(self._link, num_bytes / seconds)

    def prefilled(self, num_tokens: int, seconds: float) -> None:
        """A step that held chunks of prompts took this long."""
        if num_tokens == 0 or seconds <= 0:
            return
        if num_tokens <= _MAX_FEW_TOKENS:
            self._step_s = seconds if self._step_s is None else min(self._step_s, seconds)
        if num_tokens < _MIN_TOKENS:
            return
        rate = num_tokens / seconds
        if self._step_s is None or seconds >= 2 * self._step_s:
            self._prefill = _mean(self._prefill, rate)
        else:
            self._least_prefill = max(self._least_prefill, rate)


def _mean(old: float | None, new: float) -> float:
    return new if old is None else (1 - _WEIGHT) * old + _WEIGHT * new
