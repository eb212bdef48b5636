"""Connections made to cost much or to get around something: requests in crumbs, too many at once,
several in a row, and such as no client sends.
"""

from __future__ import annotations

import gc
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from raw_http import connect, head, read_all, read_answer, request, status_of
from serving import Served, serving
from test_disconnects import Gate

from pagedkv.server import Limits

JSON = "content-type: application/json"
CHUNKED = head("/v1/completions", JSON, "transfer-encoding: chunked")
PROMPT: dict[str, Any] = {"prompt": "Hello", "max_tokens": 2, "temperature": 0}


def get(path: str = "/health", *headers: str) -> bytes:
    return head(path, *headers, method="GET")


def chunked(data: bytes, size: int) -> Iterator[bytes]:
    for begin in range(0, len(data), size):
        part = data[begin : begin + size]
        yield b"%x\r\n%s\r\n" % (len(part), part)
    yield b"0\r\n\r\n"


def test_a_body_of_too_many_parts_ends_the_connection(served: Served) -> None:
    with connect(served.port) as connection:
        connection.sendall(CHUNKED)
        try:
            for _ in range(40):
                connection.sendall(b"1\r\n \r\n" * 1000)
        except OSError:
            pass  # closed meanwhile
        data = read_all(connection)
    assert not data or status_of(data) == 400
    assert served.client.get("/health").status_code == 200


@pytest.mark.parametrize("size", [1, 700])
def test_a_body_in_some_parts_is_a_body(served: Served, size: int) -> None:
    body = json.dumps(PROMPT).ljust(4000).encode()
    with connect(served.port) as connection:
        for _ in range(5):  # parts are counted for each request
            connection.sendall(CHUNKED + b"".join(chunked(body, size)))
            assert read_answer(connection)[0] == 200


def test_lines_are_counted_for_each_head_of_a_row(served: Served) -> None:
    some = [f"x{i}:" for i in range(100)]
    with connect(served.port) as connection:
        for _ in range(2):
            connection.sendall(get("/health", *some) * 4)
            for _ in range(4):
                assert read_answer(connection)[0] == 200


