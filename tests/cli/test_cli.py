"""The commands: what goes to standard output, what to standard error, and the exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from fake_model import FakeModel

from pagedkv import LLM, SamplingParams, __version__
from pagedkv.cli.app import app

COMMANDS = (
    "bench",
    "chat",
    "draw",
    "inspect",
    "explain",
    "fetch",
    "generate",
    "plan",
    "replay",
    "serve",
    "top",
)

GREEDY = SamplingParams(temperature=0, max_tokens=20)


def text_of(prompt: Any, params: SamplingParams = GREEDY, **options: Any) -> str:
    return LLM("fake", **options).generate(prompt, params, use_tqdm=False)[0].outputs[0].text


def test_one_prompt_prints_its_text_alone(run: Any) -> None:
    result = run("generate", "fake", "-p", "hello", "--max-tokens", "20")
    assert result.code == 0
    assert result.out == text_of("hello") + "\n"
    assert "[1 answer, " in result.err
    assert "tokens/s" in result.err


def test_several_prompts_come_in_order_under_their_own_lines(run: Any) -> None:
    prompts = ["first", "second one", "third"]
    result = run(
        "generate", "fake", *(arg for one in prompts for arg in ("-p", one)), "--max-tokens", "20"
    )
    assert result.out == "".join(f"== {one}\n{text_of(one)}\n" for one in prompts)


def test_a_prompt_may_come_from_standard_input(run: Any) -> None:
    assert run("generate", "fake", "--max-tokens", "20", stdin="from a pipe").out == (
        text_of("from a pipe") + "\n"
    )


def test_json_gives_one_object_per_prompt_and_nothing_else(run: Any) -> None:
    result = run("generate", "fake", "-p", "one", "-p", "zwei", "--json", "--max-tokens", "20")
    rows = [json.loads(line) for line in result.out.splitlines()]
    assert [row["prompt"] for row in rows] == ["one", "zwei"]
    assert [row["text"] for row in rows] == [text_of("one"), text_of("zwei")]
    assert rows[0]["num_prompt_tokens"] == 3
    assert rows[0]["finish_reason"] in ("stop", "length")
    assert rows[0]["error"] is None


def test_sampling_options_reach_the_sampler(run: Any) -> None:
    whole = text_of("options")
    options = ["--temperature", "0.8", "--top-k", "20", "--top-p", "0.9", "--seed", "4"]
    params = SamplingParams(temperature=0.8, top_k=20, top_p=0.9, seed=4, max_tokens=20)
    assert run("generate", "fake", "-p", "options", "--max-tokens", "20", *options).out == (
        text_of("options", params) + "\n"
    )
    stopped = run("generate", "fake", "-p", "options", "--stop", whole[4:6], "--stop", whole[8:10])
    assert stopped.out == whole[: whole.find(whole[4:6])] + "\n"
    long = run("generate", "fake", "-p", "options", "--ignore-eos", "--max-tokens", "90", "--json")
    assert len(json.loads(long.out)["token_ids"]) == 90


def test_engine_options_reach_the_engine(run: Any) -> None:
    result = run(
        *("generate", "fake", "-p", "0123456789", "--num-gpu-blocks-override", "2"),
        *("--block-size", "4"),
    )
    assert result.code == 1
    assert "need" in result.err
    assert "the pool has 2" in result.err
    result = run("generate", "fake", "-p", "0123456789", "--max-model-len", "10")
    assert "max_model_len is 10" in result.err


def test_chat_option_puts_the_prompt_into_the_template(run: Any) -> None:
    result = run("generate", "fake", "--chat", "-p", "hi", "--json", "--max-tokens", "3")
    assert json.loads(result.out)["num_prompt_tokens"] == len("user: hi") + 1 + len("assistant: ")
    assert json.loads(result.out)["prompt"] == "hi"


def test_draw_ends_with_the_cache_at_its_fullest(run: Any) -> None:
    result = run(
        *("generate", "fake", "-p", "0123456789", "-p", "x", "--max-tokens", "6", "--draw"),
        *("--block-size", "4", "--num-gpu-blocks-override", "9", "--ignore-eos"),
    )
    assert result.code == 0
    # 10 + 5 tokens in four blocks and 1 + 5 in two; the last token of each is never written.
    assert "6 referenced" in result.out
    assert "9 blocks of 4 tokens" in result.out


def test_a_failed_request_exits_with_1_and_keeps_the_others(
    run: Any, fakes: list[FakeModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    def explode(self: FakeModel, *args: Any) -> torch.Tensor:
        raise RuntimeError("injected")

    monkeypatch.setattr(FakeModel, "forward", explode)
    result = run("generate", "fake", "-p", "a", "-p", "b")
    assert result.code == 1
    assert result.err.count("RuntimeError: injected") == 2
    assert "Traceback" not in result.err


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["generate", "fake", "-p", ""], 1, "the prompt is empty"),
        (["generate", "fake", "-p", "a", "--temperature", "nan"], 1, "temperature must be finite"),
        (["generate", "fake", "-p", "a", "--temperature", "inf"], 1, "temperature must be finite"),
        (["generate", "fake", "-p", "a", "--top-p", "0"], 1, "top_p must be finite, above 0"),
        (["generate", "fake", "-p", "a", "--max-tokens", "0"], 1, "max_tokens must be at least 1"),
        (["generate", "fake", "-p", "a", "--dtype", "int4"], 1, "dtype must be one of auto"),
        (["generate", "fake", "-p", "a", "--block-size", "0"], 1, "block_size must be at least 1"),
        (["generate", "fake", "-p", "a", "--max-token", "3"], 2, "No such option"),
        (["generate"], 2, "Missing argument"),
        (["generate", "m", "-p", "a", "--device", "gpu"], 1, "device must be auto, cpu, cuda or"),
        (["chat", "m", "--gpu-memory-utilization", "2"], 1, "must be above 0 and at most 1, got 2"),
        (["fetch", "nope"], 1, "no model 'nope'"),
        (["nonsense"], 2, "No such command"),
        (["chat", "fake", "--max-tokens", "x"], 2, "Invalid value"),
    ],
)
def test_errors_go_to_stderr_with_their_exit_code(
    run: Any, args: list[str], code: int, message: str
) -> None:
    result = run(*args)
    assert result.code == code
    assert message in result.err
    assert result.out == ""


@pytest.mark.parametrize(
    ("args", "stdin", "what", "where"),
    [
        (["-p", "caf\udce9 au lait"], b"", "--prompt", "0xe9 at byte 4 of 12"),
        (["-p", "a", "-p", "\udcff"], b"", "--prompt number 2", "0xff at byte 1 of 1"),
        (["-p", "a", "--stop", "\udcff"], b"", "--stop", "0xff at byte 1 of 1"),
        ([], "\u00e9\n".encode() + b"caf\xe9\n", "standard input", "0xe9 at byte 7 of 8"),
    ],
)
def test_bytes_that_are_not_text_are_named_with_their_place(
    run: Any, args: list[str], stdin: bytes, what: str, where: str
) -> None:
    result = run("generate", "fake", *args, stdin=stdin)
    assert result.code == 1
    assert f"pagedkv: error: {what} is not valid UTF-8: byte {where}" in result.err
    assert result.out == ""


def test_a_real_argument_that_is_not_text_is_refused_before_the_model_loads() -> None:
    command = [sys.executable, "-m", "pagedkv", "generate", "no such model", "-p", b"caf\xe9"]
    run = subprocess.run(command, capture_output=True, check=False)
    assert run.returncode == 1
    assert b"--prompt is not valid UTF-8: byte 0xe9 at byte 4 of 4" in run.stderr


def test_chat_goes_on_after_a_line_that_is_not_text(run: Any) -> None:
    result = run("chat", "fake", "--max-tokens", "3", stdin=b"hi\ncaf\xe9\r\nhi\n")
    assert result.code == 1
    assert "the line is not valid UTF-8: byte 0xe9 at byte 4 of 6" in result.err
    assert result.out.count("\n") >= 2
    assert "--system is not valid UTF-8" in run("chat", "fake", "--system", "\udcff").err


def test_line_ends_of_any_system_are_the_same_prompt(run: Any) -> None:
    texts = {
        run("generate", "fake", stdin=b"a" + end + b"b").out for end in (b"\n", b"\r\n", b"\r")
    }
    assert len(texts) == 1


def test_chat_answers_each_line_and_keeps_the_history(run: Any, fakes: list[FakeModel]) -> None:
    options = ["--temperature", "0", "--max-tokens", "20", "--block-size", "4"]
    result = run("chat", "fake", *options, "--system", "brief", stdin="hello\nagain\n\n/exit\nno\n")
    assert result.code == 0
    llm = LLM("fake")
    messages = [{"role": "system", "content": "brief"}]
    expected = ""
    for line in ("hello", "again"):
        messages.append({"role": "user", "content": line})
        text = llm.chat(messages, GREEDY, use_tqdm=False)[0].outputs[0].text
        messages.append({"role": "assistant", "content": text})
        expected += text + "\n"
    assert result.out == expected


def test_chat_finds_earlier_turns_in_the_prefix_cache(run: Any, fakes: list[FakeModel]) -> None:
    options = ["--temperature", "0", "--max-tokens", "5", "--block-size", "4"]
    line = "a line of some length"
    run("chat", "fake", *options, stdin=f"{line}\n")
    run("chat", "fake", *options, stdin=f"{line}\nb\n")
    once, twice = fakes
    # The second turn computes its own few tokens, not the first turn's again.
    assert twice.num_tokens - once.num_tokens < 40
    assert once.num_tokens > 40


def test_chat_clear_forgets_and_an_error_does_not_end_it(run: Any) -> None:
    options = ["--temperature", "0", "--max-tokens", "8", "--max-model-len", "64"]
    too_long = "x" * 60
    result = run("chat", "fake", *options, stdin=f"hi\n{too_long}\n/clear\nhi\n")
    lines = result.out.splitlines()
    assert len(lines) == 2
    assert lines[0] == lines[1]
    assert "max_model_len is 64" in result.err
    assert "/clear" in result.err
    assert result.code == 1


def test_version_and_help_are_quick_because_they_load_no_torch() -> None:
    code = (
        "import sys, pagedkv.cli.app as app\n"
        "try: app.main(['--help'])\n"
        "except SystemExit as end: assert not end.code\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    for command in COMMANDS:
        assert f" {command} " in shown
    assert "Exit codes: 0 done, 1 failed (standard error says why), 2 wrong usage, 130" in shown
    assert "Example: pagedkv generate smollm2" in shown
    version = subprocess.run(
        [sys.executable, "-m", "pagedkv", "--version"], capture_output=True, text=True, check=True
    ).stdout
    assert version == f"pagedkv {__version__}\n"


def test_all_commands_are_known_here() -> None:
    found = typer.main.get_command(app)
    assert isinstance(found, typer.core.TyperGroup)
    assert set(found.commands) == set(COMMANDS)


@pytest.mark.parametrize("command", [*COMMANDS, "bench serve", "bench throughput"])
def test_every_command_shows_an_example(run: Any, command: str) -> None:
    result = run(*command.split(), "--help")
    shown = " ".join(result.out.split())
    assert (result.code, result.err) == (0, "")
    assert f"Example: pagedkv {command.removesuffix(' throughput')} " in shown


def test_an_interrupt_is_exit_code_130(tmp_path: Path) -> None:
    """Of a pipe into which nobody writes a command waits: for its input, or for a file."""
    never = tmp_path / "never.jsonl"
    os.mkfifo(never)
    program = (
        "import os, signal, sys, threading\n"
        "from pagedkv.cli import main, options\n"
        "options.load_engine = lambda *args, **given: None\n"
        "threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "main(sys.argv[1:])\n"
    )
    for command in (["chat", "smollm2"], ["explain", str(never)]):
        with subprocess.Popen(
            [sys.executable, "-c", program, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as process:
            code = process.wait(timeout=60)
            assert process.stderr is not None
            told = process.stderr.read()
        assert (code, b"Traceback" in told) == (130, False), told


def test_explain_says_why_on_standard_error(run: Any) -> None:
    result = run("generate", "fake", "-p", "hello", "--max-tokens", "4", "--explain")
    assert result.out == text_of("hello", SamplingParams(temperature=0, max_tokens=4)) + "\n"
    assert "== why: hello\nstep 0: queued with 5 prompt tokens" in result.err
    assert "starts with a chunk of 5 tokens" in result.err
    assert "== why" not in run("generate", "fake", "-p", "hello", "--max-tokens", "4").err


def test_swap_options_reach_the_engine(run: Any) -> None:
    crowd = [arg for one in "abc" for arg in ("-p", one * 20)]
    small = ["--block-size", "4", "--num-gpu-blocks-override", "20", "--ignore-eos"]
    swap = ["--swap-space", "0.001", "--preemption-mode", "swap", "--explain"]
    base = ["generate", "fake", *crowd, *small, "--max-tokens", "40"]
    swapped = run(*base, *swap)
    assert "its blocks move to the CPU (preemption_mode is swap)" in swapped.err
    assert swapped.out == run(*base).out


@pytest.mark.parametrize("command", [("generate", "-p", "hello"), ("chat",), ("serve",)])
def test_the_dtype_of_the_cache_reaches_the_engine(run: Any, command: tuple[str, ...]) -> None:
    name, *rest = command
    refused = run(name, "fake", *rest, "--kv-cache-dtype", "int8")
    assert refused.code == 1
    assert "kv_cache_dtype must be one of auto, fp8, fp8_e4m3, fp8_e5m2, got 'int8'" in refused.err
    if name != "serve":  # which does not end by itself
        assert run(name, "fake", *rest, "--kv-cache-dtype", "auto").code == 0


def test_an_answer_that_nobody_could_read_is_an_error() -> None:
    command = f"{sys.executable} -c 'from pagedkv.cli import main; main([\"draw\"])' >&-"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "standard output is closed" in done.stderr
