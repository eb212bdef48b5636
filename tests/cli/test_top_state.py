"""What top knows of a run by its frames, and the screen and the values made of it."""

from __future__ import annotations

import io
import itertools
import json
from typing import Any

import pytest
from fake_model import load_fake
from live_frames import START, STATISTICS, frame, packed, request, step
from rich.console import Console

from pagedkv import SamplingParams
from pagedkv.cli.live.latencies import latencies, quantile
from pagedkv.cli.live.run_state import RunState
from pagedkv.cli.live.screen import Moment, as_dict, screen
from pagedkv.config import EngineConfig
from pagedkv.engine import Engine, RunMetrics
from pagedkv.server.metrics import exposition

NOW = Moment(watched_s=5.0, quiet_s=0.0, latencies={})


def run_of(*frames: dict[str, Any], **start: Any) -> RunState:
    run = RunState({**START, **start})
    for one in frames:
        run.apply(one)
    return run


def shown(run: RunState, now: Moment = NOW, width: int = 100, height: int = 40) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(screen(run, now, "http://x", width, height))
    return out.getvalue()


def test_requests_come_change_and_go() -> None:
    run = run_of(
        frame(requests=[request(0, "running"), request(1, "waiting", why="no blocks")]),
        frame(sequences=packed((0, 17, 2))),
        frame(requests=[{"lane": 1, "state": "running", "why": None}], sequences=packed((1, 3, 1))),
    )
    assert [one["id"] for one in run.in_order()] == ["r0", "r1"]
    assert [one["num_tokens"] for one in run.in_order()] == [17, 3]
    assert run.requests[1]["why"] is None
    run.apply(frame(gone=[0], requests=[request(0, "waiting", id="new")]))
    assert {one["id"] for one in run.requests.values()} == {"new", "r1"}
    assert run.requests[0]["num_tokens"] == 0
    run.apply(frame(full=True, requests=[request(5, "pinned")]))
    assert [one["id"] for one in run.in_order()] == ["r5"]


def test_requests_are_in_order_of_state_and_turn() -> None:
    states = ["pinned", "waiting", "running", "swapped", "waiting", "new word"]
    rows = [request(i, state, rank=-i) for i, state in enumerate(states)]
    run = run_of(frame(requests=rows))
    assert [one["id"] for one in run.in_order()] == ["r2", "r4", "r1", "r3", "r0", "r5"]


def test_rates_are_means_over_what_was_watched_and_ten_seconds_at_most() -> None:
    run = run_of(
        frame(0.0, full=True),
        frame(100.0, steps=[step(1, 99.9, 50, 0), step(2, 100.0, 0, 10)]),
    )
    rates = run.rates(watched_s=2.0)
    assert rates["prefill_tokens_per_s"] == 25
    assert rates["decode_tokens_per_s"] == 5
    assert rates["steps_per_s"] == 1
    assert rates["step_s"] == pytest.approx(0.01)
    assert run.rates(watched_s=60.0)["steps_per_s"] == 0.2
    quiet = run.rates(watched_s=60.0, quiet_s=11.0)
    assert set(quiet.values()) == {0.0}
    assert set(run_of().rates(1.0).values()) == {0.0}


def test_hit_rates_are_of_all_time_and_of_late() -> None:
    def looked(time_s: float, queries: int, hits: int) -> dict[str, Any]:
        numbers = {"prefix_cache_queries": queries, "prefix_cache_hits": hits}
        return frame(time_s, statistics=numbers)

    run = run_of(frame(0.0))
    assert (run.hit_rate, run.recent_hit_rate) == (None, None)
    run.apply(looked(1.0, 100, 10))
    run.apply(looked(9.0, 200, 100))
    assert (run.hit_rate, run.recent_hit_rate) == (0.5, 0.5)
    run.apply(looked(12.0, 300, 200))  # what was before 2.0 counts no more
    assert run.recent_hit_rate == 0.95
    run.apply(looked(40.0, 300, 200))
    assert (run.hit_rate, run.recent_hit_rate) == (pytest.approx(2 / 3), None)
    assert run_of().recent_hit_rate is None


def test_preemptions_are_counted_from_steps() -> None:
    run = run_of(frame(steps=[step(1, 1.0, 0, 3, 2), step(2, 1.1, 0, 3, 1)]))
    assert run.num_preempted == 3


@pytest.mark.parametrize(
    "broken",
    [
        {"kind": "start"},
        {"time_s": 1.0},
        frame(requests=[{"id": "no lane"}]),
        frame(sequences="not base 64!"),
        frame(sequences=packed((7, 1, 1))),
        frame(steps=[[1, 2, 3]]),
        frame(statistics=[1]),
    ],
    ids=str,
)
def test_what_is_no_frame_is_told(broken: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="a frame that cannot be read"):
        run_of(broken)


