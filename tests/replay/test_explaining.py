"""A recording explains what the engine explained."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from recorded_runs import RecordedRun, random_run

from pagedkv.replay import RecordingError, explain, load
from pagedkv.sampling_params import SamplingParams


@pytest.mark.parametrize("seed", range(4))
def test_a_recording_explains_every_request_as_the_engine_does(
    tokenizer_folder: Path, tmp_path: Path, seed: int
) -> None:
    options: dict[str, Any] = {"scheduling_policy": "priority"} if seed % 2 else {}
    if seed > 1:
        options |= {"swap_space": 1e-6, "enable_kv_offloading": seed > 2}
        options["preemption_mode"] = "swap"
    run = RecordedRun(tokenizer_folder, tmp_path / "run.jsonl", **options)
    random_run(run, 20 + seed)
    recording = run.recording()
    found = explain(recording)
    assert len(found) >= 12
    kinds = set()
    for one in found:
        (live,) = run.engine.explain(one.request_id)
        assert one.text == live.text
        kinds |= {decision.kind for decision in one.decisions}
    assert kinds >= {"queued", "admitted", "evicted", "waits", "finished"}


def test_answers_of_one_prompt_are_explained_together_and_a_fork_alone(
    tokenizer_folder: Path, tmp_path: Path
) -> None:
    run = RecordedRun(tokenizer_folder, tmp_path / "run.jsonl")
    run.engine.add_request("group", "hello", SamplingParams(max_tokens=5, n=3, ignore_eos=True))
    run.engine.add_request("a", "there", SamplingParams(max_tokens=9, ignore_eos=True))
    run.engine.step()
    run.engine.step()
    run.engine.fork("a", 1)
    recording = run.recording()
    assert [one.request_id for one in explain(recording, "group")] == [
        "group-0",
        "group-1",
        "group-2",
    ]
    (fork,) = explain(recording, "a-1")
    assert "ends: length, 9 tokens generated" in fork.text
    with pytest.raises(KeyError, match=r"request 'b' is not in .*, which has 3: group, a, a-1"):
        explain(recording, "b")


def test_an_id_used_again_is_explained_apart(tokenizer_folder: Path, tmp_path: Path) -> None:
    run = RecordedRun(tokenizer_folder, tmp_path / "run.jsonl")
    for max_tokens in (2, 5):
        run.engine.add_request("a", "hello", SamplingParams(max_tokens=max_tokens, ignore_eos=True))
        run.finish()
    first, second = explain(run.recording())
    assert (first.request_id, second.request_id) == ("a", "a (2)")
    assert "2 tokens generated" in first.text
    assert "5 tokens generated" in second.text


def test_requests_that_have_ended_long_ago_are_all_there(
    tokenizer_folder: Path, tmp_path: Path
) -> None:
    run = RecordedRun(tokenizer_folder, tmp_path / "run.jsonl")
    for i in range(300):
        run.engine.add_request(str(i), "x", SamplingParams(max_tokens=1))
    assert len(explain(run.recording())) == 300


def test_what_came_after_the_last_step_is_told_too(tokenizer_folder: Path, tmp_path: Path) -> None:
    run = RecordedRun(tokenizer_folder, tmp_path / "run.jsonl")
    run.engine.add_request("a", "hello", SamplingParams(max_tokens=5))
    (one,) = explain(load(run.recorder.path))
    assert one.text.startswith("step 0: queued with 5 prompt tokens")


def test_a_decision_that_is_not_whole_is_told(tokenizer_folder: Path, tmp_path: Path) -> None:
    run = RecordedRun(tokenizer_folder, tmp_path / "run.jsonl")
    run.engine.add_request("a", "hello", SamplingParams(max_tokens=1))
    recording = run.recording()
    for notes in ([{"kind": "waits"}], [dict(recording.steps[0].notes[0], kind="dance")]):
        steps = [dataclasses.replace(recording.steps[0], notes=notes)]
        with pytest.raises(RecordingError, match="a decision is not whole"):
            explain(dataclasses.replace(recording, steps=steps))
