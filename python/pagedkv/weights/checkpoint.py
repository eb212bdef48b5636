"""What every kind of checkpoint gives: configuration, tensors under Hugging Face names, and what a
tokenizer is made from. Opened by open_checkpoint (opening.py), read by the models' loader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

Tensors = Iterator[tuple[str, torch.Tensor]]


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """An opened checkpoint; the tensors are read only when tensors() is iterated.

    read: tensors in CPU memory; stream: on a GPU, read by many threads; None: only read can.
    path: the directory or the file. config, generation_config: as Hugging Face's config.json and
    generation_config.json (empty where there is none), also for GGUF. tokenizer_source: the
    directory, or the metadata of a GGUF file; pagedkv.text.load_tokenizer takes either.
    """

    path: Path
    config: dict[str, object]
    generation_config: dict[str, object]
    tokenizer_source: Path | Mapping[str, object]
    tensor_names: tuple[str, ...]
    read: Callable[[], Tensors]
    stream: Callable[[torch.device], Tensors] | None = None

    def tensors(self, device: torch.device | str = "cpu") -> Tensors:
        """(Hugging Face name, tensor) of each of tensor_names, one at a time. device: where they
        are going. A GPU's are there already where the files' bytes are the tensors'.
        """
        place = torch.device(device)
        if place.type == "cpu" or self.stream is None:
            return self.read()
        return self.stream(place)
