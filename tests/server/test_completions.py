"""POST /v1/completions: what is asked for is what the engine does, whole and in chunks."""

from __future__ import annotations

from typing import Any

import pytest
from harness import answer, greedy_by_hand
from serving import Served, ending, whole_text

from pagedkv.sampling_params import SamplingParams


def text_of(token_ids: list[int]) -> str:
    return bytes(one for one in token_ids if one < 256).decode()


def test_a_greedy_answer_is_the_models(served: Served) -> None:
    body = served.complete("Hello", max_tokens=12, ignore_eos=True)
    (choice,) = body["choices"]
    assert body["object"] == "text_completion"
    assert body["model"] == "fake"
    assert body["id"].startswith("cmpl-")
    assert choice["text"] == text_of(greedy_by_hand("Hello", 12))
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"] is None
    assert body["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 12,
        "total_tokens": 17,
        "prompt_tokens_details": {"cached_tokens": 0},
        "num_preemptions": 0,
    }


def test_sixteen_tokens_where_nothing_is_said(served: Served) -> None:
    body = served.complete("Hello", ignore_eos=True, max_tokens=None)
    assert body["usage"]["completion_tokens"] == 16
    assert served.complete("Hello", ignore_eos=True)["usage"]["completion_tokens"] == 16


def test_a_second_prompt_tells_what_it_found_in_the_cache(served: Served) -> None:
    prompt = "x" * 40
    first, second = (served.complete(prompt, max_tokens=1) for _ in range(2))
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 32


@pytest.mark.parametrize(
    "prompt", [["ab", "cd"], [[97, 98], [99, 100]]], ids=["texts", "token ids"]
)
def test_choices_of_several_prompts_stand_in_their_order(served: Served, prompt: list[Any]) -> None:
    body = served.complete(prompt, max_tokens=6, n=2, temperature=0, ignore_eos=True)
    texts = [text_of(greedy_by_hand(one, 6)) for one in ("ab", "ab", "cd", "cd")]
    assert [one["text"] for one in body["choices"]] == texts
    assert [one["index"] for one in body["choices"]] == [0, 1, 2, 3]
    assert body["usage"]["prompt_tokens"] == 4
    assert body["usage"]["completion_tokens"] == 24


def test_token_ids_are_one_prompt(served: Served) -> None:
    assert (
        served.complete([97, 98], max_tokens=6)["choices"]
        == served.complete("ab", max_tokens=6)["choices"]
    )


def test_a_seed_repeats_its_draws_and_others_differ(served: Served) -> None:
    texts = [
        served.complete("ab", temperature=1.0, seed=seed, max_tokens=20)["choices"][0]["text"]
        for seed in (7, 7, 8)
    ]
    assert texts[0] == texts[1] != texts[2]


SAME_IN_THE_ENGINE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "penalties": (
        {"presence_penalty": 1.5, "frequency_penalty": 1.0, "repetition_penalty": 1.5},
        {"presence_penalty": 1.5, "frequency_penalty": 1.0, "repetition_penalty": 1.5},
    ),
    "bias": ({"logit_bias": {"120": 100}}, {"logit_bias": {120: 100.0}}),
    "filters": (
        {"temperature": 1, "seed": 3, "top_k": 5, "top_p": 0.9, "min_p": 0.1},
        {"temperature": 1, "seed": 3, "top_k": 5, "top_p": 0.9, "min_p": 0.1},
    ),
    "allowed": (
        {"allowed_token_ids": [97, 98, 99], "bad_words": ["ab"]},
        {"allowed_token_ids": [97, 98, 99], "bad_words": ["ab"]},
    ),
    "least": (
        {"min_tokens": 12, "stop_token_ids": list(range(97, 110))},
        {"min_tokens": 12, "stop_token_ids": list(range(97, 110))},
    ),
    "best of": (
        {"temperature": 1, "seed": 3, "n": 2, "best_of": 4},
        {"temperature": 1, "seed": 3, "n": 2, "best_of": 4},
    ),
    "beams": (
        {"use_beam_search": True, "best_of": 3, "n": 2, "length_penalty": 0.5},
        {"beam_width": 3, "n": 2, "length_penalty": 0.5},
    ),
    "beams of n": ({"use_beam_search": True, "n": 2}, {"beam_width": 2, "n": 2}),
}


