"""POST /v1/chat/completions, by the official client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest
from fake_model import hash_of, logits_of
from serving import WAIT_S, Served, ending, whole_text

MESSAGES: list[Any] = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Hello"},
]
LETTERS = list(range(97, 123))
PROMPT = "system: Be short.\x00user: Hello\x00assistant: "


def by_hand(num_tokens: int) -> str:
    """The fake model's answer to MESSAGES; its template ends a message with token 256."""
    ids: list[int] = []
    for part in PROMPT.split("\x00"):
        ids += [*part.encode(), 256]
    return text_after(ids[:-1], num_tokens)


def text_after(ids: list[int], num_tokens: int) -> str:
    """Its likeliest letters."""
    for _ in range(num_tokens):
        logits = logits_of(hash_of(np.array(ids)), ascii_only=True)
        ids.append(97 + int(logits[97:123].argmax()))
    return bytes(ids[-num_tokens:]).decode()


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{served.url}/v1", api_key="none", timeout=WAIT_S, max_retries=0
    ) as one:
        yield one


def test_the_answer_is_the_models_to_the_template(client: openai.OpenAI) -> None:
    done = client.chat.completions.create(
        model="fake",
        messages=MESSAGES,
        temperature=0,
        max_completion_tokens=8,
        extra_body={"allowed_token_ids": LETTERS},
    )
    (choice,) = done.choices
    assert done.id.startswith("chatcmpl-")
    assert choice.message.role == "assistant"
    assert choice.message.content == by_hand(8)
    assert choice.finish_reason == "length"
    assert done.usage is not None
    assert done.usage.prompt_tokens == len(PROMPT)
    assert done.usage.completion_tokens == 8
    assert done.usage.prompt_tokens_details is not None
    assert done.usage.prompt_tokens_details.cached_tokens == 0


def test_a_stream_of_the_client_is_the_same_answer(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {
        "model": "fake",
        "messages": MESSAGES,
        "temperature": 1,
        "seed": 4,
        "n": 2,
        "max_tokens": 12,
    }
    whole = client.chat.completions.create(**fields)
    texts, reasons, usages = ["", ""], ["", ""], []
    for chunk in client.chat.completions.create(
        **fields, stream=True, stream_options={"include_usage": True}
    ):
        if chunk.usage is not None:
            usages.append(chunk.usage)
            assert chunk.choices == []
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] += choice.finish_reason or ""
    assert texts == [one.message.content for one in whole.choices]
    assert reasons == [one.finish_reason for one in whole.choices]
    assert [one.completion_tokens for one in usages] == [whole.usage.completion_tokens]


def test_log_probabilities_with_their_bytes(client: openai.OpenAI) -> None:
    for num_top in (None, 0, 2):
        done = client.chat.completions.create(
            model="fake",
            messages=MESSAGES,
            temperature=0,
            max_tokens=4,
            logprobs=True,
            top_logprobs=num_top,
        )
        told = done.choices[0].logprobs
        assert told is not None
        assert told.content is not None
        for place in told.content:
            assert len(place.top_logprobs) == (num_top or 0)
            assert place.bytes == list(place.token.encode())
            if num_top:  # greedy: the token is the likeliest
                assert place.top_logprobs[0].token == place.token
                assert place.top_logprobs[0].logprob == place.logprob


def test_without_max_tokens_an_answer_goes_on_to_the_end_of_the_context(served: Served) -> None:
    body = served.ok("/v1/chat/completions", messages=MESSAGES, ignore_eos=True, temperature=0)
    assert body["usage"]["total_tokens"] == 256
    assert body["choices"][0]["finish_reason"] == "length"


def test_more_tokens_than_the_context_holds_are_a_maximum_not_an_error(served: Served) -> None:
    body = served.ok(
        "/v1/chat/completions",
        messages=MESSAGES,
        ignore_eos=True,
        temperature=0,
        max_completion_tokens=100_000,
    )
    assert body["usage"]["total_tokens"] == 256


def test_parts_of_text_are_lines(served: Served) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    for given in (parts, "a\nb"):
        body = served.ok(
            "/tokenize", messages=[{"role": "user", "content": given, "name": "someone"}]
        )
        assert bytes(body["tokens"][:9]).decode() == "user: a\nb"


def test_special_tokens_that_a_message_spells_out_are_text(served: Served) -> None:
    body = served.ok("/tokenize", messages=[{"role": "user", "content": "<|im_end|>"}])
    assert body["tokens"].count(256) == 1
    text = "user: <|im_end|>"
    assert bytes(body["tokens"][: len(text)]).decode() == text


@pytest.mark.parametrize("include", [True, False])
def test_stop_strings_are_kept_only_if_asked_for(served: Served, include: bool) -> None:
    fields = {"messages": MESSAGES, "temperature": 0, "max_tokens": 20}
    fields["allowed_token_ids"] = LETTERS
    text = by_hand(20)
    stop, cut = text[4:6], text.index(text[4:6])
    fields |= {"stop": stop, "include_stop_str_in_output": include}
    right = text[: cut + 2] if include else text[:cut]
    body = served.ok("/v1/chat/completions", **fields)
    assert body["choices"][0]["message"]["content"] == right
    events = served.events("/v1/chat/completions", **fields)
    assert whole_text(events, 0) == right
    assert ending(events, 0) == ("stop", stop)


def test_a_stream_of_log_probabilities_has_each_token_once(served: Served) -> None:
    fields: dict[str, Any] = {
        "messages": MESSAGES,
        "temperature": 0,
        "max_tokens": 6,
        "logprobs": True,
        "top_logprobs": 1,
    }
    whole = served.ok("/v1/chat/completions", **fields)["choices"][0]["logprobs"]["content"]
    events = served.events("/v1/chat/completions", **fields)
    told = [
        place
        for event in events
        for choice in event["choices"]
        if choice["logprobs"]
        for place in choice["logprobs"]["content"]
    ]
    assert told == whole


def test_prompt_logprobs_stand_beside_the_choices(served: Served) -> None:
    body = served.ok("/v1/chat/completions", messages=MESSAGES, max_tokens=1, prompt_logprobs=0)
    assert len(body["prompt_logprobs"]) == body["usage"]["prompt_tokens"]
    assert body["prompt_logprobs"][0] is None
