"""POST /v1/fork: running and kept responses go on from their cached blocks, within bounds."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import greedy_by_hand
from serving import WAIT_S, Served, ending, serving, whole_text
from test_disconnects import Gate

from pagedkv.server import Access, Limits

LETTERS = list(range(97, 123))
GREEDY = {"temperature": 0, "allowed_token_ids": LETTERS}
USER = {"role": "user", "content": "Hello, who are you and what can you do for me?"}


def drop_kept(served: Served) -> None:
    for name in list(served.service.conversations._kept):
        served.service.conversations._engine._loop.call_soon_threadsafe(  # type: ignore[union-attr]
            served.service.conversations.forget, name
        )
    served.wait(lambda: served.engine.statistics().num_referenced == 0)


@pytest.fixture(scope="module")
def module_keeper(tokenizer_folder: Path) -> Iterator[Served]:
    limits = Limits(max_kept=2, max_keep_s=100, max_answers=4)
    with serving(tokenizer_folder, app_options={"limits": limits}) as served:
        yield served
        drop_kept(served)


@pytest.fixture
def keeper(module_keeper: Served) -> Iterator[Served]:
    yield module_keeper
    drop_kept(module_keeper)


def num_held(served: Served) -> int:
    return served.engine.statistics().num_referenced


def test_a_kept_completion_goes_on_where_it_ended(keeper: Served) -> None:
    prompt = "x" * 40
    first = keeper.complete(prompt, max_tokens=20, keep_seconds=60, **GREEDY)
    text = first["choices"][0]["text"]
    assert num_held(keeper) == 4
    whole = keeper.complete(prompt + text + " and ", max_tokens=10, **GREEDY)
    went_on = keeper.ok("/v1/fork", id=first["id"], prompt=" and ", max_tokens=10, **GREEDY)
    assert went_on["object"] == "text_completion"
    assert went_on["id"] != first["id"]
    assert went_on["choices"][0]["text"] == whole["choices"][0]["text"]
    assert went_on["usage"]["prompt_tokens"] == 65
    assert went_on["usage"]["prompt_tokens_details"]["cached_tokens"] >= 48


def test_pinned_blocks_are_found_after_others_have_filled_the_pool(
    tokenizer_folder: Path,
) -> None:
    options = {"num_gpu_blocks_override": 24, "block_size": 4, "watermark": 0.0}
    with serving(tokenizer_folder, **options) as served:
        first = served.complete("x" * 16, max_tokens=4, keep_seconds=60, **GREEDY)
        lost = served.complete("y" * 16, max_tokens=4, **GREEDY)
        for number in range(10):
            served.complete(f"{number}" * 60, max_tokens=4, **GREEDY)
        kept = served.ok("/v1/fork", id=first["id"], prompt="z", max_tokens=1, **GREEDY)
        assert kept["usage"]["prompt_tokens_details"]["cached_tokens"] == 16
        again = served.complete("y" * 16 + lost["choices"][0]["text"], max_tokens=1, **GREEDY)
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        drop_kept(served)


def test_a_kept_chat_goes_on_turn_by_turn(keeper: Served) -> None:
    fields: dict[str, Any] = {"max_tokens": 12, "keep_seconds": 60, **GREEDY}
    messages = [USER]
    body = keeper.ok("/v1/chat/completions", messages=messages, **fields)
    for turn in ("And then?", "Why?"):
        messages.append(body["choices"][0]["message"])
        messages.append({"role": "user", "content": turn})
        whole = keeper.ok("/v1/chat/completions", messages=messages, max_tokens=12, **GREEDY)
        body = keeper.ok("/v1/fork", id=body["id"], messages=[messages[-1]], **fields)
        assert body["object"] == "chat.completion"
        assert body["id"].startswith("chatcmpl-")
        assert body["choices"][0]["message"] == whole["choices"][0]["message"]
        assert body["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]
        assert body["usage"]["prompt_tokens_details"]["cached_tokens"] >= 48


@pytest.mark.parametrize("stream", [True, False])
def test_each_choice_can_be_gone_on_from_as_soon_as_its_end_is_told(
    keeper: Served, stream: bool
) -> None:
    fields: dict[str, Any] = {
        "prompt": "x" * 20,
        "n": 2,
        "seed": 3,
        "max_tokens": 8,
        "keep_seconds": 60,
        "allowed_token_ids": LETTERS,
    }
    if stream:
        events = keeper.events("/v1/completions", **fields)
        name, texts = events[0]["id"], [whole_text(events, k) for k in (0, 1)]
    else:
        body = keeper.ok("/v1/completions", **fields)
        name, texts = body["id"], [one["text"] for one in body["choices"]]
    assert texts[0] != texts[1]
    for k in (0, 1):
        right = keeper.complete("x" * 20 + texts[k] + "!", max_tokens=5, **GREEDY)
        events = keeper.events(
            "/v1/fork", id=name, choice=k, prompt="!", max_tokens=5, n=2, **GREEDY
        )
        for index in (0, 1):
            assert whole_text(events, index) == right["choices"][0]["text"]
            assert ending(events, index) == ("length", None)


@pytest.mark.parametrize(
    "stop", [{"stop": "s"}, {"stop_token_ids": [ord("s")]}, {"logit_bias": {"256": 100}}]
)
def test_what_only_ended_an_answer_is_not_gone_on_from(
    keeper: Served, stop: dict[str, Any]
) -> None:
    text = bytes(one for one in greedy_by_hand("Hello", 40) if one < 256).decode()
    first = keeper.complete("Hello", max_tokens=40, keep_seconds=60, **{"temperature": 0, **stop})
    shown = first["choices"][0]["text"]
    assert text.startswith(shown)
    assert first["choices"][0]["finish_reason"] == "stop"
    right = keeper.complete("Hello" + shown + "!", max_tokens=6, temperature=0)
    body = keeper.ok("/v1/fork", id=first["id"], prompt="!", max_tokens=6, temperature=0)
    assert body["choices"][0]["text"] == right["choices"][0]["text"]
    assert body["usage"]["prompt_tokens"] == 6 + len(shown)


def test_kept_responses_are_few_and_for_a_while_only(
    keeper: Served, tokenizer_folder: Path
) -> None:
    names = [
        keeper.complete(f"{k}" * 40, max_tokens=1, keep_seconds=60, **GREEDY)["id"]
        for k in range(3)
    ]
    keeper.wait(lambda: num_held(keeper) == 6)
    statuses = [
        keeper.post("/v1/fork", id=name, prompt="x", max_tokens=1).status_code for name in names
    ]
    assert statuses == [404, 200, 200]
    with serving(tokenizer_folder) as served:
        name = served.complete("x" * 40, max_tokens=1, keep_seconds=0.05, **GREEDY)["id"]
        served.wait(lambda: num_held(served) == 0)
        response = served.post("/v1/fork", id=name, prompt="x")
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "response_not_found"


class Running:
    """A stream that is read on its own thread, held behind its first steps."""

    def __init__(self, served: Served, path: str, num_steps: int, **fields: Any) -> None:
        self.gate = Gate(served)
        self.events: list[dict[str, Any]] = []
        self._thread = threading.Thread(
            target=lambda: self.events.extend(served.events(path, **fields))
        )
        self._thread.start()
        served.wait(lambda: self.gate.num_begun == 1)
        self.gate.let(num_steps)
        (self.name,) = served.service.conversations._running
        self._served = served

    def end(self) -> list[dict[str, Any]]:
        self.gate.open()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        self._served.fake.before_step = lambda input_ids: None
        return self.events


def later(served: Served, **fields: Any) -> tuple[threading.Thread, list[Any]]:
    """A fork that waits for the engine's thread."""
    found: list[Any] = []
    path = "/v1/fork"

    def ask() -> None:
        if fields.get("stream"):
            found.append(served.events(path, **fields))
        else:
            found.append(served.post(path, **fields))

    thread = threading.Thread(target=ask)
    thread.start()
    served.wait(lambda: not served.service.engine._commands.empty() or not thread.is_alive())
    return thread, found


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_running_response_goes_on_twice_from_where_it_is(
    keeper: Served, path: str, stream: bool
) -> None:
    given: dict[str, Any] = {"prompt": "Hello"}
    if path != "/v1/completions":
        given = {"messages": [{"role": "user", "content": "Hello"}]}
    running = Running(keeper, path, 4, max_tokens=20, **given, **GREEDY)
    thread, found = later(keeper, id=running.name, n=2, max_tokens=10, stream=stream)
    events = running.end()
    thread.join(WAIT_S)
    parent = whole_text(events, 0)
    assert len(parent) == 20
    if stream:
        (told,) = found
        texts = [whole_text(told, k) for k in (0, 1)]
        assert [ending(told, k) for k in (0, 1)] == [("length", None)] * 2
    else:
        assert found[0].status_code == 200, found[0].text
        body = found[0].json()
        texts = [
            one["text"] if "text" in one else one["message"]["content"] for one in body["choices"]
        ]
        assert body["usage"]["completion_tokens"] == 20
    # What they add, from where the parent was: greedy, so the same that it has added.
    assert [len(text) for text in texts] == [10, 10]
    assert texts[0] == texts[1]
    at = parent.index(texts[0])
    assert 4 <= at <= 6


