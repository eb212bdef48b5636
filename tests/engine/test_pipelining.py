"""Steps launched before the one before them has told its tokens: no answer changes, whatever ends,
fails or is aborted meanwhile, and what is learnt late costs one row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_model import EOS_ID, make_engine
from harness import GREEDY, answer, fake_of, greedy_by_hand, run
from test_engine import PRESSURES, PROMPTS

from pagedkv.engine import Engine
from pagedkv.replay import Recorder
from pagedkv.sampling_params import SamplingParams


def pipelined(folder: Path, **options: Any) -> Engine:
    return make_engine(folder, async_scheduling=True, **options)


def watch(engine: Engine) -> list[str]:
    """What the engine's runner is asked for, in order."""
    calls: list[str] = []
    runner = engine._runner
    launch, collect = runner.launch, runner.collect

    def launched(step: Any, token_ids: Any) -> Any:
        calls.append(f"launch {step.step_id}")
        one = launch(step, token_ids)
        numbers[id(one)] = step.step_id
        kept.append(one)
        return one

    def collected(one: Any) -> Any:
        calls.append(f"collect {numbers[id(one)]}")
        return collect(one)

    numbers: dict[int, int] = {}
    kept: list[Any] = []
    runner.launch, runner.collect = launched, collected  # type: ignore[method-assign]
    return calls


@pytest.mark.parametrize("name", PRESSURES)
@pytest.mark.parametrize("kind", ["greedy", "seeded"])
def test_no_answer_changes(tokenizer_folder: Path, name: str, kind: str) -> None:
    def params(i: int) -> SamplingParams:
        if kind == "greedy":
            return GREEDY
        return SamplingParams(temperature=0.9, top_k=(0, 30)[i % 2], seed=i, max_tokens=5 * i + 4)

    solo = [answer(tokenizer_folder, one, params(i)) for i, one in enumerate(PROMPTS)]
    engine = pipelined(tokenizer_folder, **PRESSURES[name])
    calls = watch(engine)
    for i, one in enumerate(PROMPTS):
        engine.add_request(str(i), one, params(i))
    outputs, _ = run(engine)
    assert not engine.has_work
    for i, right in enumerate(solo):
        assert outputs[str(i)].outputs == right.outputs
    ahead = [i for i, one in enumerate(calls[1:]) if one[:3] == calls[i][:3] == "lau"]
    assert ahead


def test_in_steady_decode_each_step_is_launched_before_the_last_one_is_collected(
    tokenizer_folder: Path,
) -> None:
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    engine = pipelined(tokenizer_folder)
    calls = watch(engine)
    engine.add_request("a", "steady", params)
    run(engine)
    assert calls == [
        "launch 1", "launch 2", "collect 1", "launch 3", "collect 2", "launch 4", "collect 3",
        "launch 5", "collect 4", "collect 5",
    ]  # fmt: skip
    assert fake_of(engine).num_tokens == len("steady") + 4  # an end that is known costs nothing
    engine = make_engine(tokenizer_folder, async_scheduling=False)
    calls = watch(engine)
    engine.add_request("a", "steady", params)
    run(engine)
    assert calls[:4] == ["launch 1", "collect 1", "launch 2", "collect 2"]


def test_a_stop_learnt_late_costs_one_row_and_no_token(tokenizer_folder: Path) -> None:
    ids = greedy_by_hand("stop at", 24)
    last = next(i for i in range(5, 24) if ids[i] not in ids[:i])
    params = SamplingParams(temperature=0, max_tokens=24, stop_token_ids=[ids[last]])
    engine = pipelined(tokenizer_folder)
    engine.add_request("a", "stop at", params)
    output = run(engine)[0]["a"].outputs[0]
    assert output.token_ids == ids[: last + 1]
    assert (output.finish_reason, output.stop_reason) == ("stop", ids[last])
    assert fake_of(engine).num_tokens == len("stop at") + last + 1
    assert EOS_ID not in ids[:last]


