"""What a recording holds, what it does not tell, and that it never disturbs the run."""

from __future__ import annotations

import json
import logging
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_model import make_engine
from harness import fake_of
from recorded_runs import SMALL, RecordedRun

from pagedkv.replay import Recorder, load
from pagedkv.replay.checking import first_difference
from pagedkv.replay.lines import plain
from pagedkv.replay.recording import Arrival
from pagedkv.replay.scripts import Scripts
from pagedkv.replay.token_names import RESERVED
from pagedkv.sampling_params import SamplingParams


@dataclass
class NestedRecord:
    number: np.int64


GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def prompts_of(path: Path) -> dict[str, list[int]]:
    return {line["request_id"]: line["prompt"] for line in lines_of(path) if "prompt" in line}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.jsonl"


def test_the_first_line_has_settings_sizes_and_version(tokenizer_folder: Path, path: Path) -> None:
    RecordedRun(tokenizer_folder, path, swap_space=1e-6)
    (header,) = lines_of(path)
    assert (header["format"], header["version"]) == ("pagedkv recording", 1)
    assert header["tokens"] == "pseudonyms"
    assert header["cache"]["block_size"] == 4
    assert header["scheduler"]["max_num_seqs"] == 6
    assert header["facts"]["num_blocks"] == 30
    assert header["facts"]["num_cpu_blocks"] == int(1e-6 * 2**30) // (8 * 4)


