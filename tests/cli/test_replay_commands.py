"""generate --record, replay and explain: a recorded run, without its model."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_model import FakeModel

README = (Path(__file__).parents[2] / "README.md").read_text()
PROMPTS = [arg for one in ("first", "second one", "third") for arg in ("-p", one * 6)]
SMALL = ["--block-size", "4", "--num-gpu-blocks-override", "30", "--ignore-eos"]
RUN = ["generate", "fake", *PROMPTS, *SMALL, "--max-tokens", "40"]


@pytest.fixture
def recorded(run: Any, tmp_path: Path) -> str:
    path = str(tmp_path / "run.jsonl")
    assert run(*RUN, "--record", path).code == 0
    return path


def test_recording_changes_no_answer_and_explains_the_same(run: Any, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    plain = run(*RUN)
    with_record = run(*RUN, "--record", str(path), "--explain")
    assert with_record.out == plain.out
    live = with_record.err.split("== why: ")
    for number in range(3):
        text = live[number + 1].split("\n", 1)[1]
        shown = run("explain", str(path), str(number))
        assert shown.out == f"== request {number}\n{text}"
        assert shown.code == 0
    assert "preempted since the step needs" in with_record.err


def test_explain_without_an_id_tells_of_all_and_json_has_the_numbers(
    run: Any, recorded: str
) -> None:
    every = run("explain", recorded)
    assert re.findall("^== request (.*)$", every.out, flags=re.MULTILINE) == ["0", "1", "2"]
    rows = [json.loads(line) for line in run("explain", recorded, "--json").out.splitlines()]
    assert [row["request_id"] for row in rows] == ["0", "1", "2"]
    first = rows[0]["decisions"][0]
    assert (first["kind"], first["numbers"]["prompt_len"]) == ("queued", 30)


def test_replay_reports_as_text_and_as_json(run: Any, recorded: str) -> None:
    text = run("replay", recorded, "--max-num-seqs", "1").out
    assert "it decides the same in all" in text
    assert "max_num_seqs 256 -> 1" in text
    value = json.loads(run("replay", recorded, "--json").out)
    assert value["changed"] is None
    assert value["modelled"]["num_generated"] == 120


OPTIONS = {
    "--block-size 8": "block_size 4 -> 8, num_blocks 30 -> 15",
    "--num-gpu-blocks-override 44": "num_blocks 30 -> 44",
    "--no-enable-prefix-caching": "enable_prefix_caching True -> False",
    "--watermark 0.25": "watermark 0.01 -> 0.25",
    "--swap-space 0.00001": "num_cpu_blocks 0 -> 335",
    "--swap-space 0.00001 --enable-kv-offloading": (
        "enable_kv_offloading False -> True, num_cpu_blocks 0 -> 335"
    ),
    "--preemption-mode swap": "preemption_mode auto -> swap",
    "--scheduling-policy priority": "scheduling_policy fcfs -> priority",
    "--max-num-seqs 2": "max_num_seqs 256 -> 2",
    "--max-num-batched-tokens 300": "max_num_batched_tokens 2048 -> 300",
}


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_reaches_the_replay(run: Any, recorded: str, option: str) -> None:
    result = run("replay", recorded, *option.split())
    assert result.code == 0, result.err
    assert f"settings: {OPTIONS[option]}\n" in result.out


def test_token_ids_are_recorded_when_asked(run: Any, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    run("generate", "fake", "-p", "hello", "--record", str(path), "--record-tokens")
    assert '"prompt":[104,101,108,108,111]' in path.read_text()


def test_a_chat_is_recorded_turn_by_turn(run: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "run.jsonl")
    run("chat", "fake", "--max-tokens", "5", "--record", path, stdin="hi\nagain\n")
    assert re.findall("^== request (.*)$", run("explain", path).out, flags=re.MULTILINE) == [
        "turn-1",
        "turn-2",
    ]


def test_a_file_that_exists_is_told_before_the_model_loads(
    run: Any, recorded: str, fakes: list[FakeModel]
) -> None:
    num_loaded, before = len(fakes), Path(recorded).read_bytes()
    result = run(*RUN, "--record", recorded)
    assert result.code == 1
    assert "exists already: --record makes a new file" in result.err
    assert run(*RUN, "--record-tokens").code == 2
    assert len(fakes) == num_loaded
    assert Path(recorded).read_bytes() == before


def test_errors_have_their_exit_codes(run: Any, recorded: str, tmp_path: Path) -> None:
    bad, short = tmp_path / "bad.jsonl", str(tmp_path / "short.jsonl")
    bad.write_text("hello\n")
    run("generate", "fake", "-p", "x", "--max-tokens", "2", "--record", short)
    for args, code, message in (
        (["replay", str(tmp_path / "none")], 1, "No such file"),
        (["replay", str(bad)], 1, "bad.jsonl, line 1: not JSON"),
        (["explain", str(bad)], 1, "bad.jsonl, line 1: not JSON"),
        (["explain", recorded, "nobody"], 1, "request 'nobody' is not in "),
        (["explain", recorded, "nobody"], 1, "which has 3: 0, 1, 2"),
        (["replay", short], 1, "has 2 steps with a time"),
        (["replay", recorded, "--block-size", "0"], 1, "block_size must be at least 1"),
        (["replay", recorded, "--scheduling-policy", "fair"], 1, "scheduling_policy must be one"),
        (["replay", recorded, "--block-size", "x"], 2, "Invalid value"),
        (["replay"], 2, "Missing argument"),
    ):
        result = run(*args)
        assert (result.code, result.out) == (code, ""), args
        assert message in result.err


def test_neither_command_needs_torch(recorded: str) -> None:
    code = (
        "import sys\nfrom pagedkv.cli import main\n"
        "for args in (['replay', sys.argv[1]], ['explain', sys.argv[1]]):\n"
        "    try: main(args)\n"
        "    except SystemExit as end: assert not end.code\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, recorded], check=True, capture_output=True)


def test_the_readme_commands_run(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    section = README.split("## Record and replay")[1].split("\n## ")[0]
    commands = re.findall(r"^\$ pagedkv (.*)$", section, flags=re.MULTILINE)
    assert len(commands) == 5
    for command in commands:
        args = shlex.split(command.replace("smollm2", "fake"), comments=True)
        if args[0] == "inspect":  # without a file to write, it shows the page until Ctrl-C
            args += ["-o", "run.html"]
        result = run(*args)
        assert result.code == 0, (command, result.err)