def test_the_screen_has_pool_queues_rates_and_reasons() -> None:
    rows = [request(0, "running", user="ann"), request(1, "waiting", why="the pool is full")]
    run = run_of(
        frame(
            0.0, full=True, requests=rows, sequences=packed((0, 1500, 94)), statistics=STATISTICS
        ),
        frame(
            10.0,
            queues={"running": 1, "waiting": 1, "swapped": 0},
            steps=[
                step(1, 9.9, 500, 0),
                step(2, 10.0, 0, 1, 1),
                step(3, 10.0, 0, 1, 0, 0, 0, 0, 2),
            ],
        ),
    )
    found = {"time_to_first_token_seconds": {"p50": 0.0123, "p90": 0.5, "p99": 2.5}}
    text = shown(run, NOW._replace(latencies=found))
    for words in (
        "pagedkv 0.1.0  fake  http://x",
        "25.0 % of 100 x 16",
        "█ 20 referenced (4 shared)  ▓ 3 draining  ▒ 2 in transit  ░ 25 cached  · 50 free",
        "20.0 % 320",
        "running 1 of 8  waiting 1  swapped 0",
        "evicted 7  copied 1  swapped out 6, in 5  sequences preempted 1",
        "prefill 100 tokens/s  decode 0 tokens/s  0.6 steps/s of 10.00 ms",
        "prefix hits 25.0 %",
        "p50 p90 p99  first token 12.3 ms 500 ms 2.5 s",
        "at most 500 a step",
        "P preempted, E evicted",
        "1,500 of 30",
        "the pool is full",
        "ann",
    ):
        assert words in text, words
    bar = next(line for line in text.splitlines() if line.startswith("blocks █"))
    counts = [bar.count(mark) for mark in "█▓▒░·"]
    assert sum(counts) == 66
    assert all(
        abs(66 * part / 100 - count) <= 1
        for part, count in zip((20, 3, 2, 25, 50), counts, strict=True)
    )


def test_a_cpu_pool_has_its_own_bar() -> None:
    numbers = {**STATISTICS, "num_cpu_blocks": 40, "num_cpu_free": 30}
    assert "25.0 % 10 of 40" in shown(run_of(frame(statistics=numbers)))
    assert "cpu " not in shown(run_of(frame(statistics=STATISTICS)))


def test_of_many_requests_those_that_wait_keep_half_the_room() -> None:
    rows = [request(i, "running" if i < 50 else "waiting") for i in range(90)]
    lines = shown(run_of(frame(requests=rows)), height=40).splitlines()
    assert len(lines) < 40
    running, waiting = (
        sum(f" {name} " in line for line in lines[12:]) for name in ("running", "waiting")
    )
    assert running in (waiting, waiting + 1)
    assert f"... and {90 - running - waiting} more" in lines[-1]
    few = shown(run_of(frame(requests=rows[:3])), height=40)
    assert "more" not in few


def test_nothing_that_a_terminal_obeys_comes_through() -> None:
    evil = "\x1b[2Jgone\r\n\x07\u202e"
    run = run_of(frame(requests=[request(0, "waiting", id=evil, user=evil, why=evil)]), model=evil)
    assert not set(shown(run)) & set("\x1b\r\x07\u202e")
    assert "?[2Jgone" in shown(run)


def test_a_narrow_or_empty_screen_is_still_one() -> None:
    assert len(shown(run_of(), width=30, height=5).splitlines()) > 5
    assert "running 0 of 8" in shown(run_of(frame()), width=80)


def test_values_are_json() -> None:
    run = run_of(frame(requests=[request(0, "running")], statistics=STATISTICS))
    value = json.loads(json.dumps(as_dict(run, NOW)))
    assert value["statistics"]["num_free"] == 50
    assert value["requests"][0]["id"] == "r0"
    assert value["prefix_cache_hit_rate"] == 0.25
    assert value["rates"]["steps_per_s"] == 0
    assert (value["model"], value["block_size"], value["max_num_seqs"]) == ("fake", 16, 8)


def test_quantiles_are_those_of_prometheus() -> None:
    counts = {0.1: 10.0, 0.2: 20.0, 0.4: 40.0, float("inf"): 50.0}
    assert quantile(counts, 0.5) == pytest.approx(0.25)
    assert quantile(counts, 0.2) == pytest.approx(0.1)
    assert quantile(counts, 0.1) == pytest.approx(0.05)
    assert quantile(counts, 0.99) == 0.4  # beyond the last bound


def test_latencies_are_read_from_a_real_exposition(tokenizer_folder: Any) -> None:
    config, clock = EngineConfig.from_options("fake"), itertools.count()
    loaded = load_fake(tokenizer_folder, config)
    engine = Engine(loaded, config, clock=lambda: next(clock) * 0.01)
    metrics = RunMetrics(engine)
    assert latencies(exposition(metrics.snapshot(), "fake").decode()) == {}
    engine.add_request("a", "hello", SamplingParams(max_tokens=4, ignore_eos=True))
    while engine.has_work:
        engine.step()
    snapshot = metrics.snapshot()
    found = latencies(exposition(snapshot, "fake").decode())
    assert set(found) == {
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "request_queue_time_seconds",
        "e2e_request_latency_seconds",
    }
    whole = snapshot.histograms["e2e_request_latency_seconds"]
    bounds = [0.0, *whole.bounds.tolist()]
    place = int(whole.counts.argmax())
    assert bounds[place] < found["e2e_request_latency_seconds"]["p50"] <= bounds[place + 1]
    assert latencies("not metrics at all {{{") == {}
    assert latencies("") == {}