def test_stop_strings_and_streams_are_those_of_the_solo_run(tokenizer_folder: Path) -> None:
    text = bytes(greedy_by_hand("streamed", 24)).decode()
    params = SamplingParams(temperature=0, max_tokens=24, stop=[text[9:12]])
    right = answer(tokenizer_folder, "streamed", params)
    engine = pipelined(tokenizer_folder)
    for name, streams in (("a", True), ("b", False)):
        engine.add_request(name, "streamed", params, stream=streams)
    outputs, deltas = run(engine)
    assert outputs["a"].outputs == outputs["b"].outputs == right.outputs
    assert "".join(one.text for one in deltas) == right.outputs[0].text


def test_a_request_that_is_aborted_while_its_step_runs_ends_with_what_is_known(
    tokenizer_folder: Path,
) -> None:
    engine = pipelined(tokenizer_folder)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    for name in ("goes", "stays"):
        engine.add_request(name, name, params)
    for _ in range(6):
        engine.step()
    output = engine.abort("goes")
    assert output is not None
    assert output.outputs[0].token_ids == greedy_by_hand("goes", 6)[:6]
    outputs, _ = run(engine)
    assert len(outputs["stays"].outputs[0].token_ids) == 40
    assert "goes" not in outputs


def test_the_last_request_aborted_leaves_nothing_on_its_way(tokenizer_folder: Path) -> None:
    engine = pipelined(tokenizer_folder)
    engine.add_request("a", "only", SamplingParams(max_tokens=40, ignore_eos=True))
    for _ in range(3):
        engine.step()
    engine.abort("a")
    assert engine.has_work  # its step
    assert run(engine) == ({}, [])


def test_a_fork_waits_for_the_step_on_its_way_and_its_results_are_told(
    tokenizer_folder: Path,
) -> None:
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    engine = pipelined(tokenizer_folder)
    engine.add_request("a", "forked", params, stream=True)
    deltas = [one for _ in range(4) for one in engine.step().deltas]
    (name,) = engine.fork("a")
    outputs, rest = run(engine)
    assert outputs["a"].outputs[0].token_ids == outputs[name].outputs[0].token_ids
    told = [token for one in (*deltas, *rest) for token in one.token_ids]
    assert told == outputs["a"].outputs[0].token_ids


def test_answers_of_one_prompt_and_beams_are_as_without(tokenizer_folder: Path) -> None:
    for params in (
        SamplingParams(n=2, best_of=3, seed=4, max_tokens=9),
        SamplingParams(temperature=0, beam_width=3, n=2, max_tokens=9),
    ):
        engine = pipelined(tokenizer_folder)
        engine.add_request("group", "several", params)
        engine.add_request("other", "x", GREEDY)
        outputs, _ = run(engine)
        assert outputs["group"].outputs == answer(tokenizer_folder, "several", params).outputs
        assert outputs["other"].outputs == answer(tokenizer_folder, "x", GREEDY).outputs


def test_a_step_that_fails_ends_its_requests_and_those_behind_it_go_on(
    tokenizer_folder: Path,
) -> None:
    engine = pipelined(tokenizer_folder, max_num_seqs=2)
    fake, count = fake_of(engine), 0
    engine._runner._kv_cache.tensor.zero_()  # what the failed step leaves is read, and thrown away

    def before(input_ids: torch.Tensor) -> None:
        nonlocal count
        count += 1
        if count == 6:
            raise RuntimeError("injected")

    fake.before_step = before
    for name in ("a", "b", "c"):
        engine.add_request(name, name, SamplingParams(temperature=0, max_tokens=12))
    outputs, _ = run(engine)
    assert all("injected" in str(outputs[name].error) for name in ("a", "b"))
    assert [len(outputs[name].outputs[0].token_ids) for name in ("a", "b")] == [5, 5]
    assert outputs["c"].outputs[0].token_ids == greedy_by_hand("c", 12)


