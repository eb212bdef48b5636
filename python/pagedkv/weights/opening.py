"""From what a user writes as a model to an opened checkpoint."""

from __future__ import annotations

from pathlib import Path

from pagedkv.weights.checkpoint import Checkpoint
from pagedkv.weights.fetching import ALIASES, fetch
from pagedkv.weights.gguf_checkpoint import open_gguf
from pagedkv.weights.safetensors_directory import open_directory


def open_checkpoint(model: str | Path) -> Checkpoint:
    """Open a model's weights: an alias, a directory of safetensors, or a GGUF file.

    An alias is fetched first, if it is not on this machine yet.

    Raises:
        ValueError: there is no such model, or its files are malformed.
        RuntimeError: an alias could not be fetched.
    """
    if isinstance(model, str) and model in ALIASES:
        return open_gguf(fetch(model))
    path = Path(model)
    if path.is_dir():
        return open_directory(path)
    if path.is_file() and path.suffix.lower() == ".gguf":
        return open_gguf(path)
    state = "is not a .gguf file" if path.is_file() else "does not exist"
    raise ValueError(
        f"no model {str(model)!r}: a path of that name {state}. A model is an alias "
        f"({', '.join(ALIASES)}), a directory with config.json and safetensors, or a .gguf file"
    )
