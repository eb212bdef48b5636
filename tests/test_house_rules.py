"""Rules of the house that a machine can check: file length, file headers, module state, words that
stay out."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAX_LINES = 400
CODE = sorted(
    path
    for folder in ("csrc", "include", "python", "scripts", "benchmarks", "tests", "examples")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in {".py", ".pyi", ".cpp", ".cu", ".cuh", ".h", ".sh"}
)
PYTHON = [path for path in CODE if path.suffix == ".py" and (ROOT / "python") in path.parents]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", CODE, ids=name_of)
def test_a_file_answers_one_question_in_400_lines(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    assert lines <= MAX_LINES, f"{name_of(path)} has {lines} lines: two nouns are two files"


@pytest.mark.parametrize("path", PYTHON, ids=name_of)
def test_a_module_says_what_lives_in_it(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text())), (
        f"{name_of(path)} has no module docstring"
    )


@pytest.mark.parametrize("path", PYTHON, ids=name_of)
def test_a_module_has_no_state_that_functions_write(path: Path) -> None:
    names = [
        name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Global)
        for name in node.names
    ]
    assert not names, f"{name_of(path)} writes module state: {names}"


def test_nothing_unpickles_or_runs_foreign_code() -> None:
    # torch.load and pickle run code from a file; trust_remote_code imports it from a model folder.
    forbidden = re.compile(
        r"\b(import|from) pickle\b|torch\.load\(|trust_remote_code\s*=\s*True|\beval\(|\bexec\("
    )
    found = [
        f"{name_of(path)}:{number}"
        for path in PYTHON
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if forbidden.search(line.split("#")[0])
    ]
    assert not found, found


def test_test_modules_have_names_of_their_own() -> None:
    # pytest puts each folder of tests on the path: two modules of one name are one module.
    names = [path.name for path in (ROOT / "tests").rglob("*.py") if path.name != "conftest.py"]
    assert sorted(set(names)) == sorted(names)
