"""From what a user writes as a model to an opened checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from pagedkv.weights.checkpoint import Checkpoint
from pagedkv.weights.fetching import ALIASES, fetch
from pagedkv.weights.gguf_checkpoint import open_gguf
from pagedkv.weights.hub import fetch_config_from_hub, fetch_from_hub, is_hub_id
from pagedkv.weights.safetensors_directory import open_directory, read_json


def open_checkpoint(
    model: str | Path, *, check_config: Callable[[Mapping[str, object]], object] = dict
) -> Checkpoint:
    """Open a model's weights: an alias, a directory of safetensors, a GGUF file, or an id of the
    Hugging Face hub (owner/name), where no path has that name.

    An alias, or a model of the hub, is fetched first, if it is not on this machine yet.
    check_config raises for a config that cannot be used; it is asked before a directory's weights
    are looked for.

    Raises:
        TypeError: model is neither text nor a path.
        ValueError: there is no such model, or its files are malformed.
        RuntimeError: it could not be fetched.
    """
    path, is_dir, is_file = _located(model, fetch_from_hub)
    if is_dir:
        return open_directory(path, check_config=check_config)
    if is_file and path.suffix.lower() == ".gguf":
        checkpoint = open_gguf(path)
        check_config(checkpoint.config)
        return checkpoint
    raise ValueError(_no_model(model, "is not a .gguf file" if is_file else "does not exist"))


def read_config(model: str | Path) -> dict[str, object]:
    """The config.json of a model, and nothing of its weights: what open_checkpoint takes, where a
    directory needs no weights and of a model of the hub the config.json alone is fetched; or the
    path of such a file.

    Raises:
        TypeError, ValueError, RuntimeError: as open_checkpoint.
    """
    path, is_dir, is_file = _located(model, fetch_config_from_hub)
    if is_dir:
        return read_json(path / "config.json")
    if is_file and path.suffix.lower() == ".gguf":
        return open_gguf(path).config
    if is_file and path.suffix.lower() == ".json":
        return read_json(path)
    state = "is neither a .gguf nor a .json file" if is_file else "does not exist"
    raise ValueError(_no_model(model, state))


def _located(model: str | Path, from_hub: Callable[[str], Path]) -> tuple[Path, bool, bool]:
    """Where a model lies, fetched if need be; whether that is a directory, and whether a file."""
    if not isinstance(model, str | Path):
        raise TypeError(f"model must be a name or a path, got {type(model).__name__} {model!r}")
    is_alias = isinstance(model, str) and model in ALIASES
    path = fetch(str(model)) if is_alias else Path(model)
    if isinstance(model, str) and is_hub_id(model) and not path.exists():
        path = from_hub(model)
    try:
        # An empty name would be the current folder.
        return path, bool(str(model)) and path.is_dir(), path.is_file()
    except OSError as error:
        raise ValueError(f"no model {str(model)!r:.200}: {error.strerror}") from error


def _no_model(model: str | Path, state: str) -> str:
    return (
        f"no model {str(model)!r:.200}: a path of that name {state}. A model is an alias "
        f"({', '.join(ALIASES)}), a directory with config.json and safetensors, a .gguf file, "
        "or owner/name on the Hugging Face hub"
    )
