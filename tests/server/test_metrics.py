"""GET /metrics, the log's line and the dashboard."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from serving import Served, serving

from pagedkv.server.metrics import log_line

DASHBOARD = Path(__file__).parent.parent.parent / "docs" / "grafana-dashboard.json"
GAUGES = {
    "num_requests_running",
    "num_requests_waiting",
    "num_requests_swapped",
    "kv_cache_usage_perc",
    "kv_cache_token_usage_perc",
    "cpu_cache_usage_perc",
}
COUNTERS = {
    "num_preemptions_total",
    "prompt_tokens_total",
    "generation_tokens_total",
    "request_success_total",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
}
HISTOGRAMS = {
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "iteration_tokens_total",
}


def scraped(served: Served) -> dict[str, Metric]:
    response = served.client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {one.name: one for one in text_string_to_metric_families(response.text)}


def values(served: Served) -> dict[str, float]:
    """Sample name -> value; of labelled ones the sum."""
    found: dict[str, float] = {}
    for family in scraped(served).values():
        for sample in family.samples:
            assert sample.labels["model_name"] == "fake"
            if not sample.name.endswith("_bucket"):
                name = sample.name.removeprefix("pagedkv:")
                found[name] = found.get(name, 0) + sample.value
    return found


def test_the_names_are_those_that_users_know(served: Served) -> None:
    kinds: dict[str, set[str]] = {"gauge": set(), "counter": set(), "histogram": set()}
    for name, family in scraped(served).items():
        assert name.startswith("pagedkv:")
        tail = name.removeprefix("pagedkv:")
        if family.type == "counter":
            tail = tail.removesuffix("_total") + "_total"
        kinds[family.type].add(tail)
        assert family.documentation
    assert kinds == {"gauge": GAUGES, "counter": COUNTERS, "histogram": HISTOGRAMS}


def test_a_request_is_counted(served: Served) -> None:
    before = values(served)
    served.complete("x" * 40, max_tokens=6, ignore_eos=True)
    served.complete("x" * 40, max_tokens=6, ignore_eos=True, n=2)
    now = values(served)
    change = {name: now[name] - before[name] for name in now}
    assert change["prompt_tokens_total"] == 80
    assert change["generation_tokens_total"] == 18
    assert change["prefix_cache_queries_total"] == 80
    assert change["prefix_cache_hits_total"] == 32
    assert change["time_to_first_token_seconds_count"] == 2
    assert change["inter_token_latency_seconds_count"] == 15
    assert change["e2e_request_latency_seconds_count"] == 3
    assert change["request_prompt_tokens_sum"] == 80
    assert change["request_generation_tokens_sum"] == 18
    assert now["num_requests_running"] == 0
    assert now["kv_cache_usage_perc"] == 0


def test_what_runs_is_seen_while_a_step_does_not_end(served: Served) -> None:
    from raw_http import connect, request
    from test_disconnects import Gate

    gate = Gate(served)
    fields = {"prompt": "Hello", "max_tokens": 20, "ignore_eos": True}
    with connect(served.port) as connection:
        connection.sendall(request("/v1/completions", fields))
        served.wait(lambda: gate.num_begun == 1)
        gate.let(2)
        found = values(served)
        assert found["num_requests_running"] == 1
        assert 0 < found["kv_cache_token_usage_perc"] <= found["kv_cache_usage_perc"]
    gate.open()
    served.wait_idle()
    served.fake.before_step = lambda input_ids: None
    reasons = scraped(served)["pagedkv:request_success"].samples
    assert {one.labels["finished_reason"] for one in reasons} == {
        "stop",
        "length",
        "abort",
        "error",
    }


def test_buckets_add_up(served: Served) -> None:
    for family in scraped(served).values():
        if family.type != "histogram":
            continue
        buckets = [one for one in family.samples if one.name.endswith("_bucket")]
        counts = [one.value for one in buckets]
        assert counts == sorted(counts)
        assert buckets[-1].labels["le"] == "+Inf"
        (total,) = [one.value for one in family.samples if one.name.endswith("_count")]
        assert counts[-1] == total


def test_the_log_has_the_line_that_people_search_for(
    tokenizer_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pagedkv.server.metrics")
    with serving(tokenizer_folder, app_options={"log_interval_s": 0.05}) as served:
        served.complete("Hello", max_tokens=6)
        served.wait(lambda: bool(caplog.messages))
        pattern = (
            r"Running: \d+ reqs, Waiting: \d+ reqs, KV cache usage: [\d.]+%, "
            r"Prefix cache hit rate: [\d.]+%"
        )
        assert re.search(pattern, caplog.messages[0])
        served.wait_idle()
        # At rest nothing is written: the snapshot is still the same.
        snapshot = served.service.engine.snapshot
        served.client.get("/health")
        assert served.service.engine.snapshot is snapshot
        assert "Generation: 0.0 tokens/s" in log_line(snapshot, snapshot, 10.0)


def test_the_dashboard_uses_every_metric_and_no_other(served: Served) -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    names = set(re.findall(r"pagedkv:\w+", " ".join(asked)))
    samples = {one.name for family in scraped(served).values() for one in family.samples}
    assert names <= samples
    used = {re.sub(r"_(bucket|sum|count)$", "", name).removeprefix("pagedkv:") for name in names}
    assert used == GAUGES | COUNTERS | HISTOGRAMS
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
