"""Memory that does not suffice inside a step: its rows run in parts, only what does not fit alone
fails, and the engine lives on. The device's memory is a bound on the tokens of one forward pass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_model import make_engine
from harness import answer, fake_of, greedy_by_hand, run

from pagedkv.engine import Engine, model_runner
from pagedkv.engine.step_parts import Part, join_samples, part_of, run_in_parts, samples_of
from pagedkv.records import empty_step
from pagedkv.replay import Recorder, compare, settings_of
from pagedkv.replay import load as load_recording
from pagedkv.sampling import TokenScores
from pagedkv.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=12)


def bounded(engine: Engine, most_tokens: int) -> list[int]:
    """No forward pass of more tokens fits; returns what was tried."""
    tried: list[int] = []

    def before(input_ids: torch.Tensor) -> None:
        tried.append(input_ids.numel())
        if input_ids.numel() > most_tokens:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")

    fake_of(engine).before_step = before
    return tried


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("most_tokens", [1, 2, 5, 9])
def test_a_step_that_does_not_fit_runs_in_parts_and_changes_no_answer(
    tokenizer_folder: Path, most_tokens: int, async_scheduling: bool
) -> None:
    engine = make_engine(
        tokenizer_folder,
        max_num_seqs=9,
        max_num_batched_tokens=9,
        async_scheduling=async_scheduling,
    )
    tried = bounded(engine, most_tokens)
    names = "abcdefgh"  # of a token each, so that every row fits alone
    for name in names:
        engine.add_request(name, name, GREEDY)
    outputs, _ = run(engine)
    for name in names:
        assert outputs[name].error is None
        assert outputs[name].outputs[0].token_ids == greedy_by_hand(name, 12)
    assert max(tried) > most_tokens or most_tokens == 9


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_what_does_not_fit_alone_fails_and_nobody_else_does(
    tokenizer_folder: Path, async_scheduling: bool
) -> None:
    engine = make_engine(tokenizer_folder, async_scheduling=async_scheduling, block_size=4)
    bounded(engine, 8)
    long, others = "a prompt that is too long", ("x", "yy", "zzz")
    for name in (*others, long):
        engine.add_request(name, name, GREEDY)
    outputs, _ = run(engine)
    assert "memory does not suffice for its part of a step even alone" in str(outputs[long].error)
    assert outputs[long].outputs[0].finish_reason == "error"
    assert outputs[long].outputs[0].token_ids == []
    for name in others:
        assert outputs[name].outputs[0].token_ids == greedy_by_hand(name, 12)
    # Nothing of it was published: the same prompt finds no prefix, and is answered once it fits.
    bounded(engine, 10**6)
    engine.add_request("again", long, GREEDY)
    again = run(engine)[0]["again"]
    assert again.num_cached_tokens == 0
    assert again.outputs[0].token_ids == greedy_by_hand(long, 12)


WORDS = {  # of torch's allocator, of the CUDA runtime, of cuBLAS, of this project's CUDA ops
    "allocator": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB."),
    "runtime": RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be"),
    "cublas": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"),
    "op": RuntimeError("pagedkv: CUDA out of memory: no 64 bytes for a workspace"),
}


@pytest.mark.parametrize("kind", WORDS)
def test_every_error_that_tells_of_memory_makes_parts_and_no_other(
    tokenizer_folder: Path, kind: str
) -> None:
    engine = make_engine(tokenizer_folder, max_num_seqs=9, max_num_batched_tokens=9)
    error: RuntimeError = WORDS[kind]

    def before(input_ids: torch.Tensor) -> None:
        if input_ids.numel() > 2:
            raise error

    fake_of(engine).before_step = before
    for name in "abcd":
        engine.add_request(name, name, GREEDY)
    outputs, _ = run(engine)
    for name in "abcd":
        assert outputs[name].outputs[0].token_ids == greedy_by_hand(name, 12)
    error = RuntimeError("CUDA error: an illegal memory access was encountered")
    for name in "efg":
        engine.add_request(name, name, GREEDY)
    outputs, _ = run(engine)
    assert "illegal memory access" in str(outputs["e"].error)


def test_a_chunk_in_the_middle_of_a_prompt_fails_its_request_alone(tokenizer_folder: Path) -> None:
    engine = make_engine(tokenizer_folder, max_num_seqs=4, max_num_batched_tokens=8, block_size=4)
    engine.add_request("short", "s", GREEDY)
    engine.step()
    engine.add_request("long", "of twenty-four characters", GREEDY)
    bounded(engine, 6)  # chunks are of 7 tokens beside one decode
    outputs, _ = run(engine)
    assert outputs["long"].error is not None
    assert outputs["short"].outputs[0].token_ids == greedy_by_hand("s", 12)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_scores_that_do_not_fit_leave_the_tokens_that_the_step_is_tried_again_with(
    tokenizer_folder: Path, async_scheduling: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(tokenizer_folder, async_scheduling=async_scheduling)
    score, tried = model_runner.score_tokens, []

    def scored(*operands: Any) -> TokenScores:
        tried.append(operands)
        if len(tried) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
        return score(*operands)

    monkeypatch.setattr(model_runner, "score_tokens", scored)
    for name in "abc":
        engine.add_request(name, name, GREEDY)
    for _ in range(3):
        engine.step()
    params = dataclasses.replace(GREEDY, prompt_logprobs=1)
    engine.add_request("scored", "scored", params)
    outputs, _ = run(engine)
    assert len(tried) > 1
    for name in (*"abc", "scored"):
        assert outputs[name].outputs[0].token_ids == greedy_by_hand(name, 12)
    right = answer(tokenizer_folder, "scored", params)
    assert outputs["scored"].prompt_logprobs == right.prompt_logprobs


def test_log_probabilities_that_do_not_fit_are_computed_elsewhere(
    tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = dataclasses.replace(GREEDY, logprobs=2)
    right = {name: answer(tokenizer_folder, name, params) for name in "ab"}
    score, tried = model_runner.score_tokens, []

    def scored(*operands: Any) -> TokenScores:
        tried.append(operands)
        if len(tried) % 3 == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")
        return score(*operands)

    monkeypatch.setattr(model_runner, "score_tokens", scored)
    engine = make_engine(tokenizer_folder)
    for name in "ab":
        engine.add_request(name, name, params)
    outputs, _ = run(engine)
    assert len(tried) > 12
    assert {name: outputs[name].outputs for name in "ab"} == {
        name: right[name].outputs for name in "ab"
    }


def test_log_probabilities_and_answers_of_one_prompt_are_those_of_the_whole(
    tokenizer_folder: Path,
) -> None:
    cases: dict[str, Any] = {
        "logprobs": SamplingParams(temperature=0, max_tokens=6, logprobs=2, prompt_logprobs=1),
        "several": SamplingParams(n=2, best_of=3, seed=4, max_tokens=6),
        "beams": SamplingParams(temperature=0, beam_width=3, n=2, max_tokens=6),
    }
    engine = make_engine(tokenizer_folder)
    tried = bounded(engine, 9)
    for name, params in cases.items():
        engine.add_request(name, name, params)
    outputs, _ = run(engine)
    assert max(tried) > 9
    for name, params in cases.items():
        right = answer(tokenizer_folder, name, params)
        assert outputs[name].outputs == right.outputs
        assert outputs[name].prompt_logprobs == right.prompt_logprobs


def test_copies_of_a_step_run_once(tokenizer_folder: Path) -> None:
    """The block that a copy was made of may have been written since."""
    engine = make_engine(tokenizer_folder, block_size=16)
    cache, copied = engine._runner._kv_cache, []
    copy_blocks = cache.copy_blocks
    cache.copy_blocks = lambda pairs: (copied.append(pairs.tolist()), copy_blocks(pairs))  # type: ignore[method-assign]
    bounded(engine, 1)
    engine.add_request("g", "g", SamplingParams(n=3, seed=1, max_tokens=8))
    output = run(engine)[0]["g"]
    right = answer(tokenizer_folder, "g", SamplingParams(n=3, seed=1, max_tokens=8))
    assert output.outputs == right.outputs
    assert len(copied) == 1


def test_other_errors_are_not_taken_for_lack_of_memory(tokenizer_folder: Path) -> None:
    engine = make_engine(tokenizer_folder)

    def fail(input_ids: torch.Tensor) -> None:
        raise RuntimeError("injected")

    fake_of(engine).before_step = fail
    engine.add_request("a", "a", GREEDY)
    assert "the step failed: RuntimeError: injected" in str(run(engine)[0]["a"].error)


def test_a_recorded_step_with_a_row_that_does_not_fit_fails_whole(
    tokenizer_folder: Path, tmp_path: Path
) -> None:
    """A recording has no words for a chunk without a sample that failed alone."""
    engine = make_engine(tokenizer_folder)
    engine.observe(Recorder(tmp_path / "run.jsonl"))
    bounded(engine, 8)
    for name in ("x", "a prompt that is too long"):
        engine.add_request(name, name, GREEDY)
    outputs, _ = run(engine)
    assert all("MemoryError" in str(one.error) for one in outputs.values())
    bounded(engine, 2)
    for name in ("b", "c", "d"):  # in parts all fit, and are recorded like any step
        engine.add_request(name, name, GREEDY)
    outputs, _ = run(engine)
    assert all(one.error is None for one in outputs.values())
    recording = load_recording(tmp_path / "run.jsonl")
    assert compare(recording, settings_of(recording)).difference is None


# -- parts -----------------------------------------------------------------------------------


def step_of(query_lens: list[int]) -> Any:
    count = len(query_lens)
    return dataclasses.replace(
        empty_step(),
        slots=np.arange(count),
        seq_ids=np.arange(count) + 100,
        query_lens=np.array(query_lens),
        sample_rows=np.array([0, 0, *range(2, count)]),  # row 0 twice, row 1 not
        sample_draws=np.arange(count),
        num_tokens=sum(query_lens),
    )


def below(most: int) -> Callable[[Any], list[int] | None]:
    return lambda part: part.slots.tolist() if part.num_tokens <= most else None


def test_parts_are_halves_by_tokens_down_to_rows() -> None:
    step = step_of([1, 1, 1, 1, 4, 30, 2])
    done, unfit = run_in_parts(step, below(40))
    assert done == [(Part(0, 7), list(range(7)))]
    assert unfit == []
    done, unfit = run_in_parts(step, below(8))
    assert [row for part, rows in done for row in rows] == [0, 1, 2, 3, 4, 6]
    assert all(rows == list(range(*part)) for part, rows in done)
    assert unfit == [5]
    done, unfit = run_in_parts(step, below(0))
    assert (done, unfit) == ([], list(range(7)))


def test_a_part_has_its_own_samples_and_joins_the_whole() -> None:
    step = step_of([1, 5, 1, 2])
    parts = [Part(0, 2), Part(2, 4)]
    first, second = (part_of(step, part) for part in parts)
    assert (first.sample_rows.tolist(), second.sample_rows.tolist()) == ([0, 0], [0, 1])
    assert (first.num_tokens, second.num_tokens) == (6, 3)
    assert second.seq_ids.tolist() == [102, 103]
    assert second.sample_draws.tolist() == [2, 3]
    assert [samples_of(step, part).tolist() for part in parts] == [[0, 1], [2, 3]]
    tokens = [(parts[1], torch.tensor([7, 8]))]
    assert join_samples(step, tokens, nothing=-1).tolist() == [-1, -1, 7, 8]
    assert join_samples(step, [], nothing=-1).tolist() == [-1] * 4
