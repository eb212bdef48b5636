"""What a server tells beside answers: its version and models, what usage has, what a record keeps;
and that every extension that is known is taken.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from serving import Served, serving

from pagedkv import __version__
from pagedkv.replay import Recorder, load
from pagedkv.replay.recording import Arrival

MESSAGES = [{"role": "user", "content": "Hello"}]
# The request extensions that users of vLLM know, with a value that is not the default.
EXTENSIONS: dict[str, Any] = {
    "top_k": 5,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "ignore_eos": True,
    "min_tokens": 2,
    "stop_token_ids": [97],
    "prompt_logprobs": 1,
    "cache_salt": "salt",
}
BEAMS = {"use_beam_search": True, "length_penalty": 0.5, "n": 2, "temperature": 0}


@pytest.mark.parametrize("fields", [EXTENSIONS, BEAMS], ids=["extensions", "beams"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_every_extension_is_taken(served: Served, path: str, fields: dict[str, Any]) -> None:
    asked: dict[str, Any] = (
        {"prompt": "Hello"} if path == "/v1/completions" else {"messages": MESSAGES}
    )
    body = served.ok(path, **asked, max_tokens=4, **fields)
    assert len(body["choices"]) == fields.get("n", 1)
    assert body["usage"]["completion_tokens"] > 0
    alone = {
        name: served.post(path, **asked, max_tokens=4, **{name: value}).status_code
        for name, value in EXTENSIONS.items()
    }
    assert set(alone.values()) == {200}, alone


def test_a_priority_is_taken_where_priorities_count(tokenizer_folder: Path) -> None:
    with serving(tokenizer_folder, scheduling_policy="priority") as served:
        assert served.complete("Hello", max_tokens=2, priority=-3)["choices"]
        body = served.ok("/v1/chat/completions", messages=MESSAGES, max_tokens=2, priority=7)
        assert body["choices"]


def test_usage_tells_preemptions_of_all_its_sequences(tokenizer_folder: Path) -> None:
    with serving(tokenizer_folder, num_gpu_blocks_override=7, block_size=4) as served:
        both = ["a" * 10, "b" * 10]
        body = served.complete(both, max_tokens=8, ignore_eos=True)
        assert body["usage"]["num_preemptions"] == 1
        assert body["usage"]["completion_tokens"] == 16
        events = served.events(
            "/v1/completions",
            prompt=["c" * 10, "d" * 10],
            max_tokens=8,
            temperature=0,
            ignore_eos=True,
            stream_options={"include_usage": True},
        )
        assert events[-1]["usage"]["num_preemptions"] == 1
        assert served.complete("e" * 10, max_tokens=8)["usage"]["num_preemptions"] == 0


def test_user_stands_in_a_recorded_run(tokenizer_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with serving(tokenizer_folder) as served, contextlib.closing(Recorder(path)) as recorder:
        served.engine.observe(recorder)
        served.complete("Hello", max_tokens=1, user="alice")
        served.ok("/v1/chat/completions", messages=MESSAGES, max_tokens=1, user="bob")
        served.complete("Hello", max_tokens=1)
        served.wait_idle()
    events = load(path).events
    users = [one.request.user for one in events if isinstance(one, Arrival)]
    assert users == ["alice", "bob", None]


def test_version_and_models_are_told(served: Served) -> None:
    assert served.client.get("/version").json() == {"version": __version__}
    (card,) = served.client.get("/v1/models").json()["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == ("fake", "model", 256)
    assert served.client.get("/v1/models/fake").json() == card
    assert served.client.get("/v1/models/other").status_code == 404


def test_a_reset_forgets_every_prefix_and_tells_how_many_blocks(served: Served) -> None:
    prompt, details = "x" * 40, "prompt_tokens_details"
    served.complete(prompt, max_tokens=1)
    assert served.complete(prompt, max_tokens=1)["usage"][details]["cached_tokens"] == 32
    assert served.ok("/reset_prefix_cache") == {"num_blocks": 2}
    assert served.complete(prompt, max_tokens=1)["usage"][details]["cached_tokens"] == 0


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_stream_that_is_null_is_none(served: Served, path: str) -> None:
    asked: dict[str, Any] = (
        {"prompt": "Hello"} if path == "/v1/completions" else {"messages": MESSAGES}
    )
    assert served.ok(path, **asked, max_tokens=2, stream=None)["choices"]
