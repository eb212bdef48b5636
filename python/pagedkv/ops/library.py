"""Loads the compiled operator libraries and completes their registration for torch.

`_ops_cpu` holds the schemas and the CPU kernels and must be there; `_ops_cuda` is there when the
package was built with a CUDA toolkit. Called once, by the package's `__init__`. Nothing is
swallowed: a library that is there but does not load is an error that says which one and why.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

import torch

FOLDER = Path(__file__).resolve().parent.parent
BUILD_HINT = "build it with `pip install --no-build-isolation .` in pagedkv's source tree"
CUDA_BUILD_HINT = (
    "build it with `PAGEDKV_CUDA=1 pip install --no-build-isolation .` in pagedkv's source tree, "
    "on a machine with a CUDA toolkit (nvcc on PATH, or CUDA_HOME)"
)

# Every op that takes tensors. None of them returns anything: they write into their arguments.
OPS = (
    "reshape_and_cache",
    "fused_rotary_reshape_and_cache",
    "fused_norm_rotary_reshape_and_cache",
    "paged_attention",
    "merge_attention_states",
    "copy_blocks",
    "swap_blocks",
    "gather_blocks",
    "rms_norm",
    "fused_add_rms_norm",
    "rotary_embedding",
    "silu_and_mul",
    "gelu_and_mul",
    "sample_tokens",
    "streamed_linear",
    "score_tokens",
    "advance_step",
    "advance_edits",
)


def load_libraries(folder: Path = FOLDER) -> None:
    """Load the libraries in `folder`; give every op a fake kernel, and those without a CUDA kernel
    one that says so."""
    cpu_library = folder / "_ops_cpu.so"
    cuda_library = folder / "_ops_cuda.so"
    if not cpu_library.exists():
        raise ImportError(f"pagedkv.ops needs {cpu_library}, which is missing: {BUILD_HINT}")
    _load(cpu_library)
    has_cuda_library = cuda_library.exists()
    if has_cuda_library:
        _load(cuda_library)
    for name in OPS:
        torch.library.register_fake(f"pagedkv::{name}", _fake(name))
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"pagedkv::{name}", "CUDA"):
            why = (
                f"{cuda_library} has no CUDA kernel for it"
                if has_cuda_library
                else f"pagedkv's CUDA library is not built: {CUDA_BUILD_HINT}"
            )
            torch.library.impl(f"pagedkv::{name}", "CUDA", _refuse_cuda(name, why))


def _load(path: Path) -> None:
    try:
        torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]
    except OSError as error:
        raise ImportError(
            f"pagedkv.ops cannot load {path} with torch {torch.__version__}: {error}. "
            f"It is broken or was built for another machine: {BUILD_HINT}"
        ) from error


def _fake(name: str) -> Any:
    """For torch.compile and meta tensors: nothing is returned. A call of which only some tensors
    are meta comes here too, so devices are checked as in the kernels.
    """
    op = getattr(torch.ops.pagedkv, name).default
    names = [argument.name for argument in op._schema.arguments]

    def fake(*args: Any, **kwargs: Any) -> None:
        given = dict(zip(names, args, strict=False)) | kwargs
        tensors = {key: value for key, value in given.items() if isinstance(value, torch.Tensor)}
        first, home = next((key, tensor.device) for key, tensor in tensors.items())
        for operand, tensor in tensors.items():
            place = _place(operand, tensor.device, home)
            if tensor.device != place:
                like = f" as {first}" if place == home else ""
                raise RuntimeError(
                    f"pagedkv::{name}: {operand} is on {tensor.device}, expected {place}{like}"
                )

    return fake


def _place(operand: str, device: torch.device, home: torch.device) -> torch.device:
    """Where an operand must be whose call has its first tensor at home. Pairs are in CPU memory,
    and swap_blocks goes from one device to another; but meta tensors are among themselves.
    """
    if "meta" not in (device.type, home.type):
        if operand == "pairs":
            return torch.device("cpu")
        if operand == "destination":
            return device
    return home


def _refuse_cuda(name: str, why: str) -> Any:
    def refuse(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise RuntimeError(f"pagedkv::{name} was called with CUDA tensors, but {why}")

    return refuse
