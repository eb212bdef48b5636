"""What a server refuses: with status 400 and the field's name, never 500, and it goes on."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from serving import Served

COMPLETE: dict[str, Any] = {"prompt": "Hello", "max_tokens": 2}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}


def refused(response: httpx.Response, param: str | None, status: int = 400) -> str:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["param"] == param, error
    assert "/python/" not in response.text
    assert "Traceback" not in response.text
    message: str = error["message"]
    return message


NAN, INF = float("nan"), float("inf")
BAD_FIELDS: dict[str, list[Any]] = {
    "max_tokens": [-1, 1.5, "5", True, 2**63, [], INF],
    "n": [0, -1, 10**9, "2", 1.0, True, 2**70],
    "best_of": [0, 10**9, "2"],
    "temperature": [-1, NAN, INF, -INF, "1", True, [1]],
    "top_p": [0, 1.1, NAN, -0.1, "x"],
    "top_k": [-2, 1.5, "3"],
    "min_p": [-0.1, 1.1, NAN],
    "presence_penalty": [3, NAN, "x"],
    "frequency_penalty": [-3, INF],
    "repetition_penalty": [0, -1, NAN],
    "seed": [-1, 2**64, "1", 1.5],
    "stop": ["", [""], 5, ["a"] * 65, [None], "x" * 2000],
    "stop_token_ids": [[258], [-1], ["a"], 3, [1.5], list(range(300))],
    "logit_bias": [
        {"258": 1},
        {"-1": 1},
        {"1000000000": 1},
        {"abc": 1},
        {"1": NAN},
        {"1": 101},
        {"\u0661": 1},
        {"1": 1, "01": 2},
        [],
        "x",
    ],
    "allowed_token_ids": [[], [258], [-1]],
    "bad_words": [[""], "x" * 2000],
    "min_tokens": [-1, 3, "1"],
    "stream": ["true", 1],
    "stream_options": [{"include_usage": True}, {"x": 1}, 5],
    "user": [5, "x" * 300],
    "response_format": [{"type": "json_object"}, {"type": "json_schema"}, "text"],
    "cache_salt": ["", "x" * 300, 5],
    "priority": [1, "x", 2**40],
    "use_beam_search": ["yes", True],
    "length_penalty": [1.0, NAN],
    "ignore_eos": [1, "x"],
    "prompt_logprobs": [-1, 21, True],
    "model": [5],
    "tools": [[]],
    "\x1b[31m": [1],
}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("field", BAD_FIELDS)
def test_a_wrong_value_is_refused_by_its_fields_name(served: Served, path: str, field: str) -> None:
    good = COMPLETE if path == "/v1/completions" else CHAT
    for value in BAD_FIELDS[field]:
        data = json.dumps({**good, field: value})
        response = served.client.post(
            path, content=data, headers={"content-type": "application/json"}
        )
        assert response.status_code == 400, (value, response.text)
        error = response.json()["error"]
        name = "\\x1b[31m" if field == "\x1b[31m" else field
        assert name in error["message"], (value, error)
        assert "\x1b" not in response.text
    served.ok(path, **good)


COMPLETION_FIELDS: dict[str, list[Any]] = {
    "prompt": [
        "",
        [""],
        [],
        [[]],
        [258, 10**6],
        [-1],
        [1.5],
        [True],
        None,
        5,
        {},
        ["a", 1],
        ["a", [1]],
    ],
    "logprobs": [-1, 21, True, "1"],
    "echo": [1, "x"],
    "suffix": ["x"],
    "max_tokens": [0],
}


@pytest.mark.parametrize("field", COMPLETION_FIELDS)
def test_a_wrong_value_of_a_completion_is_refused(served: Served, field: str) -> None:
    for value in COMPLETION_FIELDS[field]:
        response = served.post("/v1/completions", **{**COMPLETE, field: value})
        assert response.status_code == 400, (value, response.text)
        assert field in response.json()["error"]["message"], value
    served.ok("/v1/completions", **COMPLETE)


CHAT_FIELDS: dict[str, list[Any]] = {
    "messages": [
        [],
        "x",
        None,
        [{}],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": []}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "", "content": "x"}],
        [{"role": "user", "content": "x", "tool_calls": []}],
    ],
    "top_logprobs": [2, -1, 21],
    "logprobs": [5, "x"],
    "max_completion_tokens": [0, -1, 3],
    "chat_template": ["{{ 1 }}"],
    "chat_template_kwargs": [{"x": 1}],
    "max_tokens": [0],
}


@pytest.mark.parametrize("field", CHAT_FIELDS)
def test_a_wrong_value_of_a_chat_is_refused(served: Served, field: str) -> None:
    for value in CHAT_FIELDS[field]:
        response = served.post("/v1/chat/completions", **{**CHAT, field: value})
        assert response.status_code == 400, (value, response.text)
        assert field in response.json()["error"]["message"], value
    served.ok("/v1/chat/completions", **CHAT)


PART: dict[str, Any] = {"type": "image_url", "image_url": {"url": "x"}}
FORMS = "a text, a list of token ids, or a list of either"
TOLD: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -1}, "temperature: Input should be greater than or equal to 0, got -1"),
    ({"n": "2"}, 'n: Input should be a valid integer, got "2"'),
    ({"echo": 1}, "echo: Input should be a valid boolean, got 1"),
    ({"stop": [""]}, 'stop.list.0: String should have at least 1 character, got ""'),
    ({"stop": 5}, "stop: Input should be a text or a list of texts, got 5"),
    ({"prompt": {}}, f"prompt: Input should be {FORMS}, got an object of 0"),
    ({"prompt": [None]}, "prompt.token_ids.0: Input should be a valid integer, got null"),
    (
        {"user": "x" * 300},
        f'user: String should have at most 256 characters, got "{"x" * 60}..."',
    ),
    (
        {"response_format": {"type": "json_object"}},
        "response_format.type: Input should be 'text', got \"json_object\"",
    ),
    ({"stream_options": {}}, "stream_options is only for stream: true"),
    (
        {"priority": 3},
        "priority is 3, but scheduling_policy is 'fcfs': make it 'priority', or leave the "
        "priority 0",
    ),
    (
        {"temperature": 0.5, "use_beam_search": True, "n": 2},
        "temperature must be 0 in a beam search, got 0.5",
    ),
]


@pytest.mark.parametrize(("fields", "message"), TOLD)
def test_the_value_that_is_wrong_is_told_with_what_is_allowed(
    served: Served, fields: dict[str, Any], message: str
) -> None:
    response = served.post("/v1/completions", **{**COMPLETE, **fields})
    assert refused(response, next(iter(fields))) == message


@pytest.mark.parametrize(
    ("content", "path", "why"),
    [
        (None, "", "Input should be a text or a list of parts of type text, got null"),
        ([], ".list", "List should have at least 1 item after validation, not 0, got a list of 0"),
        ([PART], ".list.0.type", "Input should be 'text', got \"image_url\""),
    ],
)
def test_a_content_that_is_no_text_is_told_as_what_it_is(
    served: Served, content: Any, path: str, why: str
) -> None:
    message = {"role": "user", "content": content}
    response = served.post("/v1/chat/completions", messages=[message])
    assert refused(response, "messages") == f"messages.0.content{path}: {why}"


def test_null_is_a_default(served: Served) -> None:
    nothing = dict.fromkeys(
        ["n", "best_of", "temperature", "stop", "seed", "logit_bias", "user", "stream_options"]
    )
    assert served.ok("/v1/completions", prompt="Hello", max_tokens=None, **nothing)
    assert served.ok(
        "/v1/chat/completions", **{**CHAT, "max_completion_tokens": None, "logprobs": None}
    )


BAD_BODIES: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "application/json"),
    "no JSON": (b"{", "application/json"),
    "no object": (b"[]", "application/json"),
    "null": (b"null", "application/json"),
    "another type": (json.dumps(COMPLETE).encode(), "text/plain"),
    "a form": (b"prompt=x", "application/x-www-form-urlencoded"),
    "no text": (b'{"prompt": "\xff"}', "application/json"),
    "an overlong byte": (b'{"prompt": "\xc0\xaf"}', "application/json"),
    "a lone surrogate": (b'{"prompt": "\\ud800"}', "application/json"),
    "a lone surrogate in a name": (b'{"prompt": "x", "\\ud800": 1}', "application/json"),
    "too deep": (b'{"prompt": ' + b"[" * 100_000, "application/json"),
    "too many digits": (b'{"prompt": "x", "seed": ' + b"1" * 5000 + b"}", "application/json"),
    "a huge number": (b'{"prompt": "x", "temperature": 1e999}', "application/json"),
}


@pytest.mark.parametrize("name", BAD_BODIES)
def test_a_body_that_is_no_request_is_refused(served: Served, name: str) -> None:
    data, kind = BAD_BODIES[name]
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        response = served.client.post(path, content=data, headers={"content-type": kind})
        assert response.status_code == 400, response.text
        assert response.json()["error"]["message"]
    served.ok("/v1/completions", **COMPLETE)


def test_a_body_of_no_stated_type_is_refused(served: Served) -> None:
    response = served.client.post("/v1/completions", content=b'{"prompt": "x"}')
    assert "application/json" in refused(response, None)


def test_a_nul_character_is_text(served: Served) -> None:
    assert served.ok("/tokenize", prompt="a\0b")["tokens"] == [97, 0, 98]
    served.ok("/v1/completions", **{**COMPLETE, "prompt": "a\0b"})


def test_unknown_paths_and_methods_have_bodies_too(served: Served) -> None:
    message = refused(served.client.get("/nowhere"), None, 404)
    assert message == "this server has no GET /nowhere"
    response = served.client.get("/v1/completions")
    assert refused(response, None, 405) == "this server has no GET /v1/completions"
    assert response.headers["allow"] == "POST"
    assert refused(served.client.get("/v1/models/nobody"), "model", 404)


def test_a_prompt_beyond_the_context_is_told_all_three_numbers(served: Served) -> None:
    for fields in ({}, {"max_tokens": 5}):
        message = refused(served.post("/v1/completions", prompt="x" * 266, **fields), "prompt")
        assert "256" in message
        assert "266" in message


def test_a_prompt_as_long_as_the_context_and_one_token_less(served: Served) -> None:
    refused(served.post("/v1/completions", prompt=[97] * 256), "prompt")
    body = served.complete([97] * 255, max_tokens=5, ignore_eos=True)
    assert body["usage"]["completion_tokens"] == 1
    assert body["choices"][0]["finish_reason"] == "length"


def test_a_huge_number_of_answers_is_refused_before_anything_is_made_of_it(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served.service.tokenising, "encode", None)  # would fail if it were called
    refused(served.post("/v1/completions", prompt="x", n=10**9), "n")
    refused(served.post("/v1/completions", prompt=["x"] * 129), "prompt")


def test_answers_and_tokens_of_a_request_are_bounded_together(served: Served) -> None:
    message = refused(served.post("/v1/completions", prompt=["x"] * 64, n=3, max_tokens=1), "n")
    assert "192" in message
    message = refused(
        served.post("/v1/completions", prompt="x", n=128, max_tokens=200), "max_tokens"
    )
    assert str(64 * 256) in message


def test_what_cannot_stream_is_told(served: Served) -> None:
    beams = {"use_beam_search": True, "n": 2, "temperature": 0}
    for param, fields in (("best_of", {"best_of": 3}), (None, beams)):
        message = refused(served.post("/v1/completions", prompt="x", stream=True, **fields), param)
        assert "cannot stream" in message
    response = served.post("/v1/completions", prompt="x", stream=True, echo=True, logprobs=1)
    refused(response, "stream")


def test_a_failing_row_is_an_error_of_its_request_alone(served: Served) -> None:
    served.fake.is_bad = lambda context: context[0] == ord("X")
    try:
        response = served.post("/v1/completions", prompt="X", max_tokens=4)
        assert response.status_code == 500
        assert response.json()["error"]["type"] == "server_error"
        events = served.events("/v1/completions", prompt="X", max_tokens=4)
        assert events[-1]["error"]["type"] == "server_error"
        served.ok("/v1/completions", **COMPLETE)
    finally:
        served.fake.is_bad = lambda context: False


def test_an_error_of_the_servers_own_tells_nothing_of_it(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise LookupError("/secret/path")

    monkeypatch.setattr("pagedkv.server.submitting.check_size", broken)
    response = served.post("/v1/completions", prompt="x")
    assert response.status_code == 500
    assert "secret" not in response.text
    # It closes, and the client knows: its next request comes by another.
    assert response.headers["connection"] == "close"
    monkeypatch.undo()
    served.ok("/v1/completions", **COMPLETE)


def test_messages_of_errors_are_short_and_without_control_characters(served: Served) -> None:
    response = served.post("/v1/completions", **{**COMPLETE, "model": "\x1b[31m\n" * 80})
    message = refused(response, "model", 404)
    assert message.isprintable()
    assert len(message) <= 500


def test_tokens_and_text_there_and_back(served: Served) -> None:
    for text in ("Hello", "", "\u65e5\u672c", "<|im_end|>"):
        body = served.ok("/tokenize", prompt=text)
        assert body["count"] == len(body["tokens"])
        assert body["max_model_len"] == 256
        assert served.ok("/detokenize", tokens=body["tokens"])["prompt"] == text
    assert served.ok("/detokenize", tokens=[10**6])["prompt"] == ""
    refused(served.post("/tokenize"), None)
    refused(served.post("/tokenize", prompt="x" * 2570), "prompt")
    refused(served.post("/detokenize", tokens=[-1]), "tokens")
