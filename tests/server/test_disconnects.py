"""A client that leaves, whenever it does: its blocks are free within two steps, and nothing of it
is remembered. Steps are counted, not timed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from raw_http import connect, head, request
from serving import WAIT_S, Served, serving

LONG: dict[str, Any] = {"max_tokens": 200, "ignore_eos": True, "temperature": 0}
PATHS = {
    "/v1/completions": {"prompt": "Hello", **LONG},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}], **LONG},
}
SHAPES: dict[str, dict[str, Any]] = {
    "whole": {},
    "stream": {"stream": True},
    "three answers": {"n": 3, "stream": True},
    "best of": {"n": 2, "best_of": 4},
    "beams": {"use_beam_search": True, "n": 3},
}


class Gate:
    """Steps of the fake model, let through one by one."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._tickets = threading.Semaphore(0)
        self.num_begun = 0
        self.is_open = False
        served.fake.before_step = self._wait

    def _wait(self, input_ids: Any) -> None:
        self.num_begun += 1
        if not self.is_open:
            assert self._tickets.acquire(timeout=WAIT_S)

    def let(self, num_steps: int) -> None:
        """Let steps pass, and wait until the next stands before the gate."""
        self._served.wait(lambda: self.num_begun > 0)
        want = self.num_begun + num_steps
        self._tickets.release(num_steps)
        self._served.wait(lambda: self.num_begun >= want)

    def open(self) -> None:
        self.is_open = True
        self._tickets.release(1000)


@pytest.fixture
def gate(served: Served) -> Iterator[Gate]:
    one = Gate(served)
    yield one
    one.open()
    served.wait_idle()
    served.fake.before_step = lambda input_ids: None


def num_held(served: Served) -> int:
    return served.engine.statistics().num_referenced


def frees_within_two_steps(served: Served, gate: Gate) -> None:
    """The server has seen the client leave while a step stood before the gate."""
    served.wait(lambda: served.service.engine.num_unfinished == 0)
    begun = gate.num_begun
    gate.open()
    served.wait(lambda: not served.engine.has_work)
    assert gate.num_begun - begun <= 2
    served.wait_idle()
    assert num_held(served) == 0


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_steps", [0, 5])
def test_leaving_during_prefill_or_decode_frees_the_blocks(
    served: Served, gate: Gate, path: str, shape: str, num_steps: int
) -> None:
    with connect(served.port) as connection:
        connection.sendall(request(path, {**PATHS[path], **SHAPES[shape]}))
        served.wait(lambda: gate.num_begun == 1)
        if num_steps:
            gate.let(num_steps)
        assert num_held(served) > 0
    frees_within_two_steps(served, gate)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_chunks", [1, 3])
def test_leaving_within_a_prompt_of_several_chunks_frees_its_blocks(
    tokenizer_folder: Path, shape: str, num_chunks: int
) -> None:
    with serving(tokenizer_folder, max_num_batched_tokens=16, max_num_seqs=8) as served:
        gate = Gate(served)
        fields = {**LONG, **SHAPES[shape], "prompt": "x" * 100, "max_tokens": 100}
        with connect(served.port) as connection:
            connection.sendall(request("/v1/completions", fields))
            gate.let(num_chunks)
            assert num_held(served) > 0
        frees_within_two_steps(served, gate)


def test_leaving_before_the_body_is_complete_leaves_nothing(served: Served) -> None:
    for data in (
        b"",
        b"POST /v1/comp",
        head("/v1/completions", "content-length: 100"),
        head("/v1/completions", "content-type: application/json", "content-length: 100") + b"{",
    ):
        with connect(served.port) as connection:
            connection.sendall(data)
    served.wait_idle()
    served.complete("Hello", max_tokens=1)


def test_leaving_in_the_queue_takes_no_blocks(tokenizer_folder: Path) -> None:
    with serving(tokenizer_folder, max_num_seqs=1) as served:
        gate = Gate(served)
        with connect(served.port) as first:
            first.sendall(request("/v1/completions", PATHS["/v1/completions"]))
            gate.let(2)
            with connect(served.port) as second:
                second.sendall(request("/v1/completions", PATHS["/v1/completions"]))
                served.wait(lambda: served.service.engine.num_unfinished == 2)
                gate.let(1)
                assert served.engine.num_waiting == 1
            served.wait(lambda: served.service.engine.num_unfinished == 1)
            gate.let(2)
            assert served.engine.num_waiting == 0
        frees_within_two_steps(served, gate)


def test_leaving_between_submission_and_answer_of_each_of_many(served: Served) -> None:
    body = request("/v1/completions", {**PATHS["/v1/completions"], "stream": True})
    for number in range(40):
        with connect(served.port) as connection:
            connection.sendall(body[: len(body) - number % 3])
            if number % 6 == 0:  # its body is complete
                connection.recv(64)
    served.wait_idle()
    served.engine.check_invariants()


@pytest.mark.parametrize("shape", ["whole", "stream"])
def test_a_request_whose_time_is_up_is_ended_and_told(tokenizer_folder: Path, shape: str) -> None:
    from pagedkv.server import Limits

    limits = Limits(request_timeout_s=0.2)
    with serving(tokenizer_folder, app_options={"limits": limits}) as served:
        gate = Gate(served)
        fields = {**PATHS["/v1/completions"], **SHAPES[shape]}
        if shape == "stream":
            events = served.events("/v1/completions", **fields)
            error = events[-1]["error"]
        else:
            response = served.post("/v1/completions", **fields)
            assert response.status_code == 504
            error = response.json()["error"]
        assert error["code"] == "timeout"
        assert "0.2 seconds" in error["message"]
        frees_within_two_steps(served, gate)
