"""pagedkv: LLM serving from a paged KV cache.

Four things, each usable alone: `BlockManager` (the C++ block manager, no torch), `pagedkv.ops`
(paged attention and cache kernels),
`LLM` (the engine), and `pagedkv.inspect` (pictures of the memory). Names are imported on first use,
so `from pagedkv import
BlockManager` never imports torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagedkv.block_manager import BlockManager, StepTables
    from pagedkv.engine import LLM
    from pagedkv.sampling_params import SamplingParams

__version__ = "0.1.0"

__all__ = ["LLM", "BlockManager", "SamplingParams", "StepTables", "__version__"]

_HOME = {
    "BlockManager": "pagedkv.block_manager",
    "StepTables": "pagedkv.block_manager",
    "LLM": "pagedkv.engine",
    "SamplingParams": "pagedkv.sampling_params",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(
            f"module 'pagedkv' has no attribute {name!r}; it has {', '.join(__all__)}"
        )
    return getattr(importlib.import_module(_HOME[name]), name)
