"""What gets built: decided by the toolkit and by two variables, never by asking for a GPU."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The build list on a machine without a toolkit; `add_toolkit` puts one there."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))  # as setup.py does
    spec = importlib.util.spec_from_file_location("be", ROOT / "scripts" / "build_extensions.py")
    assert spec is not None and spec.loader is not None  # noqa: PT018
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for variable in ("PAGEDKV_BUILD", "PAGEDKV_CUDA", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    return module


def add_toolkit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "nvcc").write_text("")
    monkeypatch.setenv("CUDA_HOME", str(folder))
    return folder


def test_without_a_toolkit_core_and_cpu_are_built_and_it_says_so(
    build: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert build.selected_parts() == ["core", "cpu"]
    assert "no CUDA toolkit (nvcc) found; building the core and the CPU ops only" in (
        capsys.readouterr().err
    )


def test_with_a_toolkit_cuda_is_built_too(
    build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = add_toolkit(tmp_path / "toolkit", monkeypatch)
    assert build.cuda_home() == home
    assert build.selected_parts() == ["core", "cpu", "cuda"]
    monkeypatch.setenv("PAGEDKV_CUDA", "0")
    assert build.selected_parts() == ["core", "cpu"]


def test_cuda_demanded_without_a_toolkit_is_an_error(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEDKV_CUDA", "1")
    with pytest.raises(SystemExit, match="PAGEDKV_CUDA=1, but no CUDA toolkit"):
        build.selected_parts()


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("PAGEDKV_CUDA", "yes", "PAGEDKV_CUDA must be 0 or 1, got 'yes'"),
        ("PAGEDKV_BUILD", "core,gpu", "PAGEDKV_BUILD has 'gpu'; parts are core, cpu, cuda"),
    ],
)
def test_unknown_values_are_refused(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, message: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(SystemExit, match=message):
        build.selected_parts()


def test_one_part_can_be_built_alone(build: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDKV_BUILD", "cpu")
    assert build.selected_parts() == ["cpu"]


def test_every_source_belongs_to_exactly_one_extension(build: ModuleType) -> None:
    every = set(build.sources("csrc"))
    core = set(build.sources("csrc/core", "csrc/bindings"))
    cuda = set(build.sources("csrc/cuda")) | set(build._cuda_adapters())
    cpu = set(build.sources("csrc/ops", "csrc/cpu")) - set(build._cuda_adapters())
    assert core | cuda | cpu == every
    assert len(core) + len(cuda) + len(cpu) == len(every)
