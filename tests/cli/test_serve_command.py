"""`pagedkv serve` before it serves: what is wrong is told, and nothing is loaded for it; every
option reaches what it is for.
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from pagedkv.config import EngineConfig
from pagedkv.engine import engine
from pagedkv.server import Limits


@pytest.fixture
def apps(monkeypatch: pytest.MonkeyPatch) -> list[FastAPI]:
    """What a command would have served, in place of serving it."""
    found: list[FastAPI] = []

    class Server:
        def __init__(self, app: FastAPI, *, on_started: Callable[[], None]) -> None:
            self._app, self._on_started = app, on_started

        def run(self, sockets: list[socket.socket]) -> None:
            found.append(self._app)
            self._on_started()
            for one in sockets:
                one.close()

    monkeypatch.setattr("pagedkv.server.Server", Server)
    monkeypatch.delenv("PAGEDKV_API_KEY", raising=False)
    return found


def asking(app: FastAPI) -> TestClient:
    """Within `with` the engine runs, which it does once."""
    return TestClient(app, base_url="http://localhost")


def status(app: FastAPI, path: str = "/v1/models", **headers: str) -> int:
    return asking(app).get(path, headers=headers).status_code


def test_without_options_it_is_open_to_this_machine_alone(run: Any, apps: list[FastAPI]) -> None:
    result = run("serve", "fake", "--port", "0")
    assert result.code == 0, result.err
    assert result.out.startswith("pagedkv: serving fake on http://127.0.0.1:")
    (app,) = apps
    assert app.state.service.limits == Limits()
    assert app.state.service.model == "fake"
    assert status(app) == status(app, "/inspect") == 200
    assert status(app, host="a.example") == 400
    response = asking(app).get("/v1/models", headers={"origin": "https://a.example"})
    assert "access-control-allow-origin" not in response.headers


def test_every_limit_reaches_the_server(run: Any, apps: list[FastAPI]) -> None:
    result = run(
        *("serve", "fake", "--port", "0", "--max-body-bytes", "5000", "--request-timeout", "7"),
        *("--max-queue", "3", "--max-answers", "4", "--max-logprobs", "2"),
        *("--max-request-tokens", "99", "--drain", "1.5", "--served-model-name", "other"),
    )
    assert result.code == 0, result.err
    service = apps[0].state.service
    assert service.limits == Limits(
        max_body_bytes=5000,
        request_timeout_s=7.0,
        max_queue=3,
        max_answers=4,
        max_logprobs=2,
        max_request_tokens=99,
        drain_s=1.5,
    )
    assert service.model == "other"


def test_who_may_come_in_is_who_was_named(
    run: Any, apps: list[FastAPI], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("serve", "fake", "--port", "0")
    site = "https://a.example"
    hosts = ("--allowed-host", "a.example", "--allowed-host", "b.example")
    run(*command, "--api-key", "one", "--api-key", "two", *hosts, "--allowed-origin", site)
    monkeypatch.setenv("PAGEDKV_API_KEY", "three")
    run(*command)
    run(*command, "--api-key", "one")  # which is then the only one
    named, by_environment, by_option = apps
    keys = ["one", "two", "three", ""]
    for app, statuses in (
        (named, [200, 200, 401, 401]),
        (by_environment, [401, 401, 200, 401]),
        (by_option, [200, 401, 401, 401]),
    ):
        assert [status(app, authorization=f"Bearer {key}") for key in keys] == statuses
        assert status(app, "/health") == 200
        assert status(app, "/inspect") == status(app, "/inspect/stream") == 401
    assert named.state.service.separates_tenants
    assert not by_environment.state.service.separates_tenants
    for host, expected in (("a.example", 200), ("b.example", 200), ("c.example", 400)):
        assert status(named, authorization="Bearer one", host=host) == expected
    response = asking(named).get("/health", headers={"origin": site})
    assert response.headers["access-control-allow-origin"] == site


@pytest.mark.parametrize(("options", "shows_text"), [((), False), (("--inspect-show-text",), True)])
def test_the_live_view_shows_texts_only_if_asked_to(
    run: Any,
    apps: list[FastAPI],
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
    shows_text: bool,
) -> None:
    from pagedkv.inspect import routes

    given: list[bool] = []
    made = routes.LiveView.__init__

    def init(view: Any, *args: Any, shows_text: bool) -> None:
        given.append(shows_text)
        made(view, *args, shows_text=shows_text)

    monkeypatch.setattr(routes.LiveView, "__init__", init)
    run("serve", "fake", "--port", "0", *options)
    with asking(apps[0]) as client:
        apps[0].state.service.stopping.set()  # a view ends at once then
        client.get("/inspect/stream")
    assert given == [shows_text]


def test_engine_options_reach_the_engine_and_its_record(
    run: Any, apps: list[FastAPI], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    configs: list[EngineConfig] = []
    load = engine.load

    def noted(config: EngineConfig) -> engine.LoadedModel:
        configs.append(config)
        return load(config)

    monkeypatch.setattr(engine, "load", noted)
    options: dict[str, Any] = {
        "max_model_len": 100,
        "block_size": 8,
        "num_gpu_blocks_override": 50,
        "swap_space": 0.001,
        "preemption_mode": "swap",
        "max_cudagraph_capture_size": 32,
        "max_num_seqs": 5,
        "max_num_batched_tokens": 64,
        "scheduling_policy": "priority",
        "gpu_memory_utilization": 0.5,
        "dtype": "float32",
        "device": "cpu",
        "seed": 3,
    }
    flags = {"enable_kv_offloading": True, "enforce_eager": True, "enable_prefix_caching": True}
    file = tmp_path / "run.jsonl"
    for name in ("with", "without"):
        words = ["serve", "fake", "--port", "0"]
        for option, value in options.items():
            words += [f"--{option.replace('_', '-')}", str(value)]
        if name == "with":
            words += [f"--{flag.replace('_', '-')}" for flag in flags]
            words += ["--record", str(file), "--record-tokens"]
        else:
            words += ["--no-enable-prefix-caching"]
            flags = dict.fromkeys(flags, False)
        result = run(*words)
        assert result.code == 0, result.err
        assert configs[-1] == EngineConfig.from_options("fake", **options, **flags)
    assert json.loads(file.read_text().splitlines()[0])
    with asking(apps[0]) as client:
        client.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 2})
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert any(list(b"Hello") in line.values() for line in lines)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-queue", "-1"], "max_queue must be at least 0, got -1"),
        (["--request-timeout", "0"], "request_timeout_s must be above 0, got 0.0"),
        (["--api-key", "a b"], "an API key is printable ASCII"),
        (["--max-answers", "0"], "max_answers must be at least 1, got 0"),
    ],
)
def test_wrong_options_are_told_before_the_model_loads(
    run: Any, fakes: list[Any], options: list[str], message: str
) -> None:
    result = run("serve", "fake", "--port", "0", *options)
    assert result.code == 1
    assert message in result.err
    assert not fakes


def test_a_port_in_use_is_named(run: Any, fakes: list[Any]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        result = run("serve", "fake", "--port", str(port))
    assert result.code == 1
    assert f"cannot listen on 127.0.0.1:{port}" in result.err
    assert not fakes


def test_without_its_extra_the_command_says_how_to_get_it(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [one for one in sys.modules if one.split(".")[:2] == ["pagedkv", "server"]]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "fastapi", None)
    result = run("serve", "fake")
    assert result.code == 1
    assert "pip install 'pagedkv[serve]'" in result.err
    assert "fastapi" in result.err


def test_help_shows_an_example(run: Any) -> None:
    result = run("serve", "--help")
    assert result.code == 0
    assert "pagedkv serve smollm2 --port 8000" in result.out
