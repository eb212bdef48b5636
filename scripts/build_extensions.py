"""The list of compiled extensions and how each is compiled. Read by setup.py; sources are found by
folder, so no list can drift.

`_core` is a plain pybind11 module. `_ops_cpu` and `_ops_cuda` are libraries of torch operators on
the stable ABI: they hold no Python
code and are loaded with torch.ops.load_library. The CUDA one compiles beside a CPU-only torch too.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import cxx_runtime
from setuptools import Extension

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("core", "cpu", "cuda")
STABLE_ABI = "-DTORCH_TARGET_VERSION=0x020a000000000000"  # 2.10: newer API is a compile error
# Hidden symbols: two libraries with the same inline adapters must not bind to one another's.
CXX_FLAGS = ["-O3", "-g0", "-std=c++20", "-fvisibility=hidden", STABLE_ABI, "-Wall", "-Wextra"]


def selected_parts() -> list[str]:
    """Parts to build, from PAGEDKV_BUILD and PAGEDKV_CUDA."""
    names = [name for name in os.environ.get("PAGEDKV_BUILD", "").split(",") if name]
    for name in names:
        if name not in PARTS:
            raise SystemExit(f"PAGEDKV_BUILD has {name!r}; parts are {', '.join(PARTS)}")
    wants_cuda = os.environ.get("PAGEDKV_CUDA", "")
    if wants_cuda not in ("", "0", "1"):
        raise SystemExit(f"PAGEDKV_CUDA must be 0 or 1, got {wants_cuda!r}")
    has_toolkit = cuda_home() is not None
    if wants_cuda == "1" and not has_toolkit:
        raise SystemExit("PAGEDKV_CUDA=1, but no CUDA toolkit: put nvcc on PATH or set CUDA_HOME")
    parts = names or list(PARTS)
    if "cuda" in parts and (wants_cuda == "0" or not has_toolkit):
        why = "PAGEDKV_CUDA=0" if wants_cuda == "0" else "no CUDA toolkit (nvcc) found"
        print(f"pagedkv: {why}; building the core and the CPU ops only", file=sys.stderr)
        parts.remove("cuda")
    return parts


def cuda_home() -> Path | None:
    """The CUDA toolkit's folder, or None."""
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        home = os.environ.get(variable)
        if home and (Path(home) / "bin" / "nvcc").exists():
            return Path(home)
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return None
    # nvcc may be a link or a wrapper script: the toolkit is where the headers are.
    for home in (Path(nvcc).resolve().parent.parent, Path("/usr/local/cuda")):
        if (home / "include" / "cuda_runtime.h").exists():
            return home
    return None


def sources(*folders: str) -> list[str]:
    """Every C++ and CUDA source under these folders, relative to the root, in a fixed order."""
    found = [
        path
        for folder in folders
        for pattern in ("*.cpp", "*.cu")
        for path in (ROOT / folder).rglob(pattern)
    ]
    return sorted(str(path.relative_to(ROOT)) for path in found)


def extensions() -> list[Extension]:
    """The extensions to build here and now."""
    parts = selected_parts()
    made: list[Extension] = []
    if "core" in parts:
        made.append(_core_extension())
    if "cpu" in parts:
        made.append(_cpu_extension())
    if "cuda" in parts:
        made.append(_cuda_extension())
    return made


def _core_extension() -> Extension:
    from pybind11.setup_helpers import Pybind11Extension

    return Pybind11Extension(
        "pagedkv._core",
        sources("csrc/core", "csrc/bindings"),
        include_dirs=[str(ROOT / "include")],
        # setuptools does not look into sources: a changed header must rebuild them too.
        depends=[str(path) for path in sorted(ROOT.glob("include/pagedkv/core/*.h"))]
        + [str(path) for path in sorted(ROOT.glob("csrc/bindings/*.h"))],
        cxx_std=20,
        extra_compile_args=["-O3", "-fvisibility=hidden", "-Wall", "-Wextra"],
    )


