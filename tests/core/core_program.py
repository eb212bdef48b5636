"""Builds and runs programs of the core's CMake project, for the tests of this folder."""

from __future__ import annotations

import fcntl
import functools
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
BUILD = ROOT / "build" / "core-checks"


class CheckFailedError(Exception):
    """A check that printed failures; the message is its output."""


@contextmanager
def build_lock() -> Iterator[None]:
    """Held by the one process that builds."""
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def run(*command: str | Path) -> str:
    # cmake and ninja may be those of the environment that runs the tests.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PATH": path},
    )
    if done.returncode != 0:
        raise CheckFailedError(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


@functools.cache
def build(target: str) -> Path:
    """Builds one target of the core's CMake project, once per process; returns a program's path.

    With xdist every worker asks: the lock lets one build, the others find nothing left to do.
    """
    with build_lock():
        run("cmake", "-S", ROOT, "-B", BUILD, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Debug",
            "-DCMAKE_CXX_FLAGS_DEBUG=-O1")  # fmt: skip
        run("cmake", "--build", BUILD, "--target", target)
    return BUILD / target
