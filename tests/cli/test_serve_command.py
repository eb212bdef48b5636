"""`pagedkv serve` before it serves: what is wrong is told, and nothing is loaded for it."""

from __future__ import annotations

import socket
import sys
from typing import Any

import pytest


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
