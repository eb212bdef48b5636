"""Load and its figures, on a clock that jumps: every latency is what the script of the server makes
it, so that the percentiles can be computed by hand.
"""

from __future__ import annotations

import itertools
import math
import statistics
from pathlib import Path
from typing import Any

import httpx
import pytest
from virtual_time import DONE, Piece, Script, ScriptedServer, event, run_virtually, text, usage

from pagedkv.cli.load import (
    Goals,
    LoadPrompt,
    Outcome,
    Spread,
    Target,
    arrival_times,
    random_prompts,
    read_prompts,
    run_load,
    summarise,
)

TARGET = Target("http://server.test/v1/", "m")
PROMPT = LoadPrompt([1, 2, 3], 5)


def load(
    script: Script, arrivals_s: list[float], prompt: LoadPrompt = PROMPT, **options: Any
) -> tuple[list[Outcome], ScriptedServer]:
    server = ScriptedServer(script)

    async def run() -> list[Outcome]:
        async with httpx.AsyncClient(transport=server) as client:
            return await run_load(client, TARGET, [prompt] * len(arrivals_s), arrivals_s, **options)

    return run_virtually(run()), server


def answer(first_s: float, between_s: float = 0.05, num_tokens: int = 5) -> list[Piece]:
    pieces = [(first_s, text())] + [(between_s, text())] * (num_tokens - 1)
    return [*pieces, (0.0, usage(3, num_tokens)), (0.0, DONE)]


def test_percentiles_are_those_of_the_delays() -> None:
    # First tokens after 0.1, 0.2, ... 1.0 s; four more, 0.05 s apart. Percentile q of ten evenly
    # spaced values lies (10 - 1) * q of the way from the first to the last.
    outcomes, _ = load(lambda i, body: answer(0.1 * (i + 1)), [float(i) for i in range(10)])
    found = summarise(outcomes)
    near = pytest.approx
    ttft = Spread(near(0.55), near(0.55), near(0.91), near(0.955), near(0.991), near(1.0))
    whole = Spread(near(0.75), near(0.75), near(1.11), near(1.155), near(1.191), near(1.2))
    even = Spread(*[near(0.05)] * 6)
    for prefix in ("", "scheduled_"):
        assert found.latencies[f"{prefix}ttft"] == ttft
        assert found.latencies[f"{prefix}e2el"] == whole
    assert found.latencies["itl"] == even
    assert found.latencies["tpot"] == even
    assert found.latencies["send_delay"] == Spread(*[pytest.approx(0, abs=1e-9)] * 6)
    assert (found.completed, found.failed, found.errors) == (10, 0, {})
    assert (found.total_input_tokens, found.total_output_tokens) == (30, 50)
    # From the first arrival, at 0, to the end of the last answer: it arrived at 9 and took 1.2 s.
    assert found.duration_s == near(10.2)
    told = found.as_dict()
    assert told["request_throughput"] == near(10 / 10.2)
    assert told["output_throughput"] == near(50 / 10.2)
    assert told["total_token_throughput"] == near(80 / 10.2)
    assert told["p99_ttft_ms"] == near(991)
    assert told["median_e2el_ms"] == near(750)
    assert told["mean_tpot_ms"] == near(50)
    assert told["request_goodput"] is None


def test_a_stalled_server_delays_no_arrival_and_the_wait_is_counted() -> None:
    # The first answer takes 10 s, all others 0.1 s; one comes each second, one runs at a time.
    # Number k, 1 to 9, is sent at 10 + 0.1 (k - 1), and answered 10 + 0.1 k - k after it arrived.
    outcomes, _ = load(
        lambda i, body: answer(0.1 if i else 10.0, num_tokens=1),
        [float(i) for i in range(10)],
        max_concurrency=1,
    )
    latencies = summarise(outcomes).latencies
    assert latencies["ttft"].median == pytest.approx(0.1)
    assert latencies["scheduled_ttft"].median == pytest.approx((10 - 0.9 * 4 + 10 - 0.9 * 5) / 2)
    assert latencies["scheduled_e2el"].max == pytest.approx(10.0)
    assert latencies["send_delay"].max == pytest.approx(9.0)
    assert latencies["send_delay"].mean == pytest.approx(
        statistics.mean([0.0, *(10 + 0.1 * (k - 1) - k for k in range(1, 10))])
    )
    assert summarise(outcomes).peak_concurrency == 1

    outcomes, _ = load(lambda i, body: answer(10.0), [float(i) for i in range(10)])
    assert summarise(outcomes).peak_concurrency == 10  # without a bound nobody waits
    assert summarise(outcomes).latencies["send_delay"].max == 0.0
    assert [one.sent_s for one in outcomes] == [float(i) for i in range(10)]