@pytest.mark.parametrize("error", ["injected", "CUDA out of memory. Tried to allocate 2 GiB."])
def test_behind_a_step_that_is_not_whole_nothing_is_launched(
    tokenizer_folder: Path, error: str
) -> None:
    """What it was to compute would be found by others while it runs."""
    engine = pipelined(tokenizer_folder, block_size=4)

    def before(input_ids: torch.Tensor) -> None:
        if input_ids.numel() > 8:
            raise RuntimeError(error)

    fake_of(engine).before_step = before
    engine.add_request("long", "0123456789ab", GREEDY)
    engine.add_request("short", "0123456", GREEDY)
    outputs, _ = run(engine)
    assert outputs["long"].error is not None
    assert outputs["short"].outputs == answer(tokenizer_folder, "0123456", GREEDY).outputs
    assert outputs["short"].num_cached_tokens == 0


def test_bad_logits_end_one_request_one_row_late(tokenizer_folder: Path) -> None:
    engine = pipelined(tokenizer_folder)

    def is_bad(context: np.ndarray) -> bool:
        return bytes(context[:3].astype(np.uint8)) == b"bad" and context.size == 8

    fake_of(engine).is_bad = is_bad
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    for name in ("bad", "good"):
        engine.add_request(name, name, params)
    outputs, _ = run(engine)
    assert "NaN or infinite logits" in str(outputs["bad"].error)
    assert len(outputs["bad"].outputs[0].token_ids) == 5
    assert outputs["good"].outputs == answer(tokenizer_folder, "good", params).outputs


def test_requests_that_come_later_find_what_earlier_steps_published(
    tokenizer_folder: Path,
) -> None:
    engine = pipelined(tokenizer_folder, block_size=4)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    engine.add_request("first", "0123456789ab", params)
    for _ in range(7):
        engine.step()
    engine.add_request("second", "0123456789ab", params)
    outputs, _ = run(engine)
    assert outputs["second"].num_cached_tokens == 8
    assert outputs["second"].outputs == outputs["first"].outputs


def test_a_recorded_run_is_not_pipelined(tokenizer_folder: Path, tmp_path: Path) -> None:
    engine = pipelined(tokenizer_folder)
    engine.observe(Recorder(tmp_path / "run.jsonl"))
    calls = watch(engine)
    engine.add_request("a", "steady", GREEDY)
    run(engine)
    assert calls[:4] == ["launch 1", "collect 1", "launch 2", "collect 2"]


def test_those_that_wait_for_blocks_stop_no_pipeline_and_start_after_an_end(
    tokenizer_folder: Path,
) -> None:
    options = {"num_gpu_blocks_override": 12, "block_size": 4, "watermark": 0.0}
    engine = pipelined(tokenizer_folder, enable_prefix_caching=False, **options)
    calls = watch(engine)
    asked = {
        name * length: SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        for name, length, num_tokens in (("a", 8, 20), ("b", 7, 6), ("c", 36, 3), ("d", 33, 3))
    }
    for prompt, params in asked.items():
        engine.add_request(prompt, prompt, params)
    for _ in range(4):
        engine.step()
    assert engine.num_waiting == 2
    assert calls[-4:] == ["launch 4", "collect 3", "launch 5", "collect 4"]
    outputs, _ = run(engine)
    for prompt, params in asked.items():
        assert outputs[prompt].outputs == answer(tokenizer_folder, prompt, params).outputs
        assert outputs[prompt].num_preemptions == 0


def test_a_request_that_comes_while_others_wait_is_looked_at_at_once(
    tokenizer_folder: Path,
) -> None:
    options = {"num_gpu_blocks_override": 12, "block_size": 4, "watermark": 0.0}
    engine = pipelined(tokenizer_folder, enable_prefix_caching=False, **options)
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    engine.add_request("runs", "r" * 8, params)
    few = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    engine.add_request("large", "l" * 41, few)
    for _ in range(4):
        engine.step()
    assert (engine.num_running, engine.num_waiting) == (1, 1)
    engine.add_request("small", "s", params)
    for _ in range(2):
        engine.step()
    assert (engine.num_running, engine.num_waiting) == (2, 1)