def test_a_fork_of_what_runs_has_options_of_its_own(keeper: Served) -> None:
    running = Running(keeper, "/v1/completions", 3, prompt="Hello", max_tokens=12, **GREEDY)
    only_x = {"allowed_token_ids": [ord("x")], "max_tokens": 5}
    thread, found = later(keeper, id=running.name, **only_x)
    running.end()
    thread.join(WAIT_S)
    assert found[0].json()["choices"][0]["text"] == "xxxxx"


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "another prompt": ({"prompt": "x"}, "prompt"),
    "messages": ({"messages": [USER]}, "messages"),
    "keeping": ({"keep_seconds": 5}, "keep_seconds"),
    "no such choice": ({"choice": 1}, "choice"),
    "too many": ({"n": 5}, "n"),
    "best of": ({"best_of": 2}, "best_of"),
    "other ends": ({"stop_token_ids": [5]}, "stop_token_ids"),
}


def test_what_cannot_be_forked_from_what_runs_is_told(keeper: Served) -> None:
    running = Running(keeper, "/v1/completions", 2, prompt="Hello", max_tokens=12, **GREEDY)
    asked = {name: later(keeper, id=running.name, **fields) for name, (fields, _) in BAD.items()}
    running.end()
    for name, (thread, found) in asked.items():
        thread.join(WAIT_S)
        assert found[0].status_code == 400, name
        assert BAD[name][1] in found[0].json()["error"]["message"], name
    assert keeper.service.conversations._running == {}


