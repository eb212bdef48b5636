"""A directory with config.json and safetensors files as a checkpoint.

model.safetensors.index.json, where there is one, is an allow-list: only the files that it names are
opened, and they must hold exactly the tensors that it gives them. Nothing is ever unpickled.
The safetensors library checks a file's header against its size before anything is read from it.
A name twice in an object of JSON, for which readers take one value or the other, is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from pagedkv.weights.checkpoint import Checkpoint
from pagedkv.weights.streaming import Span, spans_in, stream

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_JSON_BYTES = 64 * 2**20
# A name, not a path: no separator, and no dot in front. A downloaded model's files may themselves
# be links into the hub's cache, so links are followed.
_SHARD_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*\.safetensors")
_SHOWN = 8


def open_directory(
    path: Path, *, check_config: Callable[[Mapping[str, object]], object] = dict
) -> Checkpoint:
    """Open a model directory; every header is read and checked now, tensors when asked for.
    check_config may refuse the config before that.

    Raises:
        ValueError: a file is missing, malformed or cut short, or index and files disagree.
    """
    config = read_json(path / "config.json")
    check_config(config)
    generation = path / "generation_config.json"
    files = _files(path)
    return Checkpoint(
        path=path,
        config=config,
        generation_config=read_json(generation) if generation.exists() else {},
        tokenizer_source=path,
        tensor_names=tuple(name for names in files.values() for name in names),
        read=lambda: _read(files),
        stream=lambda device: stream(_spans(files), device),
    )


def read_json(path: Path) -> dict[str, object]:
    """A JSON object from a file.

    Raises:
        ValueError: the file is missing, cannot be read, is too large, or not a JSON object; or an
            object in it has a name twice.
    """
    try:
        # Not by the size that the file is said to have: a link may lead to a device without end.
        with path.open("rb") as file:
            data = file.read(MAX_JSON_BYTES + 1)
    except FileNotFoundError:
        raise ValueError(f"{path} is missing") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if len(data) > MAX_JSON_BYTES:
        raise ValueError(f"{path} is larger than {MAX_JSON_BYTES} bytes")
    try:
        value = json.loads(data.decode(), object_pairs_hook=_of_pairs)
    # Beside malformed text: numbers of more digits than Python takes, and deep nesting.
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}, not an object")
    return value


def _of_pairs(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the name {name!r:.200} appears twice in an object")
        found[name] = value
    return found


def _read(files: dict[Path, list[str]]) -> Iterator[tuple[str, torch.Tensor]]:
    for file, names in files.items():
        try:
            with safe_open(file, framework="pt") as shard:
                for name in names:
                    yield name, shard.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file}: {error}") from error


def _spans(files: dict[Path, list[str]]) -> list[Span]:
    return [span for file, names in files.items() for span in spans_in(file, names)]


def _files(path: Path) -> dict[Path, list[str]]:
    """Files to open and the tensors to take from each."""
    if (path / INDEX).exists():
        return _indexed_files(path)
    if (path / SINGLE).exists():
        return {path / SINGLE: _names_in(path / SINGLE)}
    others = sorted(file.name for file in path.iterdir() if file.suffix == ".safetensors")
    if others:
        raise ValueError(
            f"{path} holds {_some(others)} but neither {SINGLE} nor {INDEX}, "
            "so nothing says which to load"
        )
    raise ValueError(
        f"{path} holds no {SINGLE} and no {INDEX}; only safetensors are read, "
        "never pickled weights (.bin, .pt)"
    )


def shard_names(index: Path) -> list[str]:
    """The files that an index names, each once.

    Raises:
        ValueError: it is malformed, or names something else than a plain file.
    """
    return list(_shards(index))


def _shards(index: Path) -> dict[str, list[str]]:
    """The tensors of each file that an index names."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index}: weight_map is {type(weight_map).__name__} or empty")
    by_file: dict[str, list[str]] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not _SHARD_NAME.fullmatch(shard):
            raise ValueError(
                f"{index}: tensor {name!r:.200} lies in {shard!r:.200}, "
                "which is not the plain name of a .safetensors file"
            )
        by_file.setdefault(shard, []).append(name)
    return by_file


def _indexed_files(path: Path) -> dict[Path, list[str]]:
    index = path / INDEX
    by_file = _shards(index)
    missing = sorted(shard for shard in by_file if not (path / shard).is_file())
    if missing:
        raise ValueError(
            f"{index} names {len(by_file)} files, of which {len(missing)} are missing: "
            f"{_some(missing)}"
        )
    for shard, names in by_file.items():
        held = set(_names_in(path / shard))
        lost, extra = sorted(set(names) - held), sorted(held - set(names))
        if lost:
            raise ValueError(f"{path / shard} lacks tensors that the index promises: {_some(lost)}")
        if extra:
            raise ValueError(
                f"{path / shard} holds tensors that the index does not list there: {_some(extra)}"
            )
    return {path / shard: names for shard, names in sorted(by_file.items())}


def _names_in(file: Path) -> list[str]:
    try:
        with safe_open(file, framework="pt") as shard:
            names = list(shard.keys())
        # The library, which has just checked the length, takes the last of two equal names.
        with file.open("rb") as raw:
            json.loads(raw.read(int.from_bytes(raw.read(8), "little")), object_pairs_hook=_of_pairs)
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(f"{file}: not a valid safetensors file: {error}") from error
    return names


def _some(names: list[str]) -> str:
    # Names of a file: only plain ones are shown as they are.
    plain = [one if one.isprintable() else repr(one) for one in names[:_SHOWN]]
    shown = ", ".join(one[:200] for one in plain)
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"
