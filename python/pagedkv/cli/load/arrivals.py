"""When requests arrive: planned before the first is sent, whatever the server makes of them."""

from __future__ import annotations

import math
import random


def arrival_times(
    num_requests: int, request_rate: float, *, burstiness: float = 1.0, seed: int = 0
) -> list[float]:
    """Seconds from the first arrival, ascending; the same each time for a seed.

    Args:
        request_rate: requests per second on average; inf: all arrive at once.
        burstiness: shape of the gamma distribution of the gaps between arrivals, whose mean is
            1 / request_rate. 1: a Poisson process; below, bursts; above, more regular.

    Raises:
        ValueError: a rate or burstiness that is not above 0.
    """
    if not request_rate > 0:
        raise ValueError(f"request_rate must be above 0, got {request_rate}")
    if not 0 < burstiness < math.inf:
        raise ValueError(f"burstiness must be above 0 and finite, got {burstiness}")
    if math.isinf(request_rate):
        return [0.0] * num_requests
    source, now_s, times = random.Random(seed), 0.0, []
    for _ in range(num_requests):
        times.append(now_s)
        now_s += source.gammavariate(burstiness, 1 / (request_rate * burstiness))
    return times