def test_errors_are_counted_by_kind_and_their_times_are_left_out() -> None:
    refused = {"error": {"message": "the queue is full", "type": "rate_limit_error"}}
    scripts: list[Any] = [
        answer(0.5),
        httpx.Response(429, json=refused),
        httpx.Response(429, json=refused),
        httpx.Response(500, text="<html>"),
        [(0.0, text()), (0.0, event({"error": {"message": "no progress"}})), (0.0, DONE)],
        [(0.1, text())],
        [(0.1, DONE)],
        [(0.1, b"data: nonsense\n\n"), (0.0, DONE)],
        [(0.1, text()), (0.1, b"!")],
        [(99.0, text()), (0.0, DONE)],
        httpx.ConnectError("nobody listens"),
        httpx.ReadTimeout("silence"),
    ]
    ended: list[Outcome] = []
    outcomes, _ = load(
        lambda i, body: scripts[i], [0.0] * len(scripts), timeout_s=60.0, on_end=ended.append
    )
    assert sorted(map(id, ended)) == sorted(map(id, outcomes))
    found = summarise(outcomes)
    assert (found.completed, found.failed) == (1, 11)
    assert found.errors == {
        "HTTP 429": 2,
        "timeout": 2,
        "HTTP 500": 1,
        "error in the stream": 1,
        "stream broken off": 1,
        "empty answer": 1,
        "not an event of the API": 1,
        "connection lost": 1,
        "cannot connect": 1,
    }
    details = {one.error: one.detail for one in outcomes}
    assert details["HTTP 429"] == "the queue is full"
    assert details["HTTP 500"] == "<html>"
    assert details["error in the stream"] == "no progress"
    assert found.latencies["ttft"] == Spread(*[pytest.approx(0.5)] * 6)
    assert found.total_output_tokens == 5
    assert max(one.end_s for one in outcomes) == pytest.approx(60.0)