def test_what_cannot_be_gone_on_from_is_told(keeper: Served) -> None:
    text = keeper.complete("Hello", max_tokens=2, keep_seconds=60)["id"]
    chat = keeper.ok("/v1/chat/completions", messages=[USER], max_tokens=2, keep_seconds=60)["id"]
    for fields, param in (
        ({"id": text, "messages": [USER]}, "messages"),
        ({"id": chat, "prompt": "x"}, "prompt"),
        ({"id": chat}, "messages"),
        ({"id": text, "choice": 1}, "choice"),
        ({"id": text, "keep_seconds": 1000}, "keep_seconds"),
        ({"id": text, "prompt": "x" * 300}, "prompt"),
        ({"id": text, "tools": 1}, "tools"),
    ):
        response = keeper.post("/v1/fork", **fields)
        assert response.status_code == 400, fields
        assert response.json()["error"]["param"] == param, fields
    for fields in (
        {"prompt": "x", "keep_seconds": 101},
        {"prompt": ["x", "y"], "keep_seconds": 5},
        {"prompt": "x", "keep_seconds": 5, "best_of": 2},
        {"prompt": "x", "keep_seconds": 0},
    ):
        response = keeper.post("/v1/completions", **fields)
        assert response.status_code == 400, fields
        assert "keep_seconds" in response.json()["error"]["message"]


def test_a_response_is_its_tenants_alone(tokenizer_folder: Path) -> None:
    with serving(tokenizer_folder, app_options={"access": Access(("one", "two"))}) as served:
        headers = {"authorization": "Bearer one"}
        fields = {"prompt": "x" * 40, "max_tokens": 1, "keep_seconds": 60}
        name = served.client.post("/v1/completions", json=fields, headers=headers).json()["id"]
        body = {"id": name, "prompt": "y", "max_tokens": 1}
        for key, status in (("two", 404), ("one", 200)):
            headers = {"authorization": f"Bearer {key}"}
            response = served.client.post("/v1/fork", json=body, headers=headers)
            assert response.status_code == status
        assert response.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 32
        drop_kept(served)
