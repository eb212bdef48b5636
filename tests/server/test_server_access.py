"""Who may come in and with how much: keys, hosts, origins, sizes, times, the queue."""

from __future__ import annotations

import gzip
import json
import re
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest
from raw_http import connect, head, read_all, request, status_of
from serving import Served, serving
from starlette.routing import Route

from pagedkv.server import Access, Limits, hosts_of
from pagedkv.server.guards import OPEN_PATHS

KEYS = ("first-key", "second-key")
PROMPT = {"prompt": "x" * 40, "max_tokens": 1, "temperature": 0}


@pytest.fixture(scope="module")
def closed(tokenizer_folder: Path) -> Any:
    options = {"access": Access(KEYS), "cors_origins": ["https://a.example"]}
    with serving(tokenizer_folder, app_options=options) as one:
        yield one


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_every_route_but_health_needs_a_key(closed: Served) -> None:
    app: Any = closed.server.config.app
    # Of routers that were included FastAPI has either the routes here or, in its later versions,
    # only the description.
    paths = {route.path for route in app.routes if isinstance(route, Route)}
    paths = {re.sub(r"{[^}]*}", "fake", path) for path in (*paths, *app.openapi()["paths"])}
    assert {"/v1/completions", "/v1/models/fake", "/v1/fork", "/metrics", "/health"} <= paths
    assert {"/openapi.json", "/docs"} <= paths
    for path in {*paths, "/", "/nowhere", "/health/", "//health", "/health%2f", "/HEALTH"}:
        for method in ("GET", "POST", "PUT", "OPTIONS", "HEAD"):
            status = closed.client.request(method, path).status_code
            if path in OPEN_PATHS:
                assert status in (200, 405)
            else:
                assert status == 401, (method, path)
    assert frozenset(["/health"]) == OPEN_PATHS


@pytest.mark.parametrize(
    "value",
    ["", "Bearer", "Bearer wrong", "Basic first-key", "first-key", "Bearer first-ke",
     "Bearer first-key2", "Bearer first-key second-key", "Bearer \xff"],
)  # fmt: skip
def test_what_is_not_a_key_opens_nothing(closed: Served, value: str) -> None:
    headers = [(b"authorization", value.encode("latin-1"))]
    response = closed.client.get("/v1/models", headers=headers)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.json()["error"]["type"] == "authentication_error"
    assert "key" not in response.json()["error"]["message"].replace("API key", "")


@pytest.mark.parametrize("key", KEYS)
def test_each_key_opens_all(closed: Served, key: str) -> None:
    assert closed.client.get("/v1/models", headers=bearer(key)).status_code == 200
    lower = {"Authorization": f"bearer {key}"}
    assert closed.client.get("/version", headers=lower).status_code == 200
    twice = [("authorization", f"Bearer {key}"), ("authorization", "Bearer x")]
    assert closed.client.get("/version", headers=twice).status_code == 401


def test_keys_are_compared_as_whole_digests(
    closed: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[tuple[int, int]] = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((len(a), len(b)))
        return a == b

    monkeypatch.setattr("pagedkv.server.guards.hmac.compare_digest", compare)
    for key in ("f", KEYS[0], "x" * 1000):
        closed.client.get("/version", headers=bearer(key))
    assert compared == [(32, 32)] * 6  # each key, however early one fits


def test_prompts_of_different_keys_share_no_blocks(closed: Served) -> None:
    def cached(key: str, **more: Any) -> int:
        response = closed.client.post(
            "/v1/completions", json={**PROMPT, **more}, headers=bearer(key)
        )
        found: int = response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return found

    assert [cached(KEYS[0]), cached(KEYS[0])] == [0, 32]
    assert [cached(KEYS[1]), cached(KEYS[1])] == [0, 32]
    assert [cached(KEYS[0], cache_salt="a"), cached(KEYS[0], cache_salt="a")] == [0, 32]


def test_one_key_or_none_shares_by_the_clients_salt(served: Served) -> None:
    def cached(**more: Any) -> int:
        usage = served.complete(PROMPT["prompt"], max_tokens=1, **more)["usage"]
        found: int = usage["prompt_tokens_details"]["cached_tokens"]
        return found

    assert [cached(), cached(), cached(cache_salt="a"), cached(cache_salt="a")] == [0, 32, 0, 32]


def test_origins_are_allowed_only_if_named(closed: Served, served: Served) -> None:
    ask = {
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization",
    }
    for origin, allowed in (("https://a.example", True), ("https://b.example", False)):
        response = closed.client.options("/v1/models", headers={"origin": origin, **ask})
        assert (response.headers.get("access-control-allow-origin") == origin) == allowed
    response = served.client.get("/v1/models", headers={"origin": "https://a.example"})
    assert "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost", 200), ("localhost:80", 200), ("127.0.0.1:9", 200), ("[::1]:9", 200),
     ("LOCALHOST", 200), ("evil.example", 400), ("localhost.evil.example", 400), ("", 400),
     ("localhost@evil.example", 400), ("localhost/health", 400), ("localhost:x", 400)],
)  # fmt: skip
def test_only_names_of_its_own_are_answered_to(served: Served, host: str, status: int) -> None:
    assert served.client.get("/v1/models", headers={"host": host}).status_code == status
    assert served.client.get("/health", headers={"host": host}).status_code == status


def test_a_server_answers_to_the_address_it_is_bound_to_unless_that_is_every_one() -> None:
    own = {"localhost", "127.0.0.1", "::1"}
    assert set(hosts_of("127.0.0.1", ())) == own
    assert set(hosts_of("10.0.0.5", ())) == own | {"10.0.0.5"}
    for every in ("0.0.0.0", "::"):
        assert set(hosts_of(every, ())) == own
        assert set(hosts_of(every, ["a.example"])) == own | {"a.example"}


