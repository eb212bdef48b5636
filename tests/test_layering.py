"""Imports go down only: every import statement of the package is counted, local ones and
TYPE_CHECKING ones included."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "python" / "pagedkv"

# Which unit may import which others, straight from the design's table. A unit is a module or
# sub-package directly below pagedkv.
VALUES = {"request", "sampling_params", "config", "numbers", "records", "_core"}
ALLOWED: dict[str, set[str]] = {
    **{name: VALUES - {name, "_core"} for name in VALUES},
    "ops": VALUES,
    "text": VALUES,
    "block_manager": VALUES,
    "kv_cache": VALUES | {"ops"},
    "weights": VALUES | {"ops"},
    "scheduler": VALUES | {"block_manager"},
    "models": VALUES | {"ops"},
    "sampling": VALUES | {"ops"},
    "inspect": VALUES,
}
ALLOWED["engine"] = VALUES | {
    "ops", "text", "block_manager", "kv_cache", "weights", "scheduler", "models", "sampling",
}  # fmt: skip
ALLOWED["replay"] = VALUES | {"block_manager", "scheduler"}
ALLOWED["plan"] = ALLOWED["engine"] - {"ops", "text", "weights", "sampling"}
ALLOWED["server"] = VALUES | {"engine", "text"}
ALLOWED["cli"] = ALLOWED["engine"] | {"engine", "inspect", "plan", "replay", "server"}
ALLOWED["__main__"] = {"cli"}
ALLOWED["_core"] |= {"_core_step"}  # a part of its stub
ALLOWED["_core_step"] = {"_core"}
# The package's own __init__ hands out names lazily.
ALLOWED["__init__"] = {"block_manager", "engine", "sampling_params"}


def unit_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[0]


def imported_units(path: Path, package: str) -> list[tuple[int, str]]:
    """(line, unit) of every import of pagedkv in a file, wherever in the file it stands."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                base = ".".join([*parents[: len(parents) - node.level + 1], *filter(None, [base])])
            names = [f"{base}.{alias.name}" for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "pagedkv" and len(parts) > 1 and parts[1] != "__version__":
                found.append((node.lineno, parts[1]))
    return found


def package_of(path: Path) -> str:
    relative = path.relative_to(PACKAGE.parent)
    return ".".join(relative.parent.parts)


FILES = sorted([*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.pyi")])


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_down_only(path: Path) -> None:
    unit = unit_of(path)
    assert unit in ALLOWED, f"{unit} has no layer: add it to the design's table first"
    wrong = [
        f"{path.name}:{line} imports pagedkv.{target}"
        for line, target in imported_units(path, package_of(path))
        if target != unit and target not in ALLOWED[unit]
    ]
    assert not wrong, f"pagedkv.{unit} may import {sorted(ALLOWED[unit])}: {wrong}"


def test_the_table_itself_has_no_cycle() -> None:
    done: set[str] = set()

    def visit(unit: str, path: tuple[str, ...]) -> None:
        assert unit not in path, f"cycle: {' -> '.join([*path, unit])}"
        if unit not in done:
            for below in ALLOWED.get(unit, set()) - VALUES:
                visit(below, (*path, unit))
            done.add(unit)

    for unit in ALLOWED:
        if unit not in VALUES:
            visit(unit, ())


def test_an_upward_import_is_found_even_when_local(tmp_path: Path) -> None:
    source = tmp_path / "x.py"
    source.write_text("def f():\n    from pagedkv.engine import LLM\n    from ..cli import main\n")
    assert imported_units(source, "pagedkv.ops") == [(2, "engine"), (3, "cli")]
