"""The command line on the engine tests' fake model, in this process."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "engine"))

from fake_model import FakeModel, load_fake, make_tokenizer_folder


@dataclass
class Result:
    code: int
    out: str
    err: str


Run = Callable[..., Result]


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer_folder(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def fakes(tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[FakeModel]:
    """Every fake model that a command loads, in order; `MODEL` is "fake"."""
    from pagedkv.engine import engine

    loaded: list[FakeModel] = []

    def load(config: engine.EngineConfig) -> engine.LoadedModel:
        one = load_fake(tokenizer_folder, config)
        assert isinstance(one.model, FakeModel)
        loaded.append(one.model)
        return one

    monkeypatch.setattr(engine, "load", load)
    return loaded


@pytest.fixture
def run(
    fakes: list[FakeModel],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Run:
    """run("generate", "fake", ..., stdin="...") -> Result."""
    from pagedkv.cli import main

    def call(*args: str, stdin: str | bytes = "") -> Result:
        data = stdin if isinstance(stdin, bytes) else stdin.encode()
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main(args)
        shown = capsys.readouterr()
        code = caught.value.code
        return Result(0 if code is None else int(code), shown.out, shown.err)

    return call
