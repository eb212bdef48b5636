"""`pagedkv top`: against servers that answer as a test says, and what is wrong is told in words.
Against a real server: tests/inspect/test_top_live.py.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from typing import Any

import pytest
from live_frames import START, STATISTICS, answering, frame, lines, request, step

from pagedkv.cli.live.connection import Connection, base_url

GOOD = lines(
    START,
    frame(1.0, full=True, requests=[request(0, "running")], statistics=STATISTICS),
    frame(2.0, steps=[step(1, 2.0, 7, 0)]),
)
FAST = ("--interval", "0.2")


def test_a_pipe_gets_one_screen(run: Any) -> None:
    with answering(GOOD, stays_open=threading.Event()) as (url, seen):
        result = run("top", url, *FAST)
    assert (result.code, result.err) == (0, "")
    assert result.out.count("pagedkv 0.1.0  fake") == 1
    assert "█ 20 referenced (4 shared)" in result.out
    assert "\x1b" not in result.out
    assert [one["path"] for one in seen] == ["/inspect/stream", "/metrics"]


def test_json_once_is_one_object(run: Any) -> None:
    with answering(GOOD, stays_open=threading.Event()) as (url, _):
        result = run("top", url, "--once", "--json", *FAST)
    value = json.loads(result.out)
    assert (result.code, value["time_s"]) == (0, 2.0)
    assert value["statistics"]["num_cached_idle"] == 25
    assert value["rates"]["prefill_tokens_per_s"] > 0


def test_json_goes_on_until_the_server_ends(run: Any) -> None:
    gate = threading.Event()
    with answering(GOOD, stays_open=gate) as (url, seen):

        def end() -> None:  # a look at /metrics goes before each line
            while sum(one["path"] == "/metrics" for one in seen) < 3:
                time.sleep(0.01)
            gate.set()

        ending = threading.Thread(target=end)
        ending.start()
        result = run("top", url, "--json", *FAST)
        ending.join()
    assert len([json.loads(line) for line in result.out.splitlines()]) >= 2
    assert result.code == 1
    assert f"{url}: the server has ended the live view" in result.err


def test_the_key_is_sent_from_the_option_or_the_environment(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def keys(*options: str) -> set[str | None]:
        with answering(GOOD, stays_open=threading.Event()) as (url, seen):
            assert run("top", url, "--once", *FAST, *options).code == 0
        return {one.get("authorization") for one in seen}

    monkeypatch.delenv("PAGEDKV_API_KEY", raising=False)
    assert keys() == {None}
    assert keys("--api-key", "one") == {"Bearer one"}
    monkeypatch.setenv("PAGEDKV_API_KEY", "two")
    assert keys() == {"Bearer two"}
    assert keys("--api-key", "one") == {"Bearer one"}


def test_nobody_there_is_told(run: Any) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"127.0.0.1:{unused.getsockname()[1]}"
        result = run("top", url)
    assert (result.code, result.out) == (1, "")
    assert (
        f"cannot reach http://{url}: Connection refused. Is `pagedkv serve` running" in result.err
    )
    unknown = run("top", "http://no.such.host.invalid:1")
    assert unknown.code == 1
    assert "cannot reach http://no.such.host.invalid:1: " in unknown.err


NOT_ONE = "is not a pagedkv server with a live view"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"stream": b"{}", "status": 401}, "needs an API key: --api-key KEY, or PAGEDKV_API_KEY"),
        (
            {"stream": b"gone", "status": 404},
            f"{NOT_ONE}: GET /inspect/stream is answered with 404",
        ),
        ({"stream": b'{"error": {"message": "x"}}', "status": 404}, NOT_ONE),
        (
            {"stream": b'{"error": {"message": "8 watch already"}}', "status": 503},
            ": 503: 8 watch already",
        ),
        (
            {"stream": b"oops", "status": 500},
            f"{NOT_ONE}: GET /inspect/stream is answered with 500",
        ),
        ({"stream": b"", "status": 302, "headers": {"Location": "/"}}, "is answered with 302"),
        ({"stream": b"<html>hello</html>"}, f"{NOT_ONE}: GET /inspect/stream does not begin as"),
        ({"stream": b""}, NOT_ONE),
        ({"stream": b"[1]\n"}, NOT_ONE),
        ({"stream": lines(frame())}, NOT_ONE),
        ({"stream": lines({**START, "version": 2})}, "speaks version 2 of the live view; this"),
        ({"stream": lines(START)}, "the server has ended the live view"),
        ({"stream": lines(START) + b"{broken\n"}, "the connection is lost: "),
        ({"stream": lines(START, {"kind": "other"})}, "a frame that cannot be read"),
    ],
    ids=lambda one: None if isinstance(one, dict) else one,
)
def test_what_is_wrong_is_told(run: Any, answer: dict[str, Any], words: str) -> None:
    with answering(**answer) as (url, _):
        result = run("top", url, "--once", *FAST)
    assert (result.code, result.out) == (1, "")
    assert words in result.err
    assert "Traceback" not in result.err


def test_what_speaks_no_http_or_says_nothing_is_told() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        url = f"http://127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(RuntimeError, match=r"cannot reach .*: no answer within 0 seconds"):
            Connection(url, api_key=None, silence_s=0.2)

        def greet() -> None:
            for _ in range(2):  # the first one to come has gone
                one, _ = other.accept()
                with one, contextlib.suppress(OSError):
                    one.recv(1000)
                    one.sendall(b"220 mail ready\r\n")

        greeter = threading.Thread(target=greet)
        greeter.start()
        with pytest.raises(RuntimeError, match="is not a pagedkv server with a live view"):
            Connection(url, api_key=None, silence_s=10)
        greeter.join()


def test_a_server_that_falls_silent_is_told() -> None:
    with (
        answering(GOOD, stays_open=threading.Event()) as (url, _),
        Connection(url, api_key=None, silence_s=1.0) as server,
    ):
        found = 0
        while found < 2:
            found += len(server.frames(5.0))
        with pytest.raises(RuntimeError, match="the connection is lost: "):
            server.frames(5.0)


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("localhost:8000", "http://localhost:8000"),
        ("http://localhost:8000/", "http://localhost:8000"),
        ("https://a.example/b/", "https://a.example/b"),
        ("[::1]:80", "http://[::1]:80"),
    ],
)
def test_addresses_are_taken_as_people_write_them(text: str, url: str) -> None:
    assert base_url(text) == url


@pytest.mark.parametrize("text", ["", "ftp://x", "http://", "localhost:port", "x:99999", "x:0"])
def test_what_is_no_address_is_wrong_usage(run: Any, text: str) -> None:
    with pytest.raises(ValueError, match="it must be like http://localhost:8000"):
        base_url(text)
    assert run("top", text).code == 2


def test_help_shows_an_example(run: Any) -> None:
    assert "Example: pagedkv top http://localhost:8000" in run("top", "--help").out
    assert run("top", "--interval", "0").code == 2
