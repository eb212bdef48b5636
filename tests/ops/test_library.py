"""Loading of the compiled libraries: what is missing or broken is said, never swallowed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from calls import CALLS

from pagedkv import ops
from pagedkv.ops import library

CUDA = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)


def test_a_missing_library_is_an_error_that_says_how_to_build(tmp_path: Path) -> None:
    with pytest.raises(ImportError, match=r"_ops_cpu\.so, which is missing: build it with `pip"):
        library.load_libraries(tmp_path)


@pytest.mark.parametrize("name", ["_ops_cpu.so", "_ops_cuda.so"])
def test_a_broken_library_is_an_error_that_names_it(tmp_path: Path, name: str) -> None:
    (tmp_path / "_ops_cpu.so").symlink_to(library.FOLDER / "_ops_cpu.so")
    broken = tmp_path / name
    broken.unlink(missing_ok=True)
    broken.write_bytes(b"not a library")
    with pytest.raises(
        ImportError, match=rf"cannot load .*{name} with torch .*broken or was built"
    ):
        library.load_libraries(tmp_path)


without_cuda_library = pytest.mark.skipif(
    (library.FOLDER / "_ops_cuda.so").exists(), reason="the CUDA library is built here"
)


@without_cuda_library
def test_the_workspace_of_a_gpu_needs_the_cuda_library() -> None:
    with pytest.raises(RuntimeError, match="pagedkv's CUDA library is not built: build it with"):
        ops.paged_attention_workspace_size(1, 1, 64, device="cuda:0")


@without_cuda_library
@pytest.mark.parametrize("name", CALLS)
def test_cuda_tensors_without_the_cuda_library_are_refused(name: str) -> None:
    # There may be no GPU here: the CUDA kernel is called directly, as CUDA tensors would.
    op_name, make = CALLS[name]
    op, call = getattr(torch.ops.pagedkv, op_name).default, make()
    positional = [call.pop(a.name) for a in op._schema.arguments if not a.kwarg_only]
    message = (
        f"pagedkv::{op_name} was called with CUDA tensors, but pagedkv's CUDA library is not "
        "built: build it with `PAGEDKV_CUDA=1 pip install"
    )
    with pytest.raises(RuntimeError, match=message):
        op.redispatch(CUDA, *positional, **call)


@pytest.mark.skipif(
    not (library.FOLDER / "_ops_cuda.so").exists(), reason="the tests above have run"
)
def test_the_tests_above_hold_on_a_copy_without_the_cuda_library(tmp_path: Path) -> None:
    package = tmp_path / "pagedkv"
    shutil.copytree(library.FOLDER / "ops", package / "ops")
    shutil.copy(library.FOLDER / "__init__.py", package)
    (package / "_ops_cpu.so").symlink_to(library.FOLDER / "_ops_cpu.so")
    names = "needs_the_cuda_library or without_the_cuda_library_are_refused"
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", names],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert f"{len(CALLS) + 1} passed" in run.stdout, run.stdout[-4000:]


def tensor_operands() -> list[tuple[str, str]]:
    return [
        (call, name)
        for call, (_, make) in CALLS.items()
        for name, value in make().items()
        if isinstance(value, torch.Tensor)
    ]


@pytest.mark.parametrize(("call", "operand"), tensor_operands())
def test_a_call_of_which_some_tensors_are_meta_is_refused(call: str, operand: str) -> None:
    # torch calls the fake kernel then, which would leave everything as it is, without a word.
    op_name, make = CALLS[call]
    operands = make()
    operands[operand] = operands[operand].to("meta")
    with pytest.raises(RuntimeError, match=rf"pagedkv::{op_name}: \w+ is on \w+, expected \w+ as"):
        getattr(ops, op_name)(**operands)


@pytest.mark.parametrize("call", CALLS)
def test_a_call_of_meta_tensors_alone_is_shapes_alone(call: str) -> None:
    op_name, make = CALLS[call]
    operands = make()
    tensors = {name for name, value in operands.items() if isinstance(value, torch.Tensor)}
    getattr(ops, op_name)(**operands | {name: operands[name].to("meta") for name in tensors})


def test_swap_blocks_may_go_from_one_device_to_another_under_compile() -> None:
    with torch._subclasses.FakeTensorMode():
        pool = torch.empty(1, 2, 3, 1, 2, 4, device="cuda")
        cpu_pool = torch.empty(1, 2, 5, 1, 2, 4)
        pairs = torch.empty(2, 2, dtype=torch.int64)
        ops.swap_blocks(pool, cpu_pool, pairs)
        ops.swap_blocks(cpu_pool, pool, pairs)
        ops.copy_blocks(pool, pairs)
        with pytest.raises(RuntimeError, match=r"copy_blocks: pairs is on cuda:0, expected cpu$"):
            ops.copy_blocks(pool, torch.empty(2, 2, dtype=torch.int64, device="cuda"))
        x, weight = torch.empty(3, 8, device="cuda"), torch.empty(8)
        with pytest.raises(RuntimeError, match=r"weight is on cpu, expected cuda:0 as out$"):
            ops.rms_norm(x, x, weight, 1e-5)


def test_importing_the_operators_does_not_need_the_engine() -> None:
    code = "import sys, pagedkv.ops; print(*(m for m in sys.modules if m.startswith('pagedkv')))"
    run = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(library.FOLDER.parent)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert set(run.stdout.split()) == {
        "pagedkv",
        "pagedkv.ops",
        *(
            f"pagedkv.ops.{part}"
            for part in ("attention", "cache", "layers", "library", "linear", "sampling", "step")
        ),
    }


def test_public_names_are_the_documented_ones() -> None:
    assert set(ops.__all__) == {*library.OPS, "paged_attention_workspace_size"}
