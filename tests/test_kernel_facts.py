"""scripts/kernel_facts.py: what it reads from cuobjdump's output, and what it complains about."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
DECODE = "_ZN7pagedkv4cuda23decode_attention_kernelI13__nv_bfloat16S2_Li{dim}ELi1EEEvNS_6ParamsE"
WGMMA = "_ZN7pagedkv4cuda20prefill_wgmma_kernelI6__halfLi128ENS0_11PrefillWorkEEEvNS_6ParamsE"
NORM = "_ZN7pagedkv4cuda43_GLOBAL__N__ab12cd34_11_rms_norm_cu_ef5678915rms_norm_kernelIfLi4EEEvi"
USAGE = """
Fatbin elf code:
================
arch = {arch}
compile_size = 64bit

Resource usage:
 Common:
  GLOBAL:0
 Function {symbol}:
  REG:{registers} STACK:{stack} SHARED:0 LOCAL:0 CONSTANT[0]:712 TEXTURE:0 SURFACE:0 SAMPLER:0
"""


@pytest.fixture(scope="module")
def facts() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kf", ROOT / "scripts" / "kernel_facts.py")
    assert spec is not None and spec.loader is not None  # noqa: PT018
    module = importlib.util.module_from_spec(spec)
    sys.modules["kf"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def usage(symbol: str, registers: int = 128, stack: int = 0, arch: str = "sm_90a") -> str:
    return USAGE.format(arch=arch, symbol=symbol, registers=registers, stack=stack)


def test_kernels_are_read_with_their_architecture_name_and_head_dim(facts: ModuleType) -> None:
    text = usage(DECODE.format(dim=96), 127, 40) + usage(NORM, 24, arch="sm_80")
    decode, norm = facts.kernels_of(text)
    assert (decode.arch, decode.name, decode.head_dim) == ("sm_90a", "decode_attention_kernel", 96)
    assert (decode.registers, decode.stack_bytes) == (127, 40)
    assert (norm.arch, norm.name, norm.stack_bytes) == ("sm_80", "rms_norm_kernel", 0)


def test_the_table_counts_instantiations(facts: ModuleType) -> None:
    text = usage(DECODE.format(dim=64), 120, 8) + usage(DECODE.format(dim=256), 255, 440)
    lines = facts.table(facts.kernels_of(text + usage(NORM)))
    assert "| decode_attention_kernel | sm_90a | 2 | 120 to 255 | 440 |" in lines
    assert lines[-1] == "| all | | 3 | | |"


@pytest.mark.parametrize(
    ("symbol", "stack", "spills"),
    [
        (DECODE.format(dim=128), 256, False),
        (DECODE.format(dim=128), 257, True),
        (DECODE.format(dim=192), 900, False),  # padded: allowed
        (WGMMA, 300, True),
        (NORM, 900, False),  # not attention
    ],
)
def test_attention_of_usual_head_sizes_may_not_spill(
    symbol: str, stack: int, spills: bool, facts: ModuleType
) -> None:
    found = facts.spills(facts.kernels_of(usage(symbol, stack=stack)))
    assert bool(found) == spills
    if spills:
        assert f"has {stack} bytes of stack, at most 256 are allowed" in found[0]


@pytest.mark.parametrize(
    ("sass", "problem"),
    [
        ("HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4]\n HGMMA.64x64x16.F32 R2", None),
        ("HGMMA.64x128x16.F32.BF16 R24\n HGMMA.64x16x16.F32 R2", r"of [16, 128] columns"),
        ("HMMA.16816.F32.BF16 R4, R8, R10, R4", "of no columns"),
    ],
)
def test_wgmma_kernels_must_multiply_whole_tiles(
    sass: str, problem: str | None, facts: ModuleType
) -> None:
    found = facts.narrow_products([WGMMA], f"\t\tFunction : {WGMMA}\n {sass}\n")
    assert bool(found) == (problem is not None)
    if problem is not None:
        assert problem in found[0]


def fake_cuobjdump(folder: Path, monkeypatch: pytest.MonkeyPatch, usage: str, sass: str) -> None:
    (folder / "usage").write_text(usage)
    (folder / "sass").write_text(sass)
    for name in ("cuobjdump", "nvdisasm"):
        tool = folder / name
        tool.write_text(
            f'#!/bin/sh\ncase "$1" in -res-usage) cat {folder}/usage;; '
            f"*) cat {folder}/sass;; esac\n"
        )
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


@pytest.mark.parametrize(
    ("stack", "sass", "size", "message"),
    [
        (0, "HGMMA.64x128x16.F32", 1000, None),
        (400, "HGMMA.64x128x16.F32", 1000, "has 400 bytes of stack"),
        (0, "HMMA.16816", 1000, "wgmma products of no columns"),
        (0, "HGMMA.64x128x16.F32", 40 * 2**20 + 1, "library.so has 41943041 bytes"),
    ],
)
def test_a_missed_limit_is_the_exit_code(
    stack: int,
    sass: str,
    size: int,
    message: str | None,
    facts: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(facts, "tool_folders", list)
    fake_cuobjdump(
        tmp_path, monkeypatch, usage(WGMMA, stack=stack), f"Function : {WGMMA}\n{sass}\n"
    )
    library = tmp_path / "library.so"
    with library.open("wb") as file:
        file.truncate(size)
    assert facts.main(library) == (message is not None)
    printed = capsys.readouterr()
    assert "| prefill_wgmma_kernel | sm_90a | 1 |" in printed.out
    assert (message or "") in printed.err


def test_a_library_for_hopper_without_wgmma_is_a_problem(
    facts: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(facts, "tool_folders", list)
    fake_cuobjdump(tmp_path, monkeypatch, usage(NORM), "")
    library = tmp_path / "library.so"
    library.write_bytes(b"")
    assert facts.main(library) == 1
    assert "no prefill_wgmma_kernel for sm_90a" in capsys.readouterr().err
    fake_cuobjdump(tmp_path, monkeypatch, usage(NORM, arch="sm_80"), "")
    assert facts.main(library) == 0


def test_without_the_tools_it_says_what_to_install(
    facts: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(facts, "tool_folders", list)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm"):
        facts.cuobjdump("-res-usage", "library.so")
