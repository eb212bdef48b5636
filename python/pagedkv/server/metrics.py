"""GET /metrics in Prometheus' text format, and the line about the engine that the log has every few
seconds. Both are made from the engine's last snapshot; the engine does nothing for a reader.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator

from fastapi import APIRouter, Request
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector
from starlette.responses import Response

from pagedkv.engine import MetricsSnapshot
from pagedkv.engine.histogram import HistogramCounts
from pagedkv.server.service import service_of

logger = logging.getLogger(__name__)

router = APIRouter()

STEM = "pagedkv:"
_HELP = {
    "time_to_first_token_seconds": "From a request's arrival to its first token",
    "inter_token_latency_seconds": "Between two tokens of a sequence",
    "e2e_request_latency_seconds": "From a request's arrival to the end of each of its answers",
    "request_queue_time_seconds": "From a request's arrival to its first step",
    "request_prompt_tokens": "Tokens of a request's prompt",
    "request_generation_tokens": "Tokens of an answer",
    "iteration_tokens_total": "Tokens of a step, prompts and answers together",
}


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Prometheus metrics."""
    service = service_of(request)
    data = exposition(service.engine.snapshot, service.model)
    return Response(data, headers={"content-type": CONTENT_TYPE_PLAIN_0_0_4})


def exposition(snapshot: MetricsSnapshot, model: str) -> bytes:
    """A snapshot in Prometheus' text format; every sample has the label model_name."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Snapshot(snapshot, model))
    return generate_latest(registry)


class _Snapshot(Collector):
    def __init__(self, snapshot: MetricsSnapshot, model: str) -> None:
        self._snapshot = snapshot
        self._model = model

    def collect(self) -> Iterator[Metric]:
        one, blocks = self._snapshot, self._snapshot.statistics
        num_cpu_used = blocks.num_cpu_blocks - blocks.num_cpu_free - blocks.num_cpu_cached_idle
        yield self._gauge("num_requests_running", "Sequences that run", one.num_running)
        yield self._gauge("num_requests_waiting", "Sequences that wait", one.num_waiting)
        yield self._gauge("num_requests_swapped", "Sequences on the CPU", one.num_swapped)
        yield self._gauge(
            "kv_cache_usage_perc", "Part of the blocks in use, 1 is all", blocks.block_occupancy
        )
        yield self._gauge(
            "kv_cache_token_usage_perc",
            "Part of the pool's places for tokens in use, 1 is all",
            blocks.token_occupancy,
        )
        yield self._gauge(
            "cpu_cache_usage_perc",
            "Part of the CPU's blocks that swapped sequences hold, 1 is all",
            num_cpu_used / max(blocks.num_cpu_blocks, 1),
        )
        yield self._counter("num_preemptions", "Preempted sequences", one.num_preemptions)
        yield self._counter("prompt_tokens", "Tokens of prompts computed", one.num_prompt_tokens)
        yield self._counter("generation_tokens", "Tokens generated", one.num_generation_tokens)
        yield self._counter(
            "prefix_cache_queries",
            "Tokens looked up in the prefix cache",
            blocks.prefix_cache_queries,
        )
        yield self._counter(
            "prefix_cache_hits", "Tokens found in the prefix cache", blocks.prefix_cache_hits
        )
        ended = CounterMetricFamily(
            STEM + "request_success",
            "Answers that ended",
            labels=["model_name", "finished_reason"],
        )
        for reason, number in one.num_finished.items():
            ended.add_metric([self._model, reason], number)
        yield ended
        for name, counts in one.histograms.items():
            yield self._histogram(name, counts)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(STEM + name, text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        """Its sample is called name_total."""
        family = CounterMetricFamily(STEM + name, text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _histogram(self, name: str, counts: HistogramCounts) -> Metric:
        family = HistogramMetricFamily(STEM + name, _HELP[name], labels=["model_name"])
        bounds = [*map(str, counts.bounds.tolist()), "+Inf"]
        buckets = list(zip(bounds, counts.counts.cumsum().tolist(), strict=True))
        family.add_metric([self._model], buckets, counts.sum)
        return family


def log_line(before: MetricsSnapshot, now: MetricsSnapshot, seconds: float) -> str:
    """What people search logs for; the hit rate is that since the start."""
    prompt = (now.num_prompt_tokens - before.num_prompt_tokens) / seconds
    generated = (now.num_generation_tokens - before.num_generation_tokens) / seconds
    blocks = now.statistics
    hit_rate = blocks.prefix_cache_hits / max(blocks.prefix_cache_queries, 1)
    return (
        f"Prompt: {prompt:.1f} tokens/s, Generation: {generated:.1f} tokens/s, "
        f"Running: {now.num_running} reqs, Waiting: {now.num_waiting} reqs, "
        f"KV cache usage: {100 * blocks.block_occupancy:.1f}%, "
        f"Prefix cache hit rate: {100 * hit_rate:.1f}%, Swapped: {now.num_swapped} reqs, "
        f"Preemptions: {now.num_preemptions}"
    )


async def log_for_ever(snapshot: Callable[[], MetricsSnapshot], interval_s: float) -> None:
    """A line every interval_s in which something happened."""
    before = snapshot()
    while True:
        await asyncio.sleep(interval_s)
        now = snapshot()
        if now is not before:
            logger.info("%s", log_line(before, now, interval_s))
        before = now
