"""Options that change logits, through the whole engine: the right tokens count as prompt and as
answer, alone and under chunks, prefix hits, preemption, forks and neighbours without options.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_model import EOS_ID, hash_of, logits_of, make_engine
from harness import GREEDY, answer, run

from pagedkv.records import RequestOutput
from pagedkv.sampling_params import SamplingParams

PROMPT = "the same beginning, "
PARAMS = {
    "penalties": SamplingParams(
        seed=4, max_tokens=30, repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.9
    ),
    "greedy penalties": SamplingParams(
        temperature=0, max_tokens=30, ignore_eos=True, repetition_penalty=3.0
    ),
    "bias, allowed, bad words": SamplingParams(
        seed=9,
        max_tokens=30,
        logit_bias={101: 4.0},
        allowed_token_ids=[*range(97, 110), EOS_ID],
        bad_words=["ab", "ee", "k"],
    ),
    "min_tokens, min_p": SamplingParams(
        seed=1, max_tokens=30, min_tokens=25, min_p=0.02, logit_bias={EOS_ID: 5.0}
    ),
}


def output_of(one: RequestOutput) -> tuple[list[int], str, str]:
    answer = one.outputs[0]
    return answer.token_ids, answer.text, answer.finish_reason


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": 4, "max_num_batched_tokens": 5},
        {"num_gpu_blocks_override": 18, "preemption_mode": "recompute", "watermark": 0.0},
        {
            "num_gpu_blocks_override": 18,
            "preemption_mode": "swap",
            "swap_space": 1e-4,
            "watermark": 0.0,
        },
    ],
    ids=["chunks", "recompute", "swap"],
)
def test_answers_are_those_of_each_request_alone(
    tokenizer_folder: Path, options: dict[str, Any]
) -> None:
    engine = make_engine(tokenizer_folder, block_size=4, **options)
    for i, params in enumerate(PARAMS.values()):
        engine.add_request(f"r{i}", PROMPT + str(i), params)
        engine.add_request(f"plain{i}", PROMPT + "p" * i, GREEDY)
    outputs, _ = run(engine)
    if "preemption_mode" in options:
        assert sum(outputs[f"r{i}"].num_preemptions for i in range(len(PARAMS)))
    for i, params in enumerate(PARAMS.values()):
        alone = answer(tokenizer_folder, PROMPT + str(i), params, enable_prefix_caching=False)
        assert output_of(outputs[f"r{i}"]) == output_of(alone)
        plain = answer(tokenizer_folder, PROMPT + "p" * i, GREEDY, enable_prefix_caching=False)
        assert output_of(outputs[f"plain{i}"]) == output_of(plain)


def test_what_is_forbidden_is_not_generated_and_what_is_biased_is(tokenizer_folder: Path) -> None:
    params = PARAMS["bias, allowed, bad words"]
    seen = [
        answer(tokenizer_folder, PROMPT, dataclasses.replace(params, seed=seed)).outputs[0]
        for seed in range(20)
    ]
    letters = "".join(one.text for one in seen)
    assert set(letters) <= set("abcdefghijlm")
    assert not any(bad in one.text for one in seen for bad in ("ab", "ee", "k"))
    assert letters.count("e") > len(letters) / 5  # one of twelve


def test_no_more_repetition_than_the_penalty_allows(tokenizer_folder: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=26, ignore_eos=True, presence_penalty=2.0)
    with_penalty = answer(tokenizer_folder, PROMPT, params).outputs[0].token_ids
    without = (
        answer(tokenizer_folder, PROMPT, dataclasses.replace(params, presence_penalty=0.0))
        .outputs[0]
        .token_ids
    )
    assert len(set(with_penalty)) > len(set(without))


@pytest.mark.parametrize("min_tokens", [0, 1, 12, 30])
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_nothing_ends_an_answer_before_min_tokens(
    tokenizer_folder: Path, min_tokens: int, ignore_eos: bool
) -> None:
    params = SamplingParams(
        temperature=0,
        max_tokens=30,
        min_tokens=min_tokens,
        logit_bias={102 if ignore_eos else EOS_ID: 50.0, 101: 40.0},
        stop_token_ids=[101, 102],
        ignore_eos=ignore_eos,
    )
    output = answer(tokenizer_folder, PROMPT, params).outputs[0]
    assert len(output.token_ids) == min(min_tokens + 1, 30)
    if min_tokens < 30:
        assert output.finish_reason == "stop"
        assert output.token_ids[-1] == (102 if ignore_eos else EOS_ID)
    else:
        assert output.finish_reason == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_counts_behind_min_tokens(tokenizer_folder: Path, stream: bool) -> None:
    params = SamplingParams(
        temperature=0, max_tokens=20, stop=["e"], min_tokens=6, logit_bias={101: 80.0}
    )
    engine = make_engine(tokenizer_folder)
    engine.add_request("r", PROMPT, params, stream=stream)
    outputs, deltas = run(engine)
    output = outputs["r"].outputs[0]
    assert (output.text, output.finish_reason, output.stop_reason) == ("e" * 6, "stop", "e")
    assert len(output.token_ids) == 7
    if stream:
        assert "".join(delta.text for delta in deltas) == output.text


def test_answers_to_one_prompt_are_penalised_each_by_its_own_tokens(
    tokenizer_folder: Path,
) -> None:
    params = dataclasses.replace(PARAMS["penalties"], n=3, ignore_eos=True)
    several = answer(tokenizer_folder, PROMPT, params).outputs
    assert len({tuple(one.token_ids) for one in several}) == 3
    engine = make_engine(tokenizer_folder, num_gpu_blocks_override=20, block_size=4, watermark=0.0)
    engine.add_request("r", PROMPT, params)
    engine.add_request("other", PROMPT + "other", GREEDY)
    outputs, _ = run(engine)
    assert outputs["r"].num_preemptions
    assert [one.token_ids for one in outputs["r"].outputs] == [one.token_ids for one in several]


def test_a_fork_goes_on_with_options_of_its_own(tokenizer_folder: Path) -> None:
    engine = make_engine(tokenizer_folder)
    long = dataclasses.replace(GREEDY, ignore_eos=True)
    engine.add_request("r", PROMPT, long)
    for _ in range(6):
        engine.step()
    fork = dataclasses.replace(long, logit_bias={120: 100.0}, bad_words=["xxx"])
    (name,) = engine.fork("r", params=fork)
    outputs, _ = run(engine)
    assert outputs["r"].outputs == answer(tokenizer_folder, PROMPT, long).outputs
    text = outputs[name].outputs[0].text
    assert text[:5] == outputs["r"].outputs[0].text[:5]
    assert text[6:].count("xx") == len(text[6:]) // 3
    with pytest.raises(ValueError, match="allowed_token_ids has 258, outside"):
        engine.make_request("s", PROMPT, SamplingParams(allowed_token_ids=[258]))


@pytest.mark.parametrize("functions", [(), (lambda prompt, output, logits: logits,)])
def test_penalties_pass_over_ids_of_a_prompt_that_have_no_logit(
    tokenizer_folder: Path, functions: tuple[Any, ...]
) -> None:
    prompt = [104, 105, 259, 258, 105]  # the last rows of the embedding are padding
    params = dataclasses.replace(
        GREEDY, repetition_penalty=1.5, frequency_penalty=0.5, logits_processors=functions
    )
    engine = make_engine(tokenizer_folder)
    engine.add_request("padding", prompt, params)
    engine.add_request("other", PROMPT, GREEDY)
    outputs, _ = run(engine)
    assert outputs["other"].outputs == answer(tokenizer_folder, PROMPT, GREEDY).outputs
    assert outputs["padding"].error is None
    answered = outputs["padding"].outputs[0].token_ids
    context = list(prompt)
    for token in answered:
        logits = logits_of(hash_of(np.array(context)), ascii_only=True)[:258].numpy()
        for seen in {*context} - {258, 259}:
            logits[seen] *= 1.5 if logits[seen] <= 0 else 1 / 1.5
            logits[seen] -= 0.5 * context[len(prompt) :].count(seen)
        assert token == logits.argmax()
        context.append(token)


def test_functions_of_the_users_see_prompt_and_answer(tokenizer_folder: Path) -> None:
    calls: list[tuple[bytes, bytes]] = []

    def alphabetic(prompt: Any, output: Any, logits: torch.Tensor) -> torch.Tensor:
        calls.append((bytes(prompt.tolist()), bytes(output.tolist())))
        logits = torch.full_like(logits, -torch.inf)
        logits[97 + output.size] = 0.0
        return logits

    params = SamplingParams(max_tokens=5, logits_processors=[alphabetic])
    output = answer(tokenizer_folder, "abc", params, max_num_batched_tokens=2, max_num_seqs=2)
    assert output.outputs[0].text == "abcde"
    assert calls == [(b"abc", b"abcde"[:k]) for k in range(5)]


def test_a_function_that_fails_ends_its_own_request(tokenizer_folder: Path) -> None:
    def broken(prompt: Any, output: Any, logits: torch.Tensor) -> torch.Tensor:
        if output.size == 3:
            raise KeyError("mine")
        return logits

    engine = make_engine(tokenizer_folder)
    params = dataclasses.replace(GREEDY, ignore_eos=True)
    engine.add_request("bad", PROMPT, dataclasses.replace(params, logits_processors=[broken]))
    engine.add_request("good", PROMPT, params)
    outputs, _ = run(engine)
    assert outputs["bad"].outputs[0].finish_reason == "error"
    assert "a logits processor" in str(outputs["bad"].error)
    assert len(outputs["bad"].outputs[0].token_ids) == 3
    assert outputs["good"].outputs == answer(tokenizer_folder, PROMPT, params).outputs


def test_a_request_that_forbids_every_token_ends_with_an_error(tokenizer_folder: Path) -> None:
    params = SamplingParams(allowed_token_ids=[97], bad_words=["aaa"], max_tokens=9)
    engine = make_engine(tokenizer_folder)
    engine.add_request("r", PROMPT, params)
    engine.add_request("good", PROMPT, GREEDY)
    outputs, _ = run(engine)
    assert outputs["r"].outputs[0].finish_reason == "error"
    assert outputs["r"].outputs[0].text == "aa"
    assert "forbids every token" in str(outputs["r"].error)
    assert outputs["good"].outputs == answer(tokenizer_folder, PROMPT, GREEDY).outputs


@pytest.mark.parametrize(
    "options",
    [
        {"allowed_token_ids": [97], "bad_words": ["a"]},
        {"allowed_token_ids": [EOS_ID], "min_tokens": 1},
        {"allowed_token_ids": [EOS_ID, 98, 97], "min_tokens": 1, "bad_words": ["a", "b"]},
    ],
)
def test_what_leaves_no_first_token_is_refused(
    tokenizer_folder: Path, options: dict[str, Any]
) -> None:
    engine = make_engine(tokenizer_folder)
    with pytest.raises(ValueError, match="forbid all of allowed_token_ids"):
        engine.add_request("r", PROMPT, SamplingParams(**options))
    assert not engine.has_work


def test_ids_are_checked_against_the_ids_that_can_be_chosen(tokenizer_folder: Path) -> None:
    engine = make_engine(tokenizer_folder)  # 258 of 260: two rows are padding
    for options in ({"logit_bias": {258: 1.0}}, {"allowed_token_ids": [5, 258]}):
        with pytest.raises(ValueError, match=r"has 258, outside the vocabulary \(0 to 257\)"):
            engine.add_request("r", PROMPT, SamplingParams(**options))  # type: ignore[arg-type]
    engine.add_request("r", PROMPT, SamplingParams(logit_bias={257: -1.0}, max_tokens=1))
    run(engine)


def test_seeded_output_is_the_same_in_any_order_of_neighbours(tokenizer_folder: Path) -> None:
    alone = {
        name: output_of(answer(tokenizer_folder, PROMPT, params)) for name, params in PARAMS.items()
    }
    rng = np.random.default_rng(0)
    for _ in range(3):
        engine = make_engine(tokenizer_folder, max_num_seqs=3, max_num_batched_tokens=64)
        for i in rng.permutation(len(PARAMS)).tolist():
            name = list(PARAMS)[i]
            engine.add_request(name, PROMPT, PARAMS[name])
            engine.add_request(f"unseeded {name}", PROMPT, SamplingParams(max_tokens=7))
        outputs, _ = run(engine)
        assert {name: output_of(outputs[name]) for name in PARAMS} == alone


def test_steps_ahead_wait_for_tokens_where_the_host_must_know_them(tokenizer_folder: Path) -> None:
    waiting = {"bias, allowed, bad words"}
    for name, params in PARAMS.items():
        engine = make_engine(tokenizer_folder, async_scheduling=True)
        engine.add_request("r", PROMPT, params)
        engine.step()
        engine.step()
        assert len(engine._scheduler._in_flight) == (0 if name in waiting else 1)
        outputs, _ = run(engine)
        assert output_of(outputs["r"]) == output_of(answer(tokenizer_folder, PROMPT, params))


def test_pipelined_answers_are_those_of_each_request_alone(tokenizer_folder: Path) -> None:
    engine = make_engine(tokenizer_folder, async_scheduling=True, block_size=4)
    for i, params in enumerate(PARAMS.values()):
        engine.add_request(f"r{i}", PROMPT + str(i), params)
        engine.add_request(f"plain{i}", PROMPT + "p" * i, GREEDY)
    outputs, _ = run(engine)
    for i, params in enumerate(PARAMS.values()):
        alone = answer(tokenizer_folder, PROMPT + str(i), params)
        assert output_of(outputs[f"r{i}"]) == output_of(alone)
        plain = answer(tokenizer_folder, PROMPT + "p" * i, GREEDY)
        assert output_of(outputs[f"plain{i}"]) == output_of(plain)
