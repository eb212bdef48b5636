"""Collects each C++ unit check of this folder as one pytest item.

The checks are one program; an item runs it with --filter. core_program.py builds it, once per
session.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from core_program import build, run


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    if file_path.suffix == ".cpp" and file_path.stem.endswith("_checks"):
        return CheckFile.from_parent(parent, path=file_path)  # type: ignore[no-any-return]
    return None


class CheckFile(pytest.File):
    """One C++ file; its items are the TEST(Suite, behaviour) that stand in it."""

    def collect(self) -> Iterator[pytest.Item]:
        for line in self.path.read_text().splitlines():
            if line.startswith("TEST("):
                suite, behaviour = line.removeprefix("TEST(").split(")")[0].split(", ")
                yield CheckItem.from_parent(self, name=f"{suite}.{behaviour}")


class CheckItem(pytest.Item):
    """One C++ check."""

    def runtest(self) -> None:
        run(build("core_checks"), "--filter", self.name)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException]) -> str:
        return str(excinfo.value)

    def reportinfo(self) -> tuple[Path, None, str]:
        return self.path, None, self.name