def test_few_connections_are_taken_on_at_a_time_and_more_may_wait(
    tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    listen = socket.socket.listen

    def spy(self: socket.socket, backlog: int) -> None:
        asked.append(backlog)
        listen(self, backlog)

    monkeypatch.setattr(socket.socket, "listen", spy)
    with serving(tokenizer_folder) as served:
        # asyncio takes on as many at a time as it is told may wait.
        assert asked == [64, 2048]
        assert served.client.get("/health").status_code == 200


def test_little_is_read_at_a_time(served: Served) -> None:
    assert served.client.get("/health").status_code == 200
    (connection, *_) = served.server.server_state.connections
    assert connection.transport.max_size == 2**13  # type: ignore[union-attr]


@pytest.fixture
def narrow(tokenizer_folder: Path) -> Iterator[Served]:
    limits = Limits(max_connections=4)
    with serving(tokenizer_folder, app_options={"limits": limits}) as one:
        one.client.close()
        yield one


def num_connections(served: Served) -> int:
    return len(served.server.server_state.connections)


@pytest.mark.parametrize(
    "start", [b"", b"GET /hea", head("/v1/completions", JSON, "content-length: 9") + b"{"]
)
def test_beyond_the_limit_those_go_that_wait_the_longest_with_half_a_request(
    narrow: Served, start: bytes
) -> None:
    gate = Gate(narrow)
    stream = {**PROMPT, "stream": True, "max_tokens": 20, "ignore_eos": True}
    with connect(narrow.port) as busy:
        busy.sendall(request("/v1/completions", stream))
        gate.let(1)
        slow = []
        for _ in range(3):
            slow.append(connect(narrow.port))
            slow[-1].sendall(start)
            narrow.wait(lambda: num_connections(narrow) == 1 + len(slow))
        later = []
        for i in range(5):  # each takes the place of one that waits
            later.append(connect(narrow.port))
            later[-1].sendall(get())
            assert read_answer(later[-1])[0] == 200
            assert read_all([*slow, *later][i]) == b""
        gate.open()
        data = b""
        while b"[DONE]" not in data:
            part = busy.recv(2**16)
            assert part, "the stream was cut off"
            data += part
    for one in (*slow, *later):
        one.close()


def test_connections_that_are_kept_for_another_request_make_room_too(narrow: Served) -> None:
    kept = [connect(narrow.port) for _ in range(4)]
    for one in kept:
        one.sendall(get())
        assert read_answer(one)[0] == 200
    with connect(narrow.port) as another:
        another.sendall(get())
        assert read_answer(another)[0] == 200
        assert read_all(kept[0]) == b""
    for one in kept:
        one.close()


def test_bodies_of_all_requests_together_are_bounded(tokenizer_folder: Path) -> None:
    limits = Limits(max_held_bytes=1500)
    with serving(tokenizer_folder, app_options={"limits": limits}) as served:
        gate = Gate(served)
        stream = {**PROMPT, "stream": True, "max_tokens": 20, "ignore_eos": True}
        body = json.dumps({**stream, "prompt": "x" * 100}).ljust(1000)
        with connect(served.port) as busy:
            busy.sendall(head("/v1/completions", JSON, "content-length: 1000") + body.encode())
            gate.let(1)
            kind = {"content-type": "application/json"}
            response = served.client.post("/v1/completions", content=body, headers=kind)
            assert response.status_code == 429
            assert response.headers["retry-after"] == "1"
            assert "1500 bytes" in response.json()["error"]["message"]
            assert served.post("/tokenize", prompt="x" * 100).status_code == 200
            gate.open()
        served.wait_idle()
        assert served.client.post("/tokenize", json={"prompt": "x" * 200}).status_code == 200
        response = served.client.post("/v1/completions", content=body, headers=kind)
        assert response.status_code == 200
        assert "[DONE]" in response.text


def test_requests_in_a_row_are_answered_in_their_order(served: Served) -> None:
    with connect(served.port) as connection:
        connection.sendall(
            get("/version")
            + request("/v1/completions", PROMPT)
            + get("/nowhere")
            + get("/health", "connection: close")
        )
        data = read_all(connection)
    answers = [int(part.split(b" ", 1)[0]) for part in data.split(b"HTTP/1.1 ")[1:]]
    assert answers == [200, 200, 404, 200]
    assert data.index(b"version") < data.index(b"text_completion") < data.index(b'"ok"')


def test_a_client_that_leaves_amid_a_row_of_streams_leaves_nothing(served: Served) -> None:
    stream = {**PROMPT, "stream": True, "n": 4, "max_tokens": 200, "ignore_eos": True}
    with connect(served.port) as connection:
        connection.sendall(request("/v1/completions", stream) * 3)
        assert connection.recv(64)
    served.wait_idle()


UPGRADE = ("connection: upgrade", "upgrade: websocket", "sec-websocket-version: 13")
ODD: dict[str, tuple[bytes, tuple[int, ...]]] = {
    "an upgrade to a websocket": (get("/v1/models", *UPGRADE, "sec-websocket-key: eA=="), (200,)),
    "an upgrade to HTTP/2": (get("/health", "connection: upgrade", "upgrade: h2c"), (200,)),
    "HTTP/2 outright": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", (400,)),
    "a whole URL": (get("http://localhost/v1/models"), (404,)),
    "no Host": (b"GET /health HTTP/1.0\r\n\r\n", (400,)),
    "two Hosts": (get("/health", "host: localhost"), (400,)),
    "a Host in a folded line": (b"GET /health HTTP/1.1\r\nhost: x\r\n localhost\r\n\r\n", (400,)),
    "another's name beside": (get("/health", "x-forwarded-host: evil.example"), (200,)),
    "a path that goes up": (get("/health/../v1/models"), (404,)),
    "an encoded path": (get("/%2e%2e/health"), (404,)),
    "bytes in the path": (b"GET /\xff HTTP/1.1\r\nhost: localhost\r\n\r\n", (400,)),
    "both lengths": (
        CHUNKED.replace(b"transfer", b"content-length: 5\r\ntransfer") + b"0\r\n\r\n",
        (400,),
    ),
    "two lengths": (head("/tokenize", "content-length: 1", "content-length: 2") + b"xx", (400,)),
    "a negative length": (head("/v1/completions", "content-length: -1"), (400,)),
    "a length of many digits": (head("/v1/completions", "content-length: " + "9" * 30), (400, 413)),
    "a header without a name": (b"GET /health HTTP/1.1\r\nhost: localhost\r\n: x\r\n\r\n", (400,)),
    "a header with a NUL": (get("/health", "x: a\0b"), (400,)),
    "headers of many bytes": (get("/health", *[f"x{i}: {'y' * 99}" for i in range(200)]), (431,)),
    "many headers": (get("/health", *[f"x{i}:" for i in range(300)]), (400,)),
    "some headers": (get("/health", *[f"x{i}:" for i in range(200)]), (200,)),
    "a method of its own": (head("/health", method="BREW"), (405,)),
    "nonsense": (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", (400,)),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_what_no_client_sends_is_answered_or_refused(served: Served, name: str) -> None:
    data, statuses = ODD[name]
    with connect(served.port) as connection:
        connection.sendall(data)
        status, body = read_answer(connection)
    assert status in statuses, body
    assert served.client.get("/health").status_code == 200


def test_what_is_loaded_is_not_looked_through_for_garbage_while_it_is_served(
    tokenizer_folder: Path,
) -> None:
    assert gc.get_freeze_count() == 0
    with serving(tokenizer_folder):
        assert gc.get_freeze_count() > 10_000
    assert gc.get_freeze_count() == 0