def test_other_hosts_can_be_allowed(tokenizer_folder: Path) -> None:
    for allowed, host, status in (
        (("a.example",), "a.example:80", 200),
        (("a.example",), "localhost", 400),
        (("*",), "anything.example", 200),
    ):
        access = Access(allowed_hosts=allowed)
        with serving(tokenizer_folder, app_options={"access": access}) as one:
            assert one.client.get("/health", headers={"host": host}).status_code == status


SMALL = Limits(max_body_bytes=1000, max_header_bytes=2000, body_timeout_s=0.3, max_queue=0)


@pytest.fixture(scope="module")
def small(tokenizer_folder: Path) -> Any:
    with serving(tokenizer_folder, app_options={"limits": SMALL}, max_num_seqs=2) as one:
        yield one


def test_large_bodies_are_not_read(small: Served) -> None:
    fits = json.dumps({**PROMPT, "prompt": "x"}).ljust(1000).encode()
    kind = {"content-type": "application/json"}
    assert small.client.post("/v1/completions", content=fits, headers=kind).status_code == 200
    response = small.client.post("/v1/completions", content=fits + b" ", headers=kind)
    assert response.status_code == 413
    assert "1000 bytes" in response.json()["error"]["message"]


def test_large_bodies_in_chunks_are_not_kept(small: Served) -> None:
    with connect(small.port) as connection:
        connection.sendall(
            head("/v1/completions", "content-type: application/json", "transfer-encoding: chunked")
        )
        for _ in range(20):
            connection.sendall(b"64\r\n" + b"x" * 100 + b"\r\n")
        assert status_of(read_all(connection)) == 413


def test_compressed_bodies_are_not_read(small: Served) -> None:
    response = small.client.post(
        "/v1/completions",
        content=gzip.compress(json.dumps(PROMPT).encode()),
        headers={"content-encoding": "gzip", "content-type": "application/json"},
    )
    assert response.status_code == 400
    assert "compressed" in response.json()["error"]["message"]


@pytest.mark.parametrize(("num_bytes", "status"), [(1000, 200), (3000, 431), (200_000, 400)])
def test_large_headers_are_refused(small: Served, num_bytes: int, status: int) -> None:
    with connect(small.port) as connection:
        try:
            connection.sendall(
                head("/health", "connection: close", f"x: {'y' * num_bytes}", method="GET")
            )
        except OSError:
            assert num_bytes > 2**16  # closed while they came
        data = read_all(connection)
    assert not data or status_of(data) == status


def test_a_body_that_drips_is_given_up(small: Served) -> None:
    with connect(small.port) as connection:
        connection.sendall(
            head("/v1/completions", "content-type: application/json", "content-length: 50") + b"{"
        )
        data = read_all(connection)
    assert status_of(data) == 408
    assert b"did not arrive in time" in data


@pytest.mark.parametrize("start", [b"", b"GET /health HT", b"GET /health HTTP/1.1\r\nhost: loc"])
def test_a_head_that_drips_is_given_up(small: Served, start: bytes) -> None:
    with connect(small.port) as connection:
        connection.sendall(start)
        assert read_all(connection) == b""


def test_a_second_head_on_a_connection_that_drips_is_given_up(small: Served) -> None:
    with connect(small.port) as connection:
        connection.sendall(head("/health", method="GET"))
        assert connection.recv(2**16)
        connection.sendall(b"GET /hea")
        read_all(connection)


def test_prompts_beyond_the_queue_get_429(small: Served) -> None:
    from test_disconnects import Gate

    gate = Gate(small)
    body = {"prompt": "Hello", "max_tokens": 20, "ignore_eos": True, "stream": True}
    with connect(small.port) as first, connect(small.port) as second:
        for connection in (first, second):
            connection.sendall(request("/v1/completions", body))
        small.wait(lambda: small.service.room.num_taken == 2)
        response = small.post("/v1/completions", prompt="x")
        assert response.status_code == 429
        assert response.headers["retry-after"] == "1"
        assert response.json()["error"]["code"] == "queue_full"
        assert small.post("/tokenize", prompt="x").status_code == 429
        assert small.client.get("/health").status_code == 200
        gate.open()
    small.wait_idle()
    assert small.post("/v1/completions", prompt=["x", "y", "z"]).status_code == 429
    assert small.post("/v1/completions", prompt=["x", "y"]).status_code == 200
    small.fake.before_step = lambda input_ids: None


def test_limits_of_log_probabilities_and_tokens(tokenizer_folder: Path) -> None:
    limits = Limits(max_logprobs=2, max_request_tokens=100, max_answers=4)
    with serving(tokenizer_folder, app_options={"limits": limits}) as one:
        for fields, status in (
            ({"logprobs": 2}, 200),
            ({"logprobs": 3}, 400),
            ({"prompt_logprobs": 3}, 400),
            ({"n": 4, "max_tokens": 25}, 200),
            ({"n": 4, "max_tokens": 26}, 400),
            ({"n": 5, "max_tokens": 1}, 400),
            ({"best_of": 5, "max_tokens": 1}, 400),
            ({"n": 5, "max_tokens": 1, "use_beam_search": True, "temperature": 0}, 400),
        ):
            response: httpx.Response = one.post("/v1/completions", prompt="x", **fields)
            assert response.status_code == status, fields


def test_no_event_waits_for_the_acknowledgement_of_the_one_before(served: Served) -> None:
    assert served.client.get("/health").status_code == 200
    (connection, *_) = served.server.server_state.connections
    own = connection.transport.get_extra_info("socket")  # type: ignore[union-attr]
    assert own.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