def test_what_counts_as_a_piece_of_an_answer() -> None:
    role = event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
    hello = event({"choices": [{"delta": {"content": "Hel\u2028lo"}}]}).replace(
        b"\\u2028", "\u2028".encode()
    )
    last = event({"choices": [{"delta": {}, "finish_reason": "stop"}]})
    crlf = hello.replace(b"\n", b"\r\n")
    pieces = [
        (1.0, role),
        (1.0, hello[:9]),
        (1.0, hello[9:]),
        (1.0, b": ping\n\n" + crlf),
        (1.0, last),
    ]
    chat = LoadPrompt([{"role": "user", "content": "hi"}], 7)
    (outcome,), server = load(lambda i, body: [*pieces, (0.0, DONE)], [0.0], chat)
    assert outcome.piece_s == (3.0, 4.0)  # neither the role nor the end is text
    assert outcome.num_output_tokens == 2  # nothing told: pieces are counted
    assert server.requests[0].url == "http://server.test/v1/chat/completions"
    assert server.bodies[0] == {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "max_completion_tokens": 7,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    # An answer that ends at once has no text: its end is what came first.
    (outcome,), _ = load(lambda i, body: [(2.0, last), (1.0, DONE)], [0.0], chat)
    assert (outcome.error, outcome.piece_s, outcome.end_s) == (None, (2.0,), 3.0)
    assert summarise([outcome]).latencies["tpot"] == Spread()


def test_a_request_says_what_the_target_says() -> None:
    target = Target("http://a:1", "m", "secret", None, True)
    path, body = target.request(LoadPrompt("text", 4))
    assert (path, body["prompt"], body["max_tokens"]) == ("/v1/completions", "text", 4)
    assert body["ignore_eos"] is True
    assert "temperature" not in body
    assert target.headers == {"authorization": "Bearer secret"}
    assert target.url(path) == "http://a:1/v1/completions"
    assert "secret" not in repr(target)
    assert Target("http://a:1").headers == {}


def test_goodput_counts_from_the_arrival() -> None:
    outcomes, _ = load(
        lambda i, body: answer(1.0, 0.5), [0.0, 0.0, 0.0], max_concurrency=1
    )  # answers end after 3, 6 and 9 s, and begin 2 s before
    for texts, num_good in (
        (["ttft:1000"], 1),
        (["ttft:4000.5"], 2),
        (["e2el:9001"], 3),
        (["tpot:499"], 0),
        (["tpot:501", "e2el:6001"], 2),
    ):
        found = summarise(outcomes, Goals.parse(texts))
        assert found.num_good == num_good, texts
        assert found.as_dict()["request_goodput"] == pytest.approx(num_good / 9)
    assert Goals.parse([]) is None
    for wrong in (["itl:1"], ["ttft"], ["ttft:-1"], ["ttft:nan"], ["ttft:1", "ttft:2"]):
        with pytest.raises(ValueError, match="goodput is NAME:MILLISECONDS"):
            Goals.parse(wrong)


def test_arrivals_are_poisson_unless_told_otherwise() -> None:
    def gaps(**options: Any) -> list[float]:
        times = arrival_times(20_001, 4.0, seed=1, **options)
        assert times[0] == 0.0
        return [b - a for a, b in itertools.pairwise(times)]

    for burstiness in (0.25, 1.0, 4.0):
        found = gaps(burstiness=burstiness)
        assert min(found) >= 0
        assert statistics.mean(found) == pytest.approx(0.25, rel=0.05)
        # A gamma distribution's deviation over its mean is 1 / sqrt(shape).
        ratio = statistics.pstdev(found) / statistics.mean(found)
        assert ratio == pytest.approx(burstiness**-0.5, rel=0.05)
    assert arrival_times(9, 2.0, seed=3) == arrival_times(9, 2.0, seed=3)
    assert arrival_times(9, 2.0, seed=3) != arrival_times(9, 2.0, seed=4)
    assert arrival_times(3, math.inf) == [0.0, 0.0, 0.0]
    for rate, burstiness, name in (
        (0.0, 1.0, "rate"),
        (math.nan, 1.0, "rate"),
        (1.0, 0.0, "burst"),
    ):
        with pytest.raises(ValueError, match=name):
            arrival_times(1, rate, burstiness=burstiness)


def test_random_prompts_have_the_lengths_that_were_asked_for() -> None:
    made = random_prompts(
        200, input_len=40, output_len=10, range_ratio=0.5, prefix_len=7, vocab_size=50, seed=2
    )
    contents = [one.content for one in made]
    assert {len(one) for one in contents} == set(range(27, 68))
    assert {one.output_len for one in made} == set(range(5, 16))
    assert len({tuple(one[:7]) for one in contents}) == 1
    assert {index for one in contents for index in one} == set(range(50))
    assert made == random_prompts(
        200, input_len=40, output_len=10, range_ratio=0.5, prefix_len=7, vocab_size=50, seed=2
    )
    (fixed,) = random_prompts(1, input_len=3, output_len=4)
    assert (len(fixed.content), fixed.output_len, fixed.is_chat) == (3, 4, False)
    (chat,) = random_prompts(1, input_len=6, output_len=4, prefix_len=2, is_chat=True)
    assert chat.is_chat
    assert isinstance(chat.content[0], dict)
    assert len(chat.content[0]["content"].split()) == 8
    with pytest.raises(ValueError, match="range_ratio"):
        random_prompts(1, input_len=1, output_len=1, range_ratio=1.0)


def test_prompts_of_a_file_in_its_order_again_and_again(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"prompt": [1, 2], "output_tokens": 9}\n')
    found = read_prompts(path, 3, output_len=4, is_chat=False)
    assert found == [LoadPrompt("a", 4), LoadPrompt([1, 2], 9), LoadPrompt("a", 4)]
    path.write_text('{"prompt": "a"}\n{"messages": [{"role": "system", "content": "b"}]}\n')
    found = read_prompts(path, 2, output_len=4, is_chat=True)
    assert [one.content for one in found] == [
        [{"role": "user", "content": "a"}],
        [{"role": "system", "content": "b"}],
    ]


@pytest.mark.parametrize(
    ("line", "is_chat", "words"),
    [
        ("", False, "has no prompts"),
        ("{", False, "line 1: "),
        ("[]", False, "expected an object"),
        ("{}", False, "expected an object"),
        ('{"prompt": "", "messages": []}', False, "expected an object"),
        ('{"prompt": ""}', False, "not empty"),
        ('{"prompt": [1, "a"]}', False, "prompt is text or token ids"),
        ('{"messages": "x"}', True, "messages are objects"),
        ('{"prompt": "x", "output_tokens": 0}', False, "at least 1, got 0"),
        ('{"prompt": "x", "output_tokens": true}', False, "at least 1, got True"),
        ('{"prompt": [1]}', True, "token ids are for --backend openai"),
        ('{"messages": [{"role": "user"}]}', False, "messages need openai-chat"),
        ("[" * 100_000, False, "line 1: "),
    ],
)
def test_a_line_that_is_no_prompt_is_named(
    tmp_path: Path, line: str, is_chat: bool, words: str
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(line)
    with pytest.raises(ValueError, match=str(path)) as caught:
        read_prompts(path, 1, output_len=4, is_chat=is_chat)
    assert words in str(caught.value)
