"""Metadata of a GGUF file's architecture, read with the checks that every value needs. Used by the
files of the architectures.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

# A tensor of a layer: its number, its name there, and which of the two it is.
BLOCK = re.compile(r"blk\.(0|[1-9][0-9]{0,5})\.([a-z_]+)\.(weight|bias)")


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
            raise ValueError(f"GGUF metadata: {key} is {value!r}, not a positive whole number")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value, key = self.get(key, default), self.prefix + key
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"GGUF metadata: {key} is {value!r}, not a number")
        return float(value)

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
