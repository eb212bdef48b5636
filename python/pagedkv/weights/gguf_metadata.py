"""Metadata of a GGUF file's architecture, read with the checks that every value needs. Used by the
files of the architectures.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

# A tensor of a layer: its number, its name there, and which of the two it is.
BLOCK = re.compile(r"blk\.(0|[1-9][0-9]{0,5})\.([a-z_]+)\.(weight|bias)")


def hugging_face_name(
    name: str, others: Mapping[str, str], in_blocks: Mapping[str, str], layers: str
) -> str | None:
    """Hugging Face's name of a GGUF tensor, or None if the architecture has no such tensor.

    Args:
        others: whole names of tensors outside blocks.
        in_blocks: GGUF's name inside a block -> Hugging Face's inside a layer.
        layers: what stands before a layer's number, as in "model.layers".
    """
    if name in others:
        return others[name]
    match = BLOCK.fullmatch(name)
    if match is None or match[2] not in in_blocks:
        return None
    return f"{layers}.{match[1]}.{in_blocks[match[2]]}.{match[3]}"


@dataclass(frozen=True, slots=True)
class Metadata:
    """prefix: the architecture's name and a dot, which begin its keys."""

    values: Mapping[str, object]
    prefix: str

    def get(self, key: str, default: object = None) -> object:
        return self.values.get(self.prefix + key, default)

    def positive(self, key: str, default: int | None = None) -> int:
        value, key = self.get(key, default), self.prefix + key
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"GGUF metadata: {key} is {value!r:.200}, not a positive whole number")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value, key = self.get(key, default), self.prefix + key
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"GGUF metadata: {key} is {value!r:.200}, not a number")
        return float(value)

    def text(self, key: str, default: str) -> str:
        value, key = self.get(key, default), self.prefix + key
        if not isinstance(value, str):
            raise ValueError(f"GGUF metadata: {key} is {value!r:.200}, not a text")
        return value

    def vocab_size(self) -> int:
        """As stated, or the number of tokens."""
        if self.get("vocab_size") is not None:
            return self.positive("vocab_size")
        tokens = self.values.get("tokenizer.ggml.tokens")
        if not isinstance(tokens, list) or not tokens:
            raise ValueError(
                f"GGUF metadata: neither {self.prefix}vocab_size nor tokenizer.ggml.tokens"
            )
        return len(tokens)
