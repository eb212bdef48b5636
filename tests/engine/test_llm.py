"""`LLM`: lists in, lists out, in order; one bad prompt stops the list before any of it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_model import load_fake
from harness import GREEDY, answer, fake_of

from pagedkv import LLM, SamplingParams
from pagedkv.config import EngineConfig
from pagedkv.records import StepResult


@pytest.fixture
def llm(tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch) -> LLM:
    monkeypatch.setattr(
        "pagedkv.engine.engine.load", lambda config: load_fake(tokenizer_folder, config)
    )
    return LLM("fake", max_num_seqs=3, block_size=4, num_gpu_blocks_override=40)


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM, tokenizer_folder: Path) -> None:
    prompts = ["a long first prompt " * 3, "b", [ord("c"), ord("d")], "e" * 30]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (20, 1, 7, 2)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    for prompt, one, output in zip(prompts, params, outputs, strict=True):
        assert output.outputs == answer(tokenizer_folder, prompt, one).outputs
        assert output.prompt == (prompt if isinstance(prompt, str) else None)


def test_those_that_may_take_longest_begin_first(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of equals in the order of the prompts."""
    added: list[str] = []
    add = llm.engine.add
    monkeypatch.setattr(
        llm.engine, "add", lambda request: (added.append(request.request_id), add(request))
    )
    params = [SamplingParams(temperature=0, max_tokens=n) for n in (2, 9, 2, 30, 9)]
    outputs = llm.generate(list("abcde"), params, use_tqdm=False)
    assert [int(name) for name in added] == [3, 1, 4, 0, 2]
    assert [output.prompt for output in outputs] == list("abcde")


def test_one_prompt_needs_no_list(llm: LLM) -> None:
    text = llm.generate("solo", GREEDY)
    ids = llm.generate([ord(c) for c in "solo"], GREEDY)
    assert len(text) == len(ids) == 1
    assert text[0].outputs == ids[0].outputs


def test_no_prompts_give_no_outputs(llm: LLM) -> None:
    assert llm.generate([]) == []


@pytest.mark.parametrize("place", [0, 2, 4])
def test_one_bad_prompt_stops_the_list_before_any_of_it_runs(llm: LLM, place: int) -> None:
    prompts = ["one", "two", "three", "four"]
    prompts.insert(place, "")
    with pytest.raises(ValueError, match="the prompt is empty"):
        llm.generate(prompts, GREEDY)
    assert fake_of(llm.engine).num_steps == 0
    assert not llm.engine.has_work
    assert len(llm.generate(["one", "two"], GREEDY)) == 2


def test_sampling_params_must_be_as_many_as_the_prompts(llm: LLM) -> None:
    with pytest.raises(ValueError, match="2 prompts, but 1 sampling params"):
        llm.generate(["a", "b"], [GREEDY])


def test_an_exception_between_steps_leaves_nothing_queued(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, calls = llm.engine.step, []

    def interrupted() -> object:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b", "c", "d", "e"], GREEDY)
    llm.engine.check_invariants()
    assert not llm.engine.has_work


def test_chat_runs_the_template_for_one_or_many_conversations(llm: LLM) -> None:
    one = [{"role": "user", "content": "hi"}]
    two = [*one, {"role": "assistant", "content": "ho"}, {"role": "user", "content": "again"}]
    (single,) = llm.chat(one, GREEDY)
    assert single.prompt == "user: hi<|im_end|>assistant: "
    # The end token of the template is one token, not the text of one.
    assert single.prompt_token_ids.count(256) == 1
    spelled = llm.chat([{"role": "user", "content": "<|im_end|>"}], GREEDY)[0]
    assert spelled.prompt_token_ids.count(256) == 1
    many = llm.chat([one, two], GREEDY)
    assert many[0].outputs == single.outputs
    assert many[1].prompt_token_ids.count(256) == 3


def test_the_bar_is_drawn_on_stderr_alone_and_can_be_off(
    llm: LLM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    llm.generate(["a", "b"], GREEDY)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "2/2" in shown.err
    llm.generate(["a", "b"], GREEDY, use_tqdm=False)
    assert capsys.readouterr().err == ""


def test_an_unknown_option_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(ValueError, match="did you mean max_model_len"):
        LLM("smollm2", max_model_length=5)
    with pytest.raises(ValueError, match="dtype must be one of"):
        EngineConfig.from_options("smollm2", dtype="int8")


def test_equal_prompts_share_one_prefill_unless_a_salt_or_a_reset_keeps_them_apart(
    llm: LLM,
) -> None:
    prompt = "the same words for all"  # 22 tokens
    cached = [one.num_cached_tokens for one in llm.generate([prompt] * 3, GREEDY, use_tqdm=False)]
    assert cached == [0, 20, 20]
    salted = llm.generate([prompt] * 2, GREEDY, use_tqdm=False, cache_salt="tenant")
    assert [one.num_cached_tokens for one in salted] == [0, 20]
    assert llm.reset_prefix_cache() > 0
    assert llm.generate(prompt, GREEDY, use_tqdm=False)[0].num_cached_tokens == 0


def test_priorities_are_one_for_each_prompt_and_decide_the_order(
    tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "pagedkv.engine.engine.load", lambda config: load_fake(tokenizer_folder, config)
    )
    llm = LLM("fake", max_num_seqs=1, block_size=4, scheduling_policy="priority")
    ended: list[str] = []
    step = llm.engine.step

    def watched_step() -> StepResult:
        result = step()
        ended.extend(one.request_id for one in result.finished)
        return result

    monkeypatch.setattr(llm.engine, "step", watched_step)
    outputs = llm.generate(["a", "b", "c"], GREEDY, use_tqdm=False, priority=[5, -1, 2])
    assert [one.request_id for one in outputs] == ["0", "1", "2"]
    assert ended == ["1", "2", "0"]
    with pytest.raises(ValueError, match="2 prompts, but 1 priorities"):
        llm.generate(["a", "b"], GREEDY, priority=[1])


def test_a_priority_without_the_policy_is_refused(llm: LLM) -> None:
    with pytest.raises(ValueError, match="scheduling_policy is 'fcfs'"):
        llm.generate(["a"], GREEDY, priority=[1])


@pytest.mark.parametrize("prompts", [None, 5, {"a": 1}, b"bytes"])
def test_prompts_of_another_kind_are_refused_by_name(llm: LLM, prompts: Any) -> None:
    with pytest.raises(TypeError, match=f"a list of token ids.*got {type(prompts).__name__}"):
        llm.generate(prompts, GREEDY)
