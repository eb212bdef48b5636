"""The bar of commands that are silent until all is done: on a terminal's standard error alone."""

from __future__ import annotations

import importlib
import os
import pty
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pagedkv.cli.progress import progress

PROGRAM = (
    "from pagedkv.cli.progress import progress\n"
    "with progress('answers', 3) as count:\n"
    "    count(); count()\n"
    "print('result')\n"
)


def test_a_terminal_shows_how_many_are_done() -> None:
    ours, theirs = pty.openpty()
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            stdout=subprocess.PIPE,
            stderr=theirs,
            check=True,
            env={**os.environ, "TERM": "xterm"},
        )
        os.close(theirs)
        shown = os.read(ours, 10_000).decode()
    finally:
        os.close(ours)
    assert done.stdout == b"result\n"
    assert "answers" in shown
    assert "2/3" in shown


def test_a_pipe_gets_nothing(capsys: Any) -> None:
    with progress("answers", 3) as count:
        count()
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "")


def test_commands_count_what_has_ended(run: Any, monkeypatch: Any, tmp_path: Path) -> None:

    seen: list[Any] = []

    @contextmanager
    def noted(words: str, total: int) -> Any:
        seen.append((words, total))
        yield lambda: seen.append("one")

    for name in ("bench", "generate", "replay"):  # the package has functions of these names
        monkeypatch.setattr(importlib.import_module(f"pagedkv.cli.{name}"), "progress", noted)
    many = ["-p", "a", "-p", "b", "--max-tokens", "3"]
    assert run("generate", "fake", *many, "--json").code == 0
    assert seen == [("answers", 2), "one", "one"]
    seen.clear()
    assert run("generate", "fake", *many).code == 0  # whose text comes as it is made
    assert seen == []
    small = ["--num-prompts", "3", "--input-len", "4", "--output-len", "5"]
    assert run("bench", "fake", *small).code == 0
    assert seen == [("answers", 3), "one", "one", "one"]
    seen.clear()
    path = str(tmp_path / "run.jsonl")
    more = [*many, "--max-tokens", "40", "--ignore-eos"]
    assert run("generate", "fake", *more, "--record", path).code == 0
    assert run("replay", path).code == 0
    (total,) = (one[1] for one in seen if isinstance(one, tuple))
    assert seen[0][0] == "steps"
    assert total == seen.count("one") > 0
    seen.clear()
    assert run("replay", path, "--max-num-seqs", "1").code == 0
    assert seen[0] == ("steps", total // 2 * 3)
    assert seen.count("one") > total
