"""`pagedkv bench serve` against the real server: what it tells, and when it fails."""

from __future__ import annotations

import importlib
import json
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "server"))

from serving import Served, serving

from pagedkv.server import Access, listen

SMALL = ("--num-prompts", "6", "--random-input-len", "9", "--random-output-len", "5")
SMALL = (*SMALL, "--random-vocab-size", "250", "--ignore-eos")


@pytest.fixture(scope="module")
def served(tokenizer_folder: Path) -> Iterator[Served]:
    with serving(tokenizer_folder) as one:
        yield one


def test_a_run_is_told_as_a_table(run: Any, served: Served) -> None:
    result = run("bench", "serve", "--base-url", served.url, *SMALL)
    assert result.code == 0, result.err
    assert "6 requests completed, 0 failed in " in result.out
    assert "54 tokens of prompts, 30 of answers" in result.out
    for words in ("time to first token", "time per output token", "answer, from arrival"):
        (line,) = [one for one in result.out.splitlines() if one.startswith(words)]
        assert len(line.removeprefix(words).split()) == 6
    assert result.err == ""


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_json_has_vllms_names(run: Any, served: Served, backend: str) -> None:
    options = ("--backend", backend, "--goodput", "e2el:60000", "--request-rate", "500")
    result = run(
        "bench", "serve", "--base-url", f"{served.url}/v1", *SMALL, *options, "--json",
        "--max-concurrency", "2",
    )  # fmt: skip
    assert result.code == 0, result.err
    found = json.loads(result.out)
    assert (found["completed"], found["failed"], found["errors"]) == (6, 0, {})
    assert found["total_output_tokens"] == 30
    assert 1 <= found["max_concurrent_requests"] <= 2
    assert found["request_goodput"] == pytest.approx(found["request_throughput"])
    assert 0 < found["median_ttft_ms"] <= found["p99_ttft_ms"] <= found["max_e2el_ms"]
    assert found["mean_scheduled_e2el_ms"] >= found["mean_e2el_ms"]


def test_prompts_of_a_file_are_sent_in_order(run: Any, served: Served, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "Hello", "output_tokens": 2}\n{"prompt": [5, 6, 7]}\n')
    result = run(
        "bench", "serve", "--base-url", served.url, "--dataset-path", str(path), "--num-prompts",
        "2", "--random-output-len", "3", "--num-warmups", "0", "--ignore-eos", "--json",
    )  # fmt: skip
    found = json.loads(result.out)
    assert found["total_output_tokens"] == 5
    assert found["total_input_tokens"] == 3 + len(served.ok("/tokenize", prompt="Hello")["tokens"])


def test_failed_requests_are_counted_and_make_the_exit_code(run: Any, served: Served) -> None:
    too_long = ("--random-input-len", "250", "--random-range-ratio", "0.5", "--num-warmups", "0")
    result = run("bench", "serve", "--base-url", served.url, *SMALL, *too_long, "--seed", "1")
    assert result.code == 1
    assert " x HTTP 400" in result.out
    assert "max_model_len is 256" in result.err
    assert "0 requests completed" not in result.out
    result = run("bench", "serve", "--base-url", served.url, *SMALL, "--model", "other")
    assert result.code == 1
    assert "the first request failed: HTTP 404: the model 'other' does not exist" in result.err


def test_a_server_with_a_key_is_asked_with_it(
    run: Any, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PAGEDKV_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with serving(tokenizer_folder, app_options={"access": Access(("a-key",))}) as closed:
        closed.client.headers["authorization"] = "Bearer a-key"
        command = ("bench", "serve", "--base-url", closed.url, *SMALL)
        result = run(*command)
        assert result.code == 1
        assert "401" in result.err
        assert "give --model" in result.err
        assert run(*command, "--api-key", "a-key").code == 0
        monkeypatch.setenv("PAGEDKV_API_KEY", "a-key")
        assert run(*command).code == 0


def test_a_bar_counts_requests(run: Any, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    @contextmanager
    def noted(words: str, total: int) -> Iterator[Any]:
        seen.append((words, total))
        yield lambda: seen.append("one")

    module = importlib.import_module("pagedkv.cli.bench_serve")
    monkeypatch.setattr(module, "progress", noted)
    assert run("bench", "serve", "--base-url", served.url, *SMALL).code == 0
    assert seen == [("requests", 6), *["one"] * 6]


def test_a_plot_is_written(run: Any, served: Served, tmp_path: Path) -> None:
    path = tmp_path / "load.svg"
    result = run("bench", "serve", "--base-url", served.url, *SMALL, "--plot", str(path))
    assert result.code == 0, result.err
    assert ElementTree.fromstring(path.read_text()).tag == "{http://www.w3.org/2000/svg}svg"


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (("--plot", "load.jpg"), 2, "one of .svg, .png, .pdf, got"),
        (("--num-prompts", "0"), 2, "--num-prompts"),
        (("--backend", "other"), 2, "--backend"),
        (("--request-rate", "0"), 1, "request_rate must be above 0"),
        (("--burstiness", "-1"), 1, "burstiness must be above 0"),
        (("--random-range-ratio", "1"), 1, "range_ratio must be"),
        (("--goodput", "x"), 1, "goodput is NAME:MILLISECONDS"),
        (("--dataset-path", "no-such-file"), 1, "no-such-file"),
    ],
)
def test_wrong_options_are_told_before_anything_is_sent(
    run: Any, options: tuple[str, ...], code: int, words: str
) -> None:
    result = run("bench", "serve", "--base-url", "http://127.0.0.1:9", *options)
    assert result.code == code
    assert words in result.err


def test_nobody_there_is_told(run: Any) -> None:
    with listen("127.0.0.1", 0) as bound:  # and nobody accepts
        port = bound.getsockname()[1]
    command = ("bench", "serve", "--base-url", f"http://127.0.0.1:{port}")
    result = run(*command)
    assert result.code == 1
    assert "does not tell a model" in result.err
    result = run(*command, "--model", "m", "--num-warmups", "0", "--num-prompts", "2")
    assert result.code == 1
    assert "2 x cannot connect" in result.out


def test_without_its_extra_the_command_says_how_to_get_it(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [one for one in sys.modules if one.startswith("pagedkv.cli.load")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "httpx", None)
    result = run("bench", "serve")
    assert result.code == 1
    assert "pip install 'pagedkv[bench]'" in result.err


def test_help_shows_both_kinds_of_bench(run: Any) -> None:
    shown = " ".join(run("bench", "--help").out.split())
    assert "throughput" in shown
    assert "pagedkv bench serve --request-rate 4" in shown
    assert "Example: pagedkv bench serve --base-url" in run("bench", "serve", "--help").out
    assert "Example: pagedkv bench smollm2" in run("bench", "throughput", "--help").out
