"""A library with a C++ runtime of its own is found, avoided where it can be, else refused."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
from setuptools import Distribution
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.parent
THROWS = 'extern "C" int thrown(int value) { try { throw value; } catch (int v) { return v; } }'

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.fixture(scope="module")
def runtime() -> ModuleType:
    spec = importlib.util.spec_from_file_location("cr", ROOT / "scripts" / "cxx_runtime.py")
    assert spec is not None and spec.loader is not None  # noqa: PT018
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def library(folder: Path, *flags: str) -> Path:
    (folder / "throws.cpp").write_text(THROWS)
    subprocess.run(
        ["g++", "-shared", "-fPIC", "throws.cpp", *flags, "-o", "throws.so"], cwd=folder, check=True
    )
    return folder / "throws.so"


@needs_compiler
def test_a_library_of_the_shared_runtime_passes(runtime: ModuleType, tmp_path: Path) -> None:
    runtime.check(library(tmp_path))


@needs_compiler
def test_a_library_with_a_runtime_of_its_own_is_refused(
    runtime: ModuleType, tmp_path: Path
) -> None:
    static = library(tmp_path, "-static-libstdc++")
    with pytest.raises(SystemExit, match=r"throws.so has libstdc\+\+ linked into it"):
        runtime.check(static)


@needs_compiler
def test_what_is_added_to_a_link_gives_the_shared_runtime(
    runtime: ModuleType, tmp_path: Path
) -> None:
    runtime.check(library(tmp_path, *runtime.SHARED_RUNTIME, "-static-libstdc++"))


def compiler_as_cxx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *flags: str) -> object:
    """setuptools' compiler where g++ always has these flags."""
    wrapper = tmp_path / "g++"
    wrapper.write_text(f'#!/bin/sh\nexec {shutil.which("g++")} "$@" {" ".join(flags)}\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("CXX", str(wrapper))
    monkeypatch.chdir(tmp_path)
    command = build_ext(Distribution())
    command.ensure_finalized()
    from distutils.ccompiler import new_compiler
    from distutils.sysconfig import customize_compiler

    compiler = new_compiler()
    customize_compiler(compiler)
    return compiler


@needs_compiler
@pytest.mark.parametrize(
    ("flags", "added"),
    [((), []), (("-static-libstdc++",), ["-l:libstdc++.so.6"])],
    ids=["shared", "static"],
)
def test_the_shared_runtime_is_added_only_where_it_is_needed(
    flags: tuple[str, ...],
    added: list[str],
    runtime: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiler = compiler_as_cxx(tmp_path, monkeypatch, *flags)
    (tmp_path / "current").mkdir()
    monkeypatch.chdir(tmp_path / "current")
    assert runtime.link_flags(compiler, tmp_path / "probe") == added
    assert not list((tmp_path / "current").iterdir())


@needs_compiler
def test_a_compiler_that_always_links_its_own_is_refused(
    runtime: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "SHARED_RUNTIME", ["-static-libstdc++"])
    compiler = compiler_as_cxx(tmp_path, monkeypatch, "-static-libstdc++")
    with pytest.raises(SystemExit, match=r"build with a compiler that links the shared libstdc"):
        runtime.link_flags(compiler, tmp_path / "probe")


def test_what_is_no_elf_file_is_left_alone(runtime: ModuleType, tmp_path: Path) -> None:
    other = tmp_path / "module.dylib"
    other.write_bytes(b"\xcf\xfa\xed\xfe" + bytes(100))
    runtime.check(other)
