"""The server under load, on this machine's CPU: SmolLM2-135M behind `pagedkv serve`, loaded by
`pagedkv bench serve`'s own library, server and clients on the same cores.

Two runs. 64 streams at once, while prompts that are too long come in and long texts are tokenised;
then arrivals at random times. /health is asked all the while, ten times a second as monitors at
most do, by a process of its own. Limits: no request fails, and /health answers within 100 ms at the
99th percentile.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import math
import multiprocessing
import re
import subprocess
import sys
import time
from multiprocessing.synchronize import Event

import numpy as np

from pagedkv.cli.load import (
    LoadSummary,
    Target,
    arrival_times,
    random_prompts,
    run_load,
    summarise,
)
from pagedkv.cli.load.running import new_client
from rows import Row, parser, report

HEALTH_LIMIT_S = 0.1
LONG_TEXT = "The capital of France is Paris. " * 4_000  # 28,000 tokens


def probe(port: int, is_over: Event, results: multiprocessing.SimpleQueue[list[float]]) -> None:
    """Ask /health until the load is over, and tell how long each answer took, in seconds."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    seconds = []
    while not is_over.is_set():
        begin = time.monotonic()
        connection.request("GET", "/health")
        answer = connection.getresponse()
        answer.read()
        assert answer.status == 200
        seconds.append(time.monotonic() - begin)
        time.sleep(max(0.0, 0.1 - seconds[-1]))
    results.put(seconds)


def tokenise(port: int, is_over: Event) -> None:
    """Long texts: one that becomes tokens, and one that is too long for a prompt."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    while not is_over.is_set():
        for path, status in (("/tokenize", 200), ("/v1/completions", 400)):
            body = json.dumps({"prompt": LONG_TEXT})
            connection.request("POST", path, body, {"content-type": "application/json"})
            answer = connection.getresponse()
            answer.read()
            assert answer.status == status


def start_server() -> tuple[subprocess.Popen[str], int]:
    command = [sys.executable, "-m", "pagedkv", "serve", "smollm2", "--port", "0"]
    server = subprocess.Popen(
        [*command, "--max-model-len", "2048", "--max-num-seqs", "64"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    found = re.search(r":(\d+)$", server.stdout.readline().strip())
    if found is None:
        server.kill()
        raise RuntimeError("the server did not start")
    return server, int(found[1])


def measure(
    port: int, num: int, input_len: int, output_len: int, rate: float, *, with_texts: bool
) -> tuple[LoadSummary, list[float]]:
    """(summary, seconds of each answer of /health)."""
    context = multiprocessing.get_context("spawn")
    is_over, results = context.Event(), context.SimpleQueue()
    beside = [context.Process(target=probe, args=(port, is_over, results))]
    if with_texts:
        beside.append(context.Process(target=tokenise, args=(port, is_over)))
    for one in beside:
        one.start()
    target = Target(f"http://127.0.0.1:{port}", "smollm2", ignore_eos=True)
    prompts = random_prompts(num, input_len=input_len, output_len=output_len)

    async def load() -> LoadSummary:
        async with new_client(600.0) as client:
            arrivals_s = arrival_times(num, rate)
            return summarise(await run_load(client, target, prompts, arrivals_s))

    summary = asyncio.run(load())
    is_over.set()
    seconds = results.get()
    for one in beside:
        one.join()
        assert one.exitcode == 0
    return summary, seconds


def rows_of(name: str, shape: str, summary: LoadSummary, health_s: list[float]) -> list[Row]:
    failed = summary.failed
    rate = f"{summary.per_second(summary.total_output_tokens):.1f} tok/s out"
    rows = [
        Row(f"{name}: whole run", shape, summary.duration_s * 1e6, f"{failed} failed, {rate}",
            limit="0 failed", holds=failed == 0)
    ]  # fmt: skip
    for key, words in (
        ("scheduled_ttft", "first token, from arrival"),
        ("tpot", "per output token"),
        ("scheduled_e2el", "answer, from arrival"),
    ):
        spread = summary.latencies[key]
        more = f"p50; p90 {spread.p90 * 1e6:.4g}, p99 {spread.p99 * 1e6:.4g}"
        rows.append(Row(f"{name}: {words}", shape, spread.median * 1e6, more))
    p50, p99 = np.percentile(health_s, [50, 99])
    rows.append(
        Row(
            f"{name}: /health, p99 of {len(health_s)}",
            shape,
            p99 * 1e6,
            f"p50 {p50 * 1e6:.4g}, max {max(health_s) * 1e6:.4g}",
            limit=f"<= {HEALTH_LIMIT_S * 1e3:.0f} ms",
            holds=p99 <= HEALTH_LIMIT_S,
        )
    )
    return rows


def main() -> int:
    args = parser(__doc__ or "").parse_args()
    server, port = start_server()
    try:
        measure(port, 2, 16, 4, math.inf, with_texts=False)  # warm
        at_once = measure(port, 64, 64, 32, math.inf, with_texts=True)
        at_random = measure(port, 40, 32, 16, 2.0, with_texts=False)
    finally:
        server.terminate()
        server.wait()
    rows = [
        *rows_of("64 at once", "64 streams, 64 + 32 tokens, long texts tokenised", *at_once),
        *rows_of("Poisson, 2/s", "40 requests, 32 + 16 tokens", *at_random),
    ]
    return report("serving", rows, save=args.save)


if __name__ == "__main__":
    sys.exit(main())
