"""What the dictionary model (model.py) is made of: blocks with content, and sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pagedkv.block_manager import FREED_BLOCK

Key = tuple[Any, tuple[int, ...]]  # (parent block or extra key, tokens)


@dataclass(eq=False)
class Block:
    """A block with content; free ones have no object."""

    id: int
    num_refs: int = 0
    key: Key | None = None  # published under this
    is_incoming: bool = False  # swapped in beside a step
    idle_since: int = 0  # steps launched when it last went idle


FREED = Block(FREED_BLOCK)  # stands in tables for what free_behind gave back


@dataclass
class Seq:
    """A sequence; `table` mixes pool blocks and, while swapped, CPU blocks."""

    table: list[Block]
    tokens: list[int]  # known ids
    extra_key: bytes
    num_tokens: int
    num_published: int
    can_publish: bool = True
    is_swapped: bool = False
    num_freed: int = 0

    @property
    def held(self) -> list[Block]:
        return self.table[self.num_freed :]
