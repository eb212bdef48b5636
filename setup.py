"""Builds the three compiled parts: `_core` (pybind11, no torch), `_ops_cpu` and `_ops_cuda`
(torch's stable ABI, no Python).

CUDA is built when a toolkit is found, or as PAGEDKV_CUDA=0|1 says, never by asking whether a GPU is
present.
PAGEDKV_BUILD=core,cpu,cuda builds only the named parts (for work on one of them).
"""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import __version__, setup

if int(__version__.split(".")[0]) < 77:  # older ones cannot read pyproject.toml's licence
    raise SystemExit(
        f"pagedkv needs setuptools >= 77 to build, but {__version__} is installed: "
        "pip install -U setuptools"
    )

sys.path.insert(0, str(Path(__file__).parent / "scripts"))
import build_extensions

setup(
    ext_modules=build_extensions.extensions(),
    cmdclass={"build_ext": build_extensions.build_ext_class()},
)