@pytest.mark.parametrize("name", SAME_IN_THE_ENGINE)
def test_options_do_what_they_do_in_the_engine(
    served: Served, tokenizer_folder: Any, name: str
) -> None:
    fields, options = SAME_IN_THE_ENGINE[name]
    right = answer(
        tokenizer_folder, "Hello", SamplingParams(**{"temperature": 0, "max_tokens": 20, **options})
    )
    choices = served.complete("Hello", max_tokens=20, **fields)["choices"]
    assert [(one["text"], one["finish_reason"], one["stop_reason"]) for one in choices] == [
        (one.text, one.finish_reason, one.stop_reason) for one in right.outputs
    ]


def test_a_beam_search_needs_no_temperature_and_two_beams(served: Served) -> None:
    body = served.ok("/v1/completions", prompt="ab", use_beam_search=True, n=2, max_tokens=4)
    assert len(body["choices"]) == 2
    response = served.post("/v1/completions", prompt="ab", use_beam_search=True, max_tokens=4)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "use_beam_search"


def test_log_probabilities_are_the_engines(served: Served, tokenizer_folder: Any) -> None:
    params = SamplingParams(temperature=0.5, seed=1, max_tokens=8, logprobs=2, ignore_eos=True)
    right = answer(tokenizer_folder, "Hello", params).outputs[0]
    (choice,) = served.complete(
        "Hello", temperature=0.5, seed=1, max_tokens=8, logprobs=2, ignore_eos=True
    )["choices"]
    told = choice["logprobs"]
    assert right.logprobs is not None
    assert told["tokens"] == [chr(one) for one in right.token_ids]
    for token_id, place, logprob, top in zip(
        right.token_ids, right.logprobs, told["token_logprobs"], told["top_logprobs"], strict=True
    ):
        assert logprob == pytest.approx(place[token_id].logprob)
        assert top == pytest.approx({chr(one): had.logprob for one, had in place.items()})
    assert told["text_offset"] == list(range(8))


def test_zero_logprobs_tell_the_token_alone(served: Served) -> None:
    told = served.complete("Hello", max_tokens=3, logprobs=0)["choices"][0]["logprobs"]
    assert [len(one) for one in told["top_logprobs"]] == [1, 1, 1]


def test_echo_puts_the_prompt_and_its_log_probabilities_first(served: Served) -> None:
    letters = list(range(97, 123))
    plain = served.complete("Hello", max_tokens=4, allowed_token_ids=letters)["choices"][0]["text"]
    for prompt in ("Hello", list(b"Hello")):
        body = served.complete(
            prompt, max_tokens=4, echo=True, logprobs=1, allowed_token_ids=letters
        )
        (choice,) = body["choices"]
        assert choice["text"] == "Hello" + plain
        told = choice["logprobs"]
        assert "".join(told["tokens"]) == choice["text"]
        assert told["token_logprobs"][0] is None
        assert told["top_logprobs"][0] is None
        assert all(one <= 0 for one in told["token_logprobs"][1:])
        assert told["text_offset"] == list(range(9))


@pytest.mark.parametrize("stream", [False, True])
def test_no_tokens_with_echo_score_the_prompt_alone(served: Served, stream: bool) -> None:
    fields: dict[str, Any] = {"max_tokens": 0, "echo": True, "temperature": 0}
    if stream:
        events = served.events(
            "/v1/completions",
            prompt="Hello",
            stream_options={"include_usage": True},
            **fields,
        )
        assert whole_text(events, 0) == "Hello"
        assert ending(events, 0) == ("length", None)
        assert events[-1]["usage"]["completion_tokens"] == 0
        return
    body = served.complete("Hello", logprobs=0, **fields)
    assert body["choices"][0]["text"] == "Hello"
    assert body["choices"][0]["finish_reason"] == "length"
    assert len(body["choices"][0]["logprobs"]["tokens"]) == 5
    assert body["usage"]["completion_tokens"] == 0


