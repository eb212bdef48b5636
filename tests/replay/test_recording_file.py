"""Reading a recording: cut short anywhere it loads; what is malformed is told with its line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from recorded_runs import RecordedRun, random_run

from pagedkv.replay import RecordingError, first_difference, load
from pagedkv.replay.recording import Arrival, Fork
from pagedkv.sampling_params import SamplingParams


@pytest.fixture(scope="module")
def recorded(tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("recorded") / "run.jsonl"
    run = RecordedRun(tokenizer_folder, path)
    random_run(run, 7, num_requests=5)
    run.recording()
    return path.read_bytes()


def test_a_file_cut_short_anywhere_loads_and_replays(recorded: bytes, tmp_path: Path) -> None:
    path = tmp_path / "cut.jsonl"
    header = recorded.index(b"\n") + 1
    for length in range(header, len(recorded), len(recorded) // 40):
        path.write_bytes(recorded[:length])
        recording = load(path)
        assert recording.is_cut == (recorded[length - 1 : length] != b"\n")
        num_lines = recorded[:length].count(b"\n")
        assert len(recording.steps) + len(recording.events) == num_lines - 1
        assert first_difference(recording) is None


def edited(change: Callable[[dict[str, Any]], None]) -> Callable[[bytes], bytes]:
    def edit(line: bytes) -> bytes:
        value = json.loads(line)
        change(value)
        return json.dumps(value).encode()

    return edit


MALFORMED: dict[str, tuple[int, Callable[[bytes], bytes], str]] = {
    "no JSON": (2, lambda _: b"hello", "not JSON"),
    "deep": (2, lambda _: b"[" * 100_000, "not JSON"),
    "a list": (2, lambda _: b"[1]", "must be an object, got list"),
    "no header": (1, lambda _: b'{"kind":"step"}', "format must be 'pagedkv recording', got None"),
    "version": (1, edited(lambda v: v.update(version=9)), "version 9 of the format"),
    "setting": (1, edited(lambda v: v["cache"].update(colour=1)), "CacheConfig has no colour"),
    "block size": (1, edited(lambda v: v["cache"].update(block_size=0)), "block_size must be at"),
    "tokens": (1, edited(lambda v: v.update(tokens="words")), "tokens must be ids or pseudonyms"),
    "fact": (1, edited(lambda v: v["facts"].pop("num_blocks")), "num_blocks"),
    "no blocks": (1, edited(lambda v: v["facts"].update(num_blocks=0)), "num_blocks must be at"),
    "length": (1, edited(lambda v: v["facts"].update(max_model_len="x")), "max_model_len must be"),
    "CPU": (1, edited(lambda v: v["facts"].update(num_cpu_blocks=-1)), "num_cpu_blocks must be"),
    "salts": (
        2,
        edited(lambda v: v.update(stop_ids=["x"])),
        "stop_ids must hold values of type int",
    ),
    "kind": (2, edited(lambda v: v.update(kind="party")), "unknown kind 'party'"),
    "missing": (2, edited(lambda v: v.pop("prompt")), "'prompt' is missing"),
    "prompt": (2, edited(lambda v: v.update(prompt=[-5])), "no token ids"),
    "huge": (2, edited(lambda v: v.update(prompt=[2**40])), "no token ids"),
    "empty": (2, edited(lambda v: v.update(prompt=[])), "empty prompt"),
    "time": (2, edited(lambda v: v.update(time="noon")), "time must be a number of seconds"),
    "no end": (2, edited(lambda v: v.update(time=1e999)), "time must be a number of seconds"),
    "type": (2, edited(lambda v: v.update(max_tokens="8")), "max_tokens must be of type int"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_what_is_malformed_is_told_with_its_line(
    recorded: bytes, tmp_path: Path, name: str
) -> None:
    number, edit, message = MALFORMED[name]
    lines = recorded.splitlines()
    lines[number - 1] = edit(lines[number - 1])
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n")
    with pytest.raises(RecordingError) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}, line {number}: ")
    assert message in str(caught.value)


STEPS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "tokens": (lambda v: v["token_ids"].append(600), "rows are sampled, but there are"),
    "rows": (lambda v: v["step"]["sample_rows"].__setitem__(0, 99), "are not rows of the step's"),
    "draws": (lambda v: v["step"]["sample_draws"].append(0), "rows are sampled with"),
    "ids": (lambda v: v["token_ids"].__setitem__(0, 2**31), "token_ids holds numbers that are no"),
    "count": (lambda v: v["work"].update(num_samples=-1), "num_samples must be a count, got -1"),
    "slot": (lambda v: v["step"]["admitted"].clear(), "is missing"),
    "reason": (lambda v: v["ended"].append(v["ended"][0] | {"reason": "tired"}), "reason must be"),
    "failure": (lambda v: v.update(failure=3), "failure must be text"),
    "work": (lambda v: v["work"].update(num_miles=3), "StepWork has no num_miles"),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_malformed_step_is_told(tokenizer_folder: Path, tmp_path: Path, name: str) -> None:
    path = tmp_path / "run.jsonl"
    run = RecordedRun(tokenizer_folder, path)
    run.engine.add_request("a", "hi", SamplingParams(max_tokens=1))
    run.recording()
    change, message = STEPS[name]
    lines = path.read_bytes().splitlines()
    lines[2] = edited(change)(lines[2])
    path.write_bytes(b"\n".join(lines) + b"\n")
    with pytest.raises(RecordingError, match="line 3: ") as caught:
        load(path)
    assert message in str(caught.value)


def test_candidates_that_do_not_fit_together_are_told(
    tokenizer_folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "run.jsonl"
    run = RecordedRun(tokenizer_folder, path)
    run.engine.add_request("a", "hi", SamplingParams(temperature=0, max_tokens=2, beam_width=2))
    run.recording()
    lines = path.read_bytes().splitlines()
    lines[2] = edited(lambda v: v["candidates"]["marks"].append(1))(lines[2])
    path.write_bytes(b"\n".join(lines) + b"\n")
    with pytest.raises(RecordingError, match="line 3: candidates of different lengths"):
        load(path)


@pytest.mark.parametrize("content", [b"", b"half a header"])
def test_a_file_without_a_header_is_no_recording(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "none"
    path.write_bytes(content)
    with pytest.raises(RecordingError, match="line 1: no recording starts here"):
        load(path)


def test_a_changed_decision_is_found(recorded: bytes, tmp_path: Path) -> None:
    path = tmp_path / "changed.jsonl"
    path.write_bytes(recorded.replace(b'"block_size":4', b'"block_size":5', 1))
    assert "step 1 differs in " in str(first_difference(load(path)))


def test_an_id_used_twice_stands_for_two_sequences(tokenizer_folder: Path, tmp_path: Path) -> None:
    run = RecordedRun(tokenizer_folder, tmp_path / "run.jsonl")
    for _ in range(2):
        run.engine.add_request("a", "hello", SamplingParams(temperature=0, max_tokens=4))
        run.engine.step()
        run.engine.fork("a", 1)
        run.finish()
    recording = run.recording()
    keys = [event.key for event in recording.events if isinstance(event, Arrival | Fork)]
    assert keys == ["a", "a", "a (2)", "a (2)"]
    assert [key for step in recording.steps for key in step.samples].count("a-1 (2)") == 3
