"""Log-probabilities of generated tokens and of prompts: those of the fake model by hand, whatever
prefix hits, chunks, preemption, forks and options are about.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_model import hash_of, logits_of, make_engine
from harness import GREEDY, answer, fake_of, run

from pagedkv.records import CompletionOutput, Logprob, RequestOutput, TokenLogprobs
from pagedkv.sampling import score_tokens
from pagedkv.sampling_params import SamplingParams

PROMPT = "the same beginning, "
LONG = dataclasses.replace(GREEDY, ignore_eos=True, max_tokens=30)
PRESSURES: dict[str, dict[str, Any]] = {
    "chunks": {"max_num_seqs": 4, "max_num_batched_tokens": 5},
    "pipelined": {"async_scheduling": True, "max_num_batched_tokens": 16, "max_num_seqs": 16},
    "recompute": {
        "num_gpu_blocks_override": 30,
        "preemption_mode": "recompute",
        "watermark": 0.0,
    },
    "swap": {
        "num_gpu_blocks_override": 30,
        "preemption_mode": "swap",
        "swap_space": 1e-4,
        "watermark": 0.0,
    },
}


def by_hand(context: list[int], token: int, num_top: int) -> TokenLogprobs:
    """Of a token behind a context, by sorting everything, in double precision."""
    logits = logits_of(hash_of(np.array(context)), ascii_only=True)[:258].double().numpy()
    logprobs = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
    order = np.argsort(-logits)
    told = [token, *order[:num_top].tolist()]
    return {one: Logprob(logprobs[one], int(np.flatnonzero(order == one)[0]) + 1) for one in told}


def check(found: TokenLogprobs, right: TokenLogprobs) -> None:
    assert list(found) == list(right)
    for token, one in right.items():
        assert found[token].rank == one.rank
        assert math.isclose(found[token].logprob, one.logprob, abs_tol=1e-6)


def check_answer(prompt: str, one: CompletionOutput, num_top: int) -> None:
    assert one.logprobs is not None
    assert len(one.logprobs) == len(one.token_ids)
    for i, (token, found) in enumerate(zip(one.token_ids, one.logprobs, strict=True)):
        check(found, by_hand([*prompt.encode(), *one.token_ids[:i]], token, num_top))


def check_prompt(output: RequestOutput, num_top: int) -> None:
    ids, found = output.prompt_token_ids, output.prompt_logprobs
    assert found is not None
    assert len(found) == len(ids)
    assert found[0] is None
    for i, one in enumerate(found[1:], 1):
        assert one is not None
        check(one, by_hand(ids[:i], ids[i], num_top))


@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
def test_they_are_the_models_own_and_zero_tells_the_token_alone(
    tokenizer_folder: Path, num_top: int
) -> None:
    params = dataclasses.replace(LONG, logprobs=num_top, prompt_logprobs=num_top)
    output = answer(tokenizer_folder, PROMPT, params)
    check_answer(PROMPT, output.outputs[0], num_top)
    check_prompt(output, num_top)
    plain = answer(tokenizer_folder, PROMPT, LONG)
    assert plain.outputs[0].logprobs is None
    assert plain.prompt_logprobs is None
    assert plain.outputs[0].token_ids == output.outputs[0].token_ids


def test_they_do_not_depend_on_what_changes_logits(tokenizer_folder: Path) -> None:
    for options in (
        {"temperature": 0.5, "top_k": 3},
        {"temperature": 2.0, "min_p": 0.1, "presence_penalty": 2.0},
        {"allowed_token_ids": [120, 121, 122]},
    ):
        params = SamplingParams(seed=3, max_tokens=12, logprobs=2, **options)  # type: ignore[arg-type]
        check_answer(PROMPT, answer(tokenizer_folder, PROMPT, params).outputs[0], 2)


@pytest.mark.parametrize("name", PRESSURES)
def test_they_are_complete_and_right_under_pressure(tokenizer_folder: Path, name: str) -> None:
    engine = make_engine(tokenizer_folder, block_size=4, **PRESSURES[name])
    engine.add_request("warm", PROMPT, GREEDY)  # what the others would find
    run(engine)
    for i in range(6):
        params = dataclasses.replace(LONG, logprobs=i % 3, prompt_logprobs=(None, 2)[i % 2])
        engine.add_request(f"r{i}", PROMPT + "x" * i, params)
        engine.add_request(f"plain{i}", PROMPT + "p" * i, LONG)
    outputs, _ = run(engine)
    assert ("preemption_mode" in PRESSURES[name]) == any(
        outputs[f"r{i}"].num_preemptions for i in range(6)
    )
    for i in range(6):
        output = outputs[f"r{i}"]
        check_answer(PROMPT + "x" * i, output.outputs[0], i % 3)
        if i % 2:
            check_prompt(output, 2)
        else:
            assert output.prompt_logprobs is None
        assert outputs[f"plain{i}"].outputs[0].logprobs is None


def test_a_cached_prefix_is_computed_again_for_its_log_probabilities(
    tokenizer_folder: Path,
) -> None:
    engine = make_engine(tokenizer_folder, block_size=4)
    params = dataclasses.replace(LONG, prompt_logprobs=3)
    for name in ("a", "b"):
        engine.add_request("plain", PROMPT, LONG)
        run(engine)
        engine.add_request(name, PROMPT, params)
        outputs, _ = run(engine)
        check_prompt(outputs[name], 3)
        assert outputs[name].num_cached_tokens == 0
    engine.add_request("plain", PROMPT, LONG)
    assert run(engine)[0]["plain"].num_cached_tokens == 16


@pytest.mark.parametrize("length", [1, 2, 255, 256, 257, 600])
def test_prompts_of_any_length_are_told_whole(tokenizer_folder: Path, length: int) -> None:
    # 256 are scored at once.
    engine = make_engine(tokenizer_folder, max_model_len=700, max_num_batched_tokens=700)
    prompt = [97 + i % 20 for i in range(length)]
    engine.add_request("r", prompt, SamplingParams(max_tokens=1, prompt_logprobs=0))
    check_prompt(run(engine)[0]["r"], 0)


def test_each_of_several_answers_has_its_own(tokenizer_folder: Path) -> None:
    params = SamplingParams(seed=5, max_tokens=20, n=3, logprobs=1, prompt_logprobs=1)
    engine = make_engine(tokenizer_folder, block_size=4, num_gpu_blocks_override=14, watermark=0.0)
    engine.add_request("r", PROMPT, params, stream=True)
    outputs, deltas = run(engine)
    assert outputs["r"].num_preemptions
    check_prompt(outputs["r"], 1)
    for k, one in enumerate(outputs["r"].outputs):
        check_answer(PROMPT, one, 1)
        assert one.logprobs is not None
        assert one.cumulative_logprob is not None
        total = sum(a[b].logprob for a, b in zip(one.logprobs, one.token_ids, strict=True))
        assert math.isclose(total, one.cumulative_logprob, abs_tol=1e-6)
        streamed = [told for d in deltas if d.index == k for told in d.logprobs or []]
        assert streamed == one.logprobs


def test_deltas_carry_those_of_their_tokens(tokenizer_folder: Path) -> None:
    engine = make_engine(tokenizer_folder)
    params = dataclasses.replace(LONG, logprobs=2, stop=["zzzz"])
    engine.add_request("r", PROMPT, params, stream=True)
    engine.add_request("plain", PROMPT, LONG, stream=True)
    outputs, deltas = run(engine)
    mine = [delta for delta in deltas if delta.request_id == "r"]
    assert all(len(d.logprobs or []) == len(d.token_ids) for d in mine)
    assert [told for d in mine for told in d.logprobs or []] == outputs["r"].outputs[0].logprobs
    assert all(d.logprobs is None for d in deltas if d.request_id == "plain")


def test_a_fork_has_those_from_before_it_too(tokenizer_folder: Path) -> None:
    engine = make_engine(tokenizer_folder)
    params = dataclasses.replace(LONG, logprobs=1, prompt_logprobs=0)
    engine.add_request("r", PROMPT, params)
    engine.add_request("plain", PROMPT, LONG)
    for _ in range(7):
        engine.step()
    hot = dataclasses.replace(params, temperature=1.5, logprobs=4)
    names = [*engine.fork("r"), *engine.fork("r", params=hot)]
    quiet = engine.fork("r", params=dataclasses.replace(params, logprobs=None))
    with pytest.raises(ValueError, match="has no logprobs: its parent was not asked for any"):
        engine.fork("plain", params=dataclasses.replace(LONG, logprobs=0))
    with pytest.raises(ValueError, match="has its parent's prompt_logprobs, 0"):
        engine.fork("r", params=dataclasses.replace(params, prompt_logprobs=None))
    outputs, _ = run(engine)
    check_answer(PROMPT, outputs["r"].outputs[0], 1)
    check_answer(PROMPT, outputs[names[0]].outputs[0], 1)
    check_prompt(outputs[names[1]], 0)
    told = outputs[names[1]].outputs[0].logprobs
    assert told is not None
    assert len(told) == len(outputs[names[1]].outputs[0].token_ids)
    assert max(map(len, told[:7])) <= 2 < max(map(len, told[7:]))
    assert outputs[quiet[0]].outputs[0].logprobs is None


@pytest.mark.parametrize("num_steps", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "options", [{}, {"num_gpu_blocks_override": 16, "watermark": 0.0}, {"max_num_seqs": 1}]
)
def test_a_fork_of_a_prompt_in_work_tells_all_of_it(
    tokenizer_folder: Path, num_steps: int, options: dict[str, Any]
) -> None:
    usual = {"block_size": 4, "max_num_batched_tokens": 5, "max_num_seqs": 5}
    engine = make_engine(tokenizer_folder, **(usual | options))
    params = dataclasses.replace(LONG, logprobs=1, prompt_logprobs=1)
    engine.add_request("r", PROMPT, params)
    for _ in range(num_steps):
        engine.step()
    names = ["r", *engine.fork("r", 2)]
    outputs, _ = run(engine)
    for name in names:
        check_answer(PROMPT, outputs[name].outputs[0], 1)
        check_prompt(outputs[name], 1)


def test_an_aborted_request_tells_what_it_has_and_leaves_nothing(tokenizer_folder: Path) -> None:
    engine = make_engine(tokenizer_folder, max_num_batched_tokens=8, max_num_seqs=8)
    params = dataclasses.replace(LONG, logprobs=0, prompt_logprobs=0)
    engine.add_request("r", PROMPT, params)
    engine.step()
    output = engine.abort("r")
    assert output is not None
    assert output.outputs[0].logprobs == []
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == 9  # 8 tokens computed: the 9th is known to follow
    assert engine._outputs.num_watched == 0


def test_a_step_that_fails_tells_no_scores_of_its_own(tokenizer_folder: Path) -> None:
    engine = make_engine(tokenizer_folder)
    fake_of(engine).is_bad = lambda context: context.size == len(PROMPT) + 3
    params = dataclasses.replace(LONG, logprobs=1)
    engine.add_request("bad", PROMPT, params)
    engine.add_request("good", PROMPT + "and more", params)
    outputs, _ = run(engine)
    assert outputs["bad"].outputs[0].finish_reason == "error"
    check_answer(PROMPT, outputs["bad"].outputs[0], 1)
    check_answer(PROMPT + "and more", outputs["good"].outputs[0], 1)


def test_a_token_without_a_logit_is_impossible_and_last() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0], [0.0, 1.0, 2.0]])
    scores = score_tokens(logits, np.array([4, 9]), np.array([1, 7]), 5)
    assert scores.ranks.tolist() == [2, 4]
    assert scores.logprobs[1] == -math.inf
    assert scores.top_ids.tolist() == [[2, 1, 0]] * 2
    np.testing.assert_allclose(scores.logprobs[0], scores.top_logprobs[0, 1])
