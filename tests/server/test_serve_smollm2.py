"""The real thing: `pagedkv serve` in a process of its own with SmolLM2, and OpenAI's client."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

pytestmark = pytest.mark.model

START_S = 240.0


class Process:
    """A server process, its address, and what it has written so far."""

    def __init__(self, *options: str) -> None:
        command = [sys.executable, "-m", "pagedkv", "serve", "smollm2", "--port", "0", *options]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        self.log: list[str] = []
        assert self.process.stderr is not None
        self._reading = threading.Thread(target=self.log.extend, args=(self.process.stderr,))
        self._reading.start()
        killer = threading.Timer(START_S, self.process.kill)
        killer.start()
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        killer.cancel()
        found = re.search(r"http://127\.0\.0\.1:\d+", line)
        if found is None:
            self.process.kill()
        assert found is not None, (line, self.log)
        self.url = found[0]

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        try:
            code = self.process.wait(60)
        finally:
            self.process.kill()
        self._reading.join()
        return code


@pytest.fixture(scope="module")
def server() -> Iterator[Process]:
    one = Process("--max-model-len", "512", "--max-num-seqs", "16", "--block-size", "16")
    yield one
    assert one.stop() == -signal.SIGTERM
    assert not [line for line in one.log if "ERROR" in line or "Traceback" in line]


@pytest.fixture(scope="module")
def client(server: Process) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as one:
        yield one


def test_openai_client_completes(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {
        "model": "smollm2",
        "prompt": "The capital of France is",
        "max_tokens": 8,
        "temperature": 0,
    }
    done = client.completions.create(**fields)
    assert "Paris" in done.choices[0].text
    assert done.usage is not None
    assert done.usage.completion_tokens == 8
    parts = client.completions.create(**fields, stream=True)
    assert "".join(part.choices[0].text for part in parts) == done.choices[0].text


def test_openai_client_chats(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": "Say hello."}],
        "max_completion_tokens": 24,
        "temperature": 0,
    }
    whole = client.chat.completions.create(**fields)
    text = whole.choices[0].message.content
    assert text
    assert "<|" not in text
    parts = client.chat.completions.create(
        **fields, stream=True, stream_options={"include_usage": True}
    )
    told, usages = "", []
    for part in parts:
        usages.append(part.usage)
        told += "".join(choice.delta.content or "" for choice in part.choices)
    assert told == text
    assert usages[-1] is not None
    assert usages[-1].completion_tokens == whole.usage.completion_tokens  # type: ignore[union-attr]


def test_openai_client_lists_models_and_reads_errors(client: openai.OpenAI) -> None:
    assert [one.id for one in client.models.list().data] == ["smollm2"]
    assert client.models.retrieve("smollm2").id == "smollm2"
    with pytest.raises(openai.BadRequestError, match="tools is not supported") as caught:
        client.chat.completions.create(
            model="smollm2", messages=[{"role": "user", "content": "x"}], tools=[]
        )
    assert caught.value.param == "tools"
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.completions.create(model="gpt-4", prompt="x")


def test_more_streams_than_places_at_once_all_end_well(
    server: Process, client: openai.OpenAI
) -> None:
    def run(number: int) -> str:
        parts = client.completions.create(
            model="smollm2", prompt=f"Number {number} is", max_tokens=8, stream=True, temperature=0
        )
        return "".join(part.choices[0].text for part in parts)

    with ThreadPoolExecutor(24) as threads:
        texts = list(threads.map(run, range(24)))
    assert all(texts)
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_sixty_four_streams_at_once_all_end_well_and_health_is_answered_meanwhile() -> None:
    server = Process("--max-model-len", "512", "--max-num-seqs", "64")
    command = [sys.executable, "-m", "pagedkv", "bench", "serve", "--base-url", server.url]
    load = ["--num-prompts", "64", "--random-input-len", "16", "--random-output-len", "8"]
    client = subprocess.Popen(
        [*command, *load, "--ignore-eos", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    long_text, num_answers = "A long text. " * 3000, 0
    with httpx.Client(base_url=server.url, timeout=60) as other:
        while client.poll() is None:
            assert other.get("/health").status_code == 200
            if num_answers % 8 == 0:
                refused = other.post("/v1/completions", json={"prompt": long_text})
                assert refused.status_code == 400
            num_answers += 1
    out, err = client.communicate()
    assert client.returncode == 0, err
    found = json.loads(out)
    assert (found["completed"], found["failed"], found["errors"]) == (64, 0, {})
    assert found["max_concurrent_requests"] == 64
    assert found["total_output_tokens"] == 64 * 8
    assert num_answers > 20
    assert server.stop() == -signal.SIGTERM
    assert not [line for line in server.log if "ERROR" in line or "Traceback" in line]
