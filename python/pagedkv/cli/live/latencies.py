"""Latencies of a server since its start, out of the histograms of its /metrics."""

from __future__ import annotations

from collections import defaultdict

_STEM = "pagedkv:"
NAMES = (
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_queue_time_seconds",
    "e2e_request_latency_seconds",
)
QUANTILES = (0.5, 0.9, 0.99)


def latencies(metrics: str) -> dict[str, dict[str, float]]:
    """{name: {"p50": seconds, ...}} of those histograms that have counted anything.

    Raises:
        RuntimeError: prometheus_client, of the extra serve, is not installed.
    """
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ModuleNotFoundError as error:
        raise RuntimeError(
            f"latencies need {error.name}, of the extra serve: pip install 'pagedkv[serve]'"
        ) from None
    buckets: dict[str, dict[float, float]] = defaultdict(lambda: defaultdict(float))
    try:
        for family in text_string_to_metric_families(metrics):
            name = family.name.removeprefix(_STEM)
            if name not in NAMES:
                continue
            for sample in family.samples:
                if sample.name.endswith("_bucket"):
                    buckets[name][float(sample.labels["le"])] += sample.value
    except (ValueError, KeyError):  # it is another program's, or cut
        return {}
    return {
        name: {f"p{100 * part:.0f}": quantile(buckets[name], part) for part in QUANTILES}
        for name in NAMES
        if buckets[name] and max(buckets[name].values()) > 0
    }


def quantile(buckets: dict[float, float], part: float) -> float:
    """Of cumulative counts by upper bound, the last of which is infinite; within a bucket as if its
    values were spread evenly, in the last one its lower bound (as Prometheus' histogram_quantile).

    >>> quantile({1.0: 10, 2.0: 20, float("inf"): 20}, 0.75)
    1.5
    """
    wanted = part * max(buckets.values())
    low, below = 0.0, 0.0
    for bound, count in sorted(buckets.items()):
        if count >= wanted and count > below:
            if bound == float("inf"):
                return low
            return low + (bound - low) * (wanted - below) / (count - below)
        low, below = bound, count
    return low
