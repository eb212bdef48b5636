"""Text of the answers: stop strings at every offset, streams that join to the whole, characters
that are never split.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_model import make_engine
from harness import GREEDY, answer, greedy_by_hand, run

from pagedkv.sampling_params import SamplingParams

PROMPT = "tell me"


def whole_text() -> str:
    return bytes(one for one in greedy_by_hand(PROMPT, 24) if one < 256).decode()


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("length", range(1, 13))
def test_a_stop_string_of_every_length_at_every_offset(
    tokenizer_folder: Path, length: int, include: bool
) -> None:
    text = whole_text()
    engine = make_engine(tokenizer_folder)
    stops = [text[i : i + length] for i in range(0, len(text) - length + 1)]
    for i, stop in enumerate(stops):
        params = SamplingParams(
            temperature=0, max_tokens=24, stop=stop, include_stop_str_in_output=include
        )
        engine.add_request(f"plain{i}", PROMPT, params)
        engine.add_request(f"stream{i}", PROMPT, params, stream=True)
    outputs, deltas = run(engine)
    for i, stop in enumerate(stops):
        begin = text.find(stop)
        right = text[: begin + len(stop)] if include else text[:begin]
        plain, stream = outputs[f"plain{i}"].outputs[0], outputs[f"stream{i}"].outputs[0]
        assert plain == stream
        assert plain.text == right
        assert (plain.finish_reason, plain.stop_reason) == ("stop", stop)
        # One byte is one token here: generation ended with the token that completed the stop.
        assert len(plain.token_ids) == begin + length
        mine = [delta for delta in deltas if delta.request_id == f"stream{i}"]
        assert "".join(delta.text for delta in mine) == right
        assert [one for delta in mine for one in delta.token_ids] == plain.token_ids


def test_text_that_only_begins_like_a_stop_string_comes_in_the_end(tokenizer_folder: Path) -> None:
    text = whole_text()
    stop = text[-3:] + "~~~"
    engine = make_engine(tokenizer_folder)
    params = SamplingParams(temperature=0, max_tokens=24, stop=[stop, "~never~"])
    engine.add_request("one", PROMPT, params, stream=True)
    outputs, deltas = run(engine)
    assert outputs["one"].outputs[0].text == text
    assert outputs["one"].outputs[0].stop_reason is None
    assert "".join(delta.text for delta in deltas) == text


def test_a_stop_string_completed_by_the_last_allowed_token_is_a_stop(
    tokenizer_folder: Path,
) -> None:
    text = whole_text()
    params = SamplingParams(temperature=0, max_tokens=10, stop=text[7:10])
    output = answer(tokenizer_folder, PROMPT, params).outputs[0]
    assert (output.finish_reason, output.stop_reason) == ("stop", text[7:10])
    assert output.text == text[:7]


@pytest.mark.parametrize("seed", range(6))
def test_a_stream_of_any_bytes_joins_to_the_whole_text(tokenizer_folder: Path, seed: int) -> None:
    """Random bytes: characters split over tokens, lone continuation bytes, cut off at the end."""
    params = SamplingParams(temperature=5.0, seed=seed, max_tokens=120, ignore_eos=True)
    engine = make_engine(tokenizer_folder, ascii_only=False)
    engine.add_request("stream", "bytes", params, stream=True)
    engine.add_request("plain", "bytes", params)
    outputs, deltas = run(engine)
    stream, plain = outputs["stream"].outputs[0], outputs["plain"].outputs[0]
    assert stream == plain
    assert "".join(delta.text for delta in deltas) == plain.text
    assert "\ufffd" in plain.text
    ids = [one for one in plain.token_ids if one < 256]
    assert plain.text.replace("\ufffd", "") == bytes(ids).decode(errors="ignore")


def test_lone_continuation_bytes_are_replaced_and_the_stream_goes_on(
    tokenizer_folder: Path,
) -> None:
    params = SamplingParams(
        seed=2,
        max_tokens=60,
        ignore_eos=True,
        allowed_token_ids=[*range(128, 192), 97],
        logit_bias={97: 6.0},
    )
    engine = make_engine(tokenizer_folder, ascii_only=False)
    engine.add_request("r", "bytes", params, stream=True)
    outputs, deltas = run(engine)
    answer = outputs["r"].outputs[0]
    assert set(answer.text) == {"a", "\ufffd"}
    assert answer.text.count("a") == answer.token_ids.count(97)
    assert "".join(delta.text for delta in deltas) == answer.text
    assert len(answer.token_ids) == 60


def test_special_tokens_are_shown_when_asked_for(tokenizer_folder: Path) -> None:
    shown = SamplingParams(
        temperature=1.0,
        seed=1,
        max_tokens=200,
        skip_special_tokens=False,
        include_stop_str_in_output=True,
    )
    for stream in (False, True):
        engine = make_engine(tokenizer_folder)
        engine.add_request("one", "until the end", shown, stream=stream)
        text = run(engine)[0]["one"].outputs[0].text
        assert text.endswith("<|im_end|>")


def test_an_aborted_stream_keeps_its_text(tokenizer_folder: Path) -> None:
    engine = make_engine(tokenizer_folder)
    engine.add_request("one", PROMPT, GREEDY, stream=True)
    shown = "".join(delta.text for _ in range(4) for delta in engine.step().deltas)
    output = engine.abort("one")
    assert output is not None
    assert output.outputs[0].text == shown == whole_text()[:4]
