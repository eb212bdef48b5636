"""The typed stub says what the compiled module has: classes, members, parameters and defaults.

(mypy's stubtest would say it too, and takes a minute.)
"""

from __future__ import annotations

import ast
import enum
import re
from pathlib import Path

import pytest

import pagedkv._core as core

PACKAGE = Path(__file__).parent.parent.parent / "python" / "pagedkv"
NODES = [
    node
    for name in ("_core.pyi", "_core_step.pyi")
    for node in ast.parse((PACKAGE / name).read_text()).body
]
CLASSES = {node.name: node for node in NODES if isinstance(node, ast.ClassDef)}
FUNCTIONS = [node.name for node in NODES if isinstance(node, ast.FunctionDef)]
RECORDS = [name for name in CLASSES if not issubclass(getattr(core, name), (enum.Enum, Exception))]


def methods(name: str) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in CLASSES[name].body if isinstance(node, ast.FunctionDef)}


def described(function: ast.FunctionDef) -> list[str]:
    """Parameters as pybind11 writes them into a docstring: names, "*", and defaults."""
    arguments = function.args
    plain = [argument.arg for argument in arguments.args]
    keyword_only = [argument.arg for argument in arguments.kwonlyargs]
    defaults = dict(
        zip(plain[len(plain) - len(arguments.defaults) :], arguments.defaults, strict=True)
    )
    defaults |= {
        name: default
        for name, default in zip(keyword_only, arguments.kw_defaults, strict=True)
        if default is not None
    }
    names = [*plain, *(["*"] if keyword_only else []), *keyword_only]
    return [
        f"{name} = {ast.literal_eval(defaults[name])!r}" if name in defaults else name
        for name in names
    ]


def compiled(class_name: str, method: str) -> list[str]:
    """The same, out of the compiled method's docstring."""
    line = (getattr(getattr(core, class_name), method).__doc__ or "").splitlines()[0]
    inner = line[line.index("(") + 1 : line.rindex(")")]
    parameters = re.split(r", (?![^\[(]*[\])])", inner)
    return [re.sub(r": [^=]*?(?= = |$)", "", parameter) for parameter in parameters]


def test_the_stub_names_every_class_and_function() -> None:
    public = {name for name in vars(core) if not name.startswith("_")}
    assert public == {*CLASSES, *FUNCTIONS, "FREED_BLOCK"}
    assert core.FREED_BLOCK == -(2**31)


@pytest.mark.parametrize("name", RECORDS)
def test_the_stub_names_every_member(name: str) -> None:
    public = {member for member in vars(getattr(core, name)) if not member.startswith("_")}
    assert public == {member for member in methods(name) if not member.startswith("_")}


@pytest.mark.parametrize("name", ["BlockManager", "PrefixGrouper", "StepState", "StepTables"])
def test_parameters_and_defaults_agree(name: str) -> None:
    calls = {
        method: function
        for method, function in methods(name).items()
        if not function.decorator_list  # properties have none
    }
    assert len(calls) >= 2
    for method, function in calls.items():
        assert compiled(name, method) == described(function), method


@pytest.mark.parametrize("name", ["CanAllocate", "BlockState", "MissReason"])
def test_enums_have_the_members_of_the_stub(name: str) -> None:
    members = [
        target.id
        for node in CLASSES[name].body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    ]
    assert [member.name for member in getattr(core, name)] == members