def _cpu_extension() -> Extension:
    from torch.utils.cpp_extension import CppExtension

    cuda_adapters = set(_cuda_adapters())
    files = [s for s in sources("csrc/ops", "csrc/cpu") if s not in cuda_adapters]
    return CppExtension(
        "pagedkv._ops_cpu",
        files,
        include_dirs=[str(ROOT / "include"), str(ROOT / "csrc")],
        extra_compile_args={"cxx": CXX_FLAGS},
        py_limited_api=True,
        libraries=["torch_cpu"],
    )


def _cuda_extension() -> Extension:
    import torch
    from torch.utils import cpp_extension

    home = cuda_home()
    assert home is not None
    # Beside a CPU-only torch wheel cpp_extension sees no toolkit and no CUDA version; the stable
    # ABI needs neither.
    cpp_extension.CUDA_HOME = str(home)
    if torch.version.cuda is None:
        torch.version.cuda = _toolkit_version(home)
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "9.0a")
    extension = cpp_extension.CUDAExtension(
        "pagedkv._ops_cuda",
        sources("csrc/cuda") + _cuda_adapters(),
        include_dirs=[str(ROOT / "include"), str(ROOT / "csrc")],
        extra_compile_args={
            "cxx": CXX_FLAGS,
            "nvcc": [
                "-O1",  # of the launchers, which are host code; kernels have their own level, 3
                "-std=c++20",
                STABLE_ABI,
                "--expt-relaxed-constexpr",
                "-U__CUDA_NO_HALF_OPERATORS__",
                "-U__CUDA_NO_HALF_CONVERSIONS__",
                "-U__CUDA_NO_HALF2_OPERATORS__",
                "-U__CUDA_NO_BFLOAT16_CONVERSIONS__",
            ],
        },
        py_limited_api=True,
    )
    # torch's default list names c10_cuda and torch_cuda, which a CPU-only wheel lacks and the
    # stable ABI does not need.
    extension.libraries = ["torch_cpu", "cudart_static", "rt", "dl", "pthread"]
    return extension


def _cuda_adapters() -> list[str]:
    return [s for s in sources("csrc/ops") if Path(s).name.startswith("cuda_")]


def _toolkit_version(home: Path) -> str:
    """The toolkit's version as "13.0", from the header every toolkit has."""
    for line in (home / "include" / "cuda.h").read_text().splitlines():
        if line.startswith("#define CUDA_VERSION"):
            number = int(line.split()[2])
            return f"{number // 1000}.{number % 1000 // 10}"
    raise SystemExit(f"{home}/include/cuda.h has no CUDA_VERSION")


class SharedRuntime:
    """A build_ext whose libraries take the C++ runtime from the process that loads them."""

    def build_extensions(self: Any) -> None:
        flags = cxx_runtime.link_flags(self.compiler, Path(self.build_temp) / "cxx_runtime")
        for extension in self.extensions:
            extension.extra_link_args = [*extension.extra_link_args, *flags]
        super().build_extensions()  # type: ignore[misc]
        for extension in self.extensions:
            cxx_runtime.check(Path(self.get_ext_fullpath(extension.name)))


def build_ext_class() -> Any:
    """torch's BuildExtension (ninja, parallel, incremental); without torch's parts, pybind11's."""
    if selected_parts() == ["core"]:
        from pybind11.setup_helpers import build_ext

        return type("CoreBuild", (SharedRuntime, build_ext), {})
    from torch.utils.cpp_extension import BuildExtension

    class LibraryBuild(SharedRuntime, BuildExtension):  # type: ignore[misc]
        """Names operator libraries plainly: they serve every Python, so their file carries no
        Python tag."""

        def get_ext_filename(self, ext_name: str) -> str:
            if "_ops_" in ext_name:
                return ext_name.replace(".", os.sep) + ".so"
            return super().get_ext_filename(ext_name)  # type: ignore[no-any-return]

        def get_export_symbols(self, ext: Extension) -> list[str]:
            return []

    return LibraryBuild.with_options(use_ninja=True, no_python_abi_suffix=False)