def test_prompt_logprobs_by_token_id(served: Served) -> None:
    (choice,) = served.complete("Hello", max_tokens=1, prompt_logprobs=2)["choices"]
    first, *others = choice["prompt_logprobs"]
    assert first is None
    for char, place in zip("ello", others, strict=True):
        own = place[str(ord(char))]
        assert own["decoded_token"] == char
        assert own["rank"] >= 1
        assert len(place) in (2, 3)


STREAMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "three answers": {"n": 3, "temperature": 1, "seed": 5},
    "two prompts": {"prompt": ["Hello", "World"], "n": 2, "temperature": 1, "seed": 5},
    "echo": {"echo": True},
    "one token": {"max_tokens": 1},
    "ends at once": {"stop_token_ids": list(range(97, 123))},
    "log-probabilities": {"logprobs": 2},
}


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("include_usage", [True, False])
def test_a_stream_is_the_whole_answer_in_pieces(
    served: Served, name: str, include_usage: bool
) -> None:
    fields: dict[str, Any] = {"prompt": "Hello", "max_tokens": 24, "temperature": 0}
    fields |= STREAMS[name]
    whole = served.ok("/v1/completions", **fields)
    served.ok("/reset_prefix_cache")
    events = served.events(
        "/v1/completions", **fields, stream_options={"include_usage": include_usage}
    )
    usages = [event.get("usage") for event in events]
    if include_usage:
        last = events.pop()
        assert last["choices"] == []
        assert last["usage"] == whole["usage"]
        assert usages[:-1] == [None] * len(events)
    else:
        assert not any(usages)
    for choice in whole["choices"]:
        index = choice["index"]
        assert whole_text(events, index) == choice["text"]
        assert ending(events, index) == (choice["finish_reason"], choice["stop_reason"])
        if choice["logprobs"] is not None:
            parts = [
                one["logprobs"]
                for event in events
                for one in event["choices"]
                if one["index"] == index
            ]
            for key, values in choice["logprobs"].items():
                assert [value for part in parts for value in part[key]] == values
    assert len({event["id"] for event in events}) == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_are_kept_only_if_asked_for_on_every_path(
    served: Served, stream: bool, include: bool
) -> None:
    text = text_of(greedy_by_hand("Hello", 20))
    stop = text[5:8]
    cut = text.index(stop)
    fields = {
        "prompt": "Hello",
        "max_tokens": 20,
        "temperature": 0,
        "stop": [stop],
        "include_stop_str_in_output": include,
    }
    right = text[: cut + 3] if include else text[:cut]
    if stream:
        events = served.events("/v1/completions", **fields)
        assert (whole_text(events, 0), ending(events, 0)) == (right, ("stop", stop))
    else:
        (choice,) = served.ok("/v1/completions", **fields)["choices"]
        assert (choice["text"], choice["stop_reason"]) == (right, stop)


def test_lone_bytes_come_as_replacement_characters_and_the_stream_goes_on(served: Served) -> None:
    fields: dict[str, Any] = {
        "prompt": "Hello",
        "max_tokens": 4,
        "allowed_token_ids": [0x80, 0xBF],
        "temperature": 0,
        "logprobs": 0,
    }
    (choice,) = served.ok("/v1/completions", **fields)["choices"]
    assert choice["text"] == "\ufffd" * 4
    assert all(one in ("bytes:\\x80", "bytes:\\xbf") for one in choice["logprobs"]["tokens"])
    events = served.events("/v1/completions", **fields)
    assert whole_text(events, 0) == "\ufffd" * 4


def test_user_is_a_label_in_the_record_of_the_run(served: Served) -> None:
    with pytest.MonkeyPatch.context() as patch:
        seen: list[str | None] = []
        add = served.engine.add

        def spy(request: Any, **options: Any) -> None:
            seen.append(request.user)
            add(request, **options)

        patch.setattr(served.engine, "add", spy)
        served.complete("Hello", max_tokens=1, user="alice")
    assert seen == ["alice"]