def test_times_count_from_the_beginning_and_steps_say_what_they_did(
    tokenizer_folder: Path, path: Path
) -> None:
    run = RecordedRun(tokenizer_folder, path)
    run.clock.now_s += 0.5
    run.engine.add_request("a", "x" * 30, SamplingParams(temperature=0, max_tokens=3))
    recording = run.recording()
    (arrival,) = recording.events
    assert isinstance(arrival, Arrival)
    assert (arrival.time_s, arrival.num_steps) == (0.5, 0)
    chunk, rest, *decodes = recording.steps
    assert [chunk.start_s, chunk.seconds] == pytest.approx([0.5, 0.016])
    assert (chunk.work.num_prefill_tokens, chunk.work.num_prefill_pairs) == (24, 24 * 25 // 2)
    assert (rest.work.num_prefill_tokens, rest.work.num_prefill_pairs) == (6, 6 * 24 + 21)
    assert [step.work.num_context_tokens for step in decodes] == [31, 32]
    assert [step.samples for step in recording.steps] == [[], ["a"], ["a"], ["a"]]
    assert recording.steps[-1].ends == [("a", "length", 3)]
    assert recording.steps[0].statistics["num_referenced"] == 6


def test_a_step_behind_a_window_reads_the_window(tokenizer_folder: Path, path: Path) -> None:
    run = RecordedRun(tokenizer_folder, path, window=8)
    run.engine.add_request("a", "0123456789", SamplingParams(max_tokens=2, ignore_eos=True))
    recording = run.recording()
    assert recording.facts.window == 8
    chunks = [step.work.num_prefill_tokens for step in recording.steps[:-1]]
    pairs = [step.work.num_prefill_pairs for step in recording.steps[:-1]]
    seen = [min(i, 8) for i in range(1, 11)]
    assert sum(chunks) == 10
    assert pairs == [sum(seen[: chunks[0]]), sum(seen[chunks[0] :])]
    assert recording.steps[-1].work.num_context_tokens == 8


def test_nothing_of_the_content_can_be_read_or_counted(tokenizer_folder: Path, path: Path) -> None:
    run = RecordedRun(tokenizer_folder, path)
    params = SamplingParams(temperature=0.5, seed=987654321, max_tokens=8, stop=["secret stop"])
    run.engine.add_request("a", "a" * 40, params, cache_salt="tenant seven")
    run.recording()
    text = path.read_text()
    for private in ("aaa", "secret", "987654321", "tenant", "97,97"):
        assert private not in text
    (prompt,) = prompts_of(path).values()
    assert len(set(prompt)) == 40
    assert min(prompt) >= RESERVED


def test_equal_beginnings_look_equal_and_nothing_else_does(
    tokenizer_folder: Path, path: Path
) -> None:
    run = RecordedRun(tokenizer_folder, path)
    for name, prompt, salt in (
        ("one", "x" * 21 + "abcdef" * 5, None),
        ("two", "x" * 21 + "Abcdef" * 5, None),
        ("three", "x" * 21 + "abcdef" * 5, "salt"),
    ):
        run.engine.add_request(name, prompt, GREEDY, cache_salt=salt)
    one, two, three = prompts_of(path).values()
    assert one[:21] == two[:21]
    assert not set(one[21:]) & set(two[21:])
    assert not set(one) & set(three)


def test_a_prompt_that_repeats_an_answer_matches_it(tokenizer_folder: Path, path: Path) -> None:
    """As the next turn of a conversation does."""
    run = RecordedRun(tokenizer_folder, path)
    prompt = [*b"the first turn"]
    run.engine.add_request("a", prompt, GREEDY)
    outputs = []
    while run.engine.has_work:
        outputs += run.engine.step().finished
    run.engine.add_request("b", [*prompt, *outputs[0].outputs[0].token_ids, 5, 6], GREEDY)
    recording = run.recording()
    first, second = prompts_of(path).values()
    answer = Scripts(recording).of("a").token_ids
    assert len(answer) == 20
    assert second[: len(first) + 20] == first + answer


def test_two_recordings_share_no_pseudonym(tokenizer_folder: Path, tmp_path: Path) -> None:
    prompts = []
    for name in ("one", "two"):
        run = RecordedRun(tokenizer_folder, tmp_path / name)
        run.engine.add_request("a", "the same prompt", GREEDY)
        prompts += prompts_of(tmp_path / name).values()
    assert not set(prompts[0]) & set(prompts[1])


def test_token_ids_stay_as_they_are_when_asked(tokenizer_folder: Path, path: Path) -> None:
    run = RecordedRun(tokenizer_folder, path, keep_token_ids=True)
    run.engine.add_request("a", "hello", SamplingParams(temperature=0, max_tokens=5, n=2))
    outputs = []
    while run.engine.has_work:
        outputs += run.engine.step().finished
    recording = run.recording()
    assert recording.is_plain
    assert prompts_of(path) == {"a": [*b"hello"]}
    scripts = Scripts(recording)
    for answer in outputs[0].outputs:
        assert scripts.of(f"a-{answer.index}").token_ids == answer.token_ids


@pytest.mark.parametrize("keep_token_ids", [False, True])
def test_a_row_without_usable_logits_is_recorded_as_failed(
    tokenizer_folder: Path, path: Path, keep_token_ids: bool
) -> None:
    run = RecordedRun(tokenizer_folder, path, keep_token_ids=keep_token_ids)
    fake_of(run.engine).is_bad = lambda context: bytes(context[:3].tolist()) == b"bad"
    for name in ("good", "bad"):
        run.engine.add_request(name, name, SamplingParams(max_tokens=3, ignore_eos=True))
    recording = run.recording()
    assert [step.failed for step in recording.steps] == [[1], [], []]
    assert recording.steps[0].samples == ["good", "bad"]
    scripts = Scripts(recording)
    assert (len(scripts.of("good").token_ids), scripts.of("bad").token_ids) == (3, [])
    assert first_difference(recording) is None


def test_a_stop_id_stands_as_its_place_among_the_stop_ids(
    tokenizer_folder: Path, path: Path
) -> None:
    run = RecordedRun(tokenizer_folder, path)
    every = SamplingParams(temperature=0, stop_token_ids=list(range(97, 123)))
    run.engine.add_request("a", "hello", every)
    recording = run.recording()
    (arrival,) = recording.events
    assert isinstance(arrival, Arrival)
    assert arrival.request.stop_token_ids == tuple(range(27))
    assert recording.steps[-1].ends == [("a", "stop", 1)]
    assert recording.steps[-1].token_ids[0] < 27


def test_only_the_owner_can_read_it_and_no_file_is_written_over(path: Path) -> None:
    Recorder(path).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(FileExistsError, match="exists already"):
        Recorder(path)


def answers(engine: Any, prompts: int = 4) -> dict[str, list[int]]:
    for i in range(prompts):
        engine.add_request(str(i), f"prompt {i}", GREEDY)
    found: dict[str, list[int]] = {}
    while engine.has_work:
        for output in engine.step().finished:
            found[output.request_id] = output.outputs[0].token_ids
    return found


@pytest.mark.parametrize("fault", ["full disk", "closed", "broken"])
def test_a_recording_that_fails_ends_and_the_run_goes_on(
    tokenizer_folder: Path,
    path: Path,
    fault: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = answers(make_engine(tokenizer_folder, **SMALL))
    run = RecordedRun(tokenizer_folder, path)
    run.engine.add_request("before", "hello", SamplingParams(max_tokens=1))
    run.finish()
    if fault == "full disk":
        monkeypatch.setattr(run.recorder, "_file", open("/dev/full", "wb"))  # noqa: SIM115
    elif fault == "closed":
        run.recorder._file.raw.close()
    else:
        monkeypatch.setattr(run.recorder, "_names", None)
    with caplog.at_level(logging.ERROR):
        assert answers(run.engine) == expected
    (error,) = caplog.records
    assert "run.jsonl ends here, the run goes on" in error.getMessage()
    assert not run.recorder.is_open
    assert len(load(path).steps) == 1


def test_a_closed_recorder_writes_no_more(tokenizer_folder: Path, path: Path) -> None:
    run = RecordedRun(tokenizer_folder, path)
    run.engine.add_request("a", "hello", GREEDY)
    run.engine.step()
    run.recorder.close()
    size = path.stat().st_size
    run.finish()
    assert path.stat().st_size == size
    assert len(load(path).steps) == 1


def test_a_header_that_cannot_be_written_is_told_at_once(
    tokenizer_folder: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(tokenizer_folder)
    recorder = Recorder(path)
    monkeypatch.setattr(recorder, "_file", open("/dev/full", "wb"))  # noqa: SIM115
    with pytest.raises(OSError, match="No space left"):
        engine.observe(recorder)


def test_any_record_has_a_form_in_a_line() -> None:
    value = {"a": np.float64(0.5), "b": (np.arange(2), None), 3: NestedRecord(np.int64(7))}
    assert plain(value) == {"a": 0.5, "b": [[0, 1], None], "3": {"number": 7}}
    with pytest.raises(TypeError, match="which has no form in a recording"):
        plain({"a": object()})
