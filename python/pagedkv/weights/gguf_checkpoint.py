"""A GGUF file as a checkpoint: tensors dequantised one at a time through the `gguf` package."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

import gguf
import numpy as np
import torch

from pagedkv.weights.checkpoint import Checkpoint
from pagedkv.weights.gguf_gemma import GemmaArchitecture
from pagedkv.weights.gguf_gpt2 import GPT2Architecture
from pagedkv.weights.gguf_header import GGUFHeader, TensorPlace, read_header
from pagedkv.weights.gguf_llama import QK_NORMS, ROPE_FACTORS, LlamaArchitecture

Architecture = LlamaArchitecture | GemmaArchitecture | GPT2Architecture
ARCHITECTURES: dict[str, Architecture] = {
    "llama": LlamaArchitecture("llama", "LlamaForCausalLM", interleaves=True),
    "qwen2": LlamaArchitecture("qwen2", "Qwen2ForCausalLM"),
    "qwen3": LlamaArchitecture("qwen3", "Qwen3ForCausalLM", other_names=QK_NORMS),
    "gemma2": GemmaArchitecture("gemma2"),
    "gemma3": GemmaArchitecture("gemma3"),
    "gpt2": GPT2Architecture(),
}


def open_gguf(path: Path) -> Checkpoint:
    """Open a GGUF file; its header is read and checked now, its tensors when they are asked for.

    Raises:
        ValueError: the file is malformed or cut short, or its architecture, a tensor or a setting
            is not supported. The message names the file and the reason.
    """
    try:
        with FileIO(path) as file:
            facts = _facts(file)
            if path.stat().st_size == 0:
                raise ValueError(f"{path}: not a valid GGUF file: it is empty")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                header = read_header(path, data)
            rope_factors = _rope_factors(file, header)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    named = header.metadata.get("general.architecture")
    architecture = ARCHITECTURES.get(named) if isinstance(named, str) else None
    if architecture is None:
        raise ValueError(
            f"{path}: the GGUF architecture {named!r:.200} is not supported; "
            f"supported are {', '.join(ARCHITECTURES)}"
        )
    names = _hf_names(path, architecture, header)
    try:
        config = architecture.config_of(header.metadata, frozenset(header.tensors), rope_factors)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error

    def read() -> Iterator[tuple[str, torch.Tensor]]:
        with FileIO(path) as file:
            if _facts(file) != facts:
                raise ValueError(f"{path} has changed since it was opened")
            for name, place in header.tensors.items():
                if name in names:
                    tensor = _dequantised(file, place)
                    yield names[name], architecture.in_hf_form(name, tensor, config)

    return Checkpoint(
        path=path,
        config=config,
        generation_config=_generation_config(header),
        tokenizer_source=header.metadata,
        tensor_names=tuple(names[name] for name in header.tensors if name in names),
        read=read,
    )


def _facts(file: FileIO) -> tuple[int, int, int, int]:
    """Which file it is, and its state."""
    found = os.fstat(file.fileno())
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _hf_names(path: Path, architecture: Architecture, header: GGUFHeader) -> dict[str, str]:
    names = {name: architecture.hf_name(name) for name in header.tensors}
    names.pop(ROPE_FACTORS, None)
    unknown = sorted(name for name, found in names.items() if found is None)
    if unknown:
        raise ValueError(
            f"{path}: tensors that the architecture {architecture.name} does not have: "
            f"{unknown!s:.1000}"
        )
    return {name: found for name, found in names.items() if found is not None}


def _rope_factors(file: FileIO, header: GGUFHeader) -> torch.Tensor | None:
    place = header.tensors.get(ROPE_FACTORS)
    return None if place is None else _dequantised(file, place)


def _dequantised(file: FileIO, place: TensorPlace) -> torch.Tensor:
    """The tensor as fp32. It is read, not mapped: were the file cut meanwhile, a map would end the
    process.
    """
    raw = np.empty(place.num_bytes, np.uint8)
    file.seek(place.offset)
    filled = 0
    while filled < raw.size:
        got = file.readinto(raw.data[filled:])  # at most 2 GiB at once
        if not got:
            raise ValueError(
                f"{file.name}: tensor {place.name!r:.200} ends behind the file's end: it was cut "
                "while it was read"
            )
        filled += got
    rows = raw.reshape(*place.shape[:-1], -1)
    try:
        values = gguf.dequantize(rows, place.kind)
    except NotImplementedError as error:
        raise ValueError(
            f"{file.name}: tensor {place.name!r:.200} has the type {place.kind.name}, "
            "which the installed gguf package cannot dequantise"
        ) from error
    return torch.from_numpy(values).reshape(place.shape)


def _generation_config(header: GGUFHeader) -> dict[str, object]:
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    ends = [header.metadata[key] for key in keys if key in header.metadata]
    return {"eos_token_id": ends} if ends else {}
