"""Bodies made to cost much: whatever fills 4 MiB, one thing that is wrong with it is told, and
nothing looks for a second. Errors are counted, not seconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pydantic
import pytest
from serving import Served, serving

from pagedkv.server import Access, protocol
from pagedkv.server.protocol import Body, ChatBody, CompletionBody, DetokenizeBody

MANY = 50_000
# A model's fields can each be wrong once; in 4 MiB of nulls there are 800,000 more.
MOST_ERRORS = 16
KIND = {"content-type": "application/json"}

BODIES: dict[str, tuple[type[Body], dict[str, Any]]] = {
    "nulls": (CompletionBody, {"prompt": [None] * MANY}),
    "numbers, then texts": (CompletionBody, {"prompt": [1] * MANY + ["x"] * MANY}),
    "texts, then nulls": (CompletionBody, {"prompt": ["x", *[None] * 100]}),
    "too many texts": (CompletionBody, {"prompt": ["x"] * MANY}),
    "lists of nulls": (CompletionBody, {"prompt": [[None] * 1000] * 50}),
    "empty lists": (CompletionBody, {"prompt": [[]] * (MANY // 2)}),
    "objects": (CompletionBody, {"prompt": [{}] * (MANY // 2)}),
    "huge numbers": (CompletionBody, {"prompt": [10**4000] * 100}),
    "stops": (CompletionBody, {"prompt": "x", "stop": [0] * 64}),
    "stop ids": (CompletionBody, {"prompt": "x", "stop_token_ids": ["x"] * 256}),
    "allowed ids": (CompletionBody, {"prompt": "x", "allowed_token_ids": ["x"] * 4096}),
    "bad words": (CompletionBody, {"prompt": "x", "bad_words": [0] * 256}),
    "messages": (ChatBody, {"messages": [{}] * 4096}),
    "messages that are none": (ChatBody, {"messages": [0] * 4096}),
    "parts": (ChatBody, {"messages": [{"role": "user", "content": [{}] * 1024}] * 20}),
    "tokens": (DetokenizeBody, {"tokens": ["x"] * MANY}),
}
PATHS = {
    CompletionBody: "/v1/completions",
    ChatBody: "/v1/chat/completions",
    DetokenizeBody: "/detokenize",
}


@pytest.mark.parametrize("name", BODIES)
def test_of_a_body_full_of_errors_few_are_listed(served: Served, name: str) -> None:
    kind, fields = BODIES[name]
    with pytest.raises(pydantic.ValidationError) as caught:
        kind.model_validate(fields)
    assert caught.value.error_count() <= MOST_ERRORS
    response = served.post(PATHS[kind], **fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == next(
        field for field in reversed(fields) if field in kind.model_fields
    )


def test_every_list_of_a_body_is_left_at_its_first_error() -> None:
    def lists(schema: Any) -> Iterator[dict[str, Any]]:
        if isinstance(schema, dict):
            if schema.get("type") == "list":
                yield schema
            for one in schema.values():
                yield from lists(one)
        elif isinstance(schema, list | tuple):
            for one in schema:
                yield from lists(one)

    bodies = [
        one for one in vars(protocol).values() if isinstance(one, type) and issubclass(one, Body)
    ]
    found = [schema for one in bodies for schema in lists(one.__pydantic_core_schema__)]
    assert len(found) > 20
    assert all(schema.get("fail_fast") for schema in found)
    assert all("max_length" in schema for schema in found)


@pytest.mark.parametrize("where", ["the body", "logit_bias"])
def test_an_object_of_too_many_members_is_not_looked_at(served: Served, where: str) -> None:
    def body(num_members: int) -> bytes:
        many: dict[str, Any] = {f"k{i}": 1 for i in range(num_members)}
        fields = {**many, "prompt": "x"} if where == "the body" else {"prompt": "x", where: many}
        return json.dumps(fields).encode()

    response = served.client.post("/v1/completions", content=body(2000), headers=KIND)
    assert response.status_code == 400
    assert "k0" in response.text or "1024 items" in response.text
    response = served.client.post("/v1/completions", content=body(2049), headers=KIND)
    assert response.status_code == 400
    assert "members; at most 2048 are read" in response.json()["error"]["message"]


@pytest.mark.parametrize("one", ["[]", "{}", '{"a": [1]}'])
def test_lists_and_objects_of_a_body_are_bounded(served: Served, one: str) -> None:
    for num, words in ((30_000, "prompt"), (33_000, "more than 32768 lists and objects")):
        num //= 1 + (len(one) > 2)
        body = f'{{"prompt": [{",".join([one] * num)}]}}'
        response = served.client.post("/v1/completions", content=body, headers=KIND)
        assert response.status_code == 400
        assert words in response.json()["error"]["message"]


def test_brackets_of_a_text_are_no_lists(served: Served) -> None:
    for text in ("[" * 100_000, '\\"[{' * 50_000, '"' + "[" * 100_000):
        response = served.post("/v1/completions", prompt=text)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "prompt"
        assert "max_model_len" in response.json()["error"]["message"]


def test_a_text_without_an_end_is_no_json(served: Served) -> None:
    for body in ('{"prompt": "' + "[" * 100_000, '{"prompt": "' + "\\[" * 100_000):
        response = served.client.post("/v1/completions", content=body, headers=KIND)
        assert response.status_code == 400
        assert "not valid JSON" in response.json()["error"]["message"]


def test_only_what_is_shown_of_a_long_name_is_looked_at(served: Served) -> None:
    response = served.post("/v1/completions", prompt="x", **{"\x07" * 100_000: 1})
    assert response.status_code == 400
    assert len(response.json()["error"]["message"]) <= 500
    assert len(response.json()["error"]["param"]) <= 500


TEXT_FIELDS = {
    "/v1/completions": (
        {"prompt": "x"},
        ["prompt", "model", "stop", "user", "cache_salt", "bad_words", "logit_bias"],
    ),
    "/v1/chat/completions": (
        {"messages": [{"role": "user", "content": "x"}]},
        ["model", "stop", "user", "cache_salt", "bad_words", "role", "name", "content"],
    ),
    "/v1/fork": ({"id": "x"}, ["user", "stop"]),
    "/tokenize": ({"prompt": "x"}, ["model", "prompt"]),
}


@pytest.fixture(scope="module")
def tenants(tokenizer_folder: Path) -> Iterator[Served]:
    with serving(tokenizer_folder, app_options={"access": Access(("a", "b"))}) as one:
        one.client.headers["authorization"] = "Bearer a"
        yield one


@pytest.mark.parametrize(
    ("path", "field"), [(p, f) for p, (_, all) in TEXT_FIELDS.items() for f in all]
)
def test_half_a_character_is_refused_wherever_it_stands(
    tenants: Served, path: str, field: str
) -> None:
    good = TEXT_FIELDS[path][0]
    for bad in ("\ud800", "a\udfff"):
        value: Any = bad
        if field in ("role", "name", "content"):
            fields = {"messages": [{"role": "user", "content": "x", field: bad}]}
        else:
            value = {"bad_words": [bad], "logit_bias": {bad: 1}}.get(field, bad)
            fields = {**good, field: value}
        response = tenants.client.post(path, content=json.dumps(fields), headers=KIND)
        assert response.status_code == 400, response.text
    if path != "/v1/fork":
        tenants.ok(path, **good)


def test_token_ids_are_written_in_parts_and_read_as_one_list(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagedkv.server.tokens._PART_LEN", 3)
    for length in (0, 1, 3, 4, 7):
        text = "abcdefg"[:length]
        assert served.ok("/tokenize", prompt=text) == {
            "count": length,
            "max_model_len": 256,
            "tokens": [ord(one) for one in text],
        }
