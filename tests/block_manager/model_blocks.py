"""The blocks of the dictionary model: pools, cache, evictions. model.py has the calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from model_values import Block, Key, Seq

from pagedkv.block_manager import CanAllocate, MissReason, UnknownSequence


@dataclass
class Blocks:
    """Every block that has content, who holds it, and what can be found."""

    num_blocks: int
    block_size: int
    num_cpu_blocks: int
    watermark: float
    window: int = 0
    seqs: dict[int, Seq] = field(default_factory=dict)
    freed: set[int] = field(default_factory=set)
    blocks: dict[int, Block] = field(default_factory=dict)  # by id, all that are not free
    cpu: dict[int, Block] = field(default_factory=dict)
    cache: dict[Key, Block] = field(default_factory=dict)
    idle: dict[Block, None] = field(default_factory=dict)  # oldest first
    cpu_idle: dict[Block, None] = field(default_factory=dict)
    # Blocks that wait for the end of a step: (step, block, pool).
    waiting: list[tuple[int, Block, dict[int, Block]]] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    last_step: int = 0
    # Since the last comparison: block, steps idle, sequences of which one needed it, CPU block.
    evicted: list[tuple[int, int, tuple[int, ...], int]] = field(default_factory=list)
    # Everything that was evicted, by extra key and all tokens to its end.
    lost: set[tuple[bytes, tuple[int, ...]]] = field(default_factory=set)
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTED, 0))

    # -- queries ---------------------------------------------------------------------------------
    @property
    def num_allocatable(self) -> int:
        return self.num_blocks - len(self.blocks) + len(self.idle)

    @property
    def num_returning(self) -> int:
        pools = [pool for _, block, pool in self.waiting if block.num_refs == 0]
        return sum(pool is self.blocks for pool in pools)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def get(self, seq_id: int) -> Seq:
        if seq_id not in self.seqs:
            raise UnknownSequence(seq_id)
        return self.seqs[seq_id]

    def get_all(self, seq_ids: Sequence[int]) -> list[Seq]:
        for i, seq_id in enumerate(seq_ids):
            self.get(seq_id)
            if seq_id in seq_ids[:i]:
                raise ValueError("twice")
        return [self.seqs[seq_id] for seq_id in seq_ids]

    def hits(self, tokens: Sequence[int], extra_key: bytes) -> list[Block]:
        found: list[Block] = []
        parent: Any = extra_key
        for end in range(self.block_size, len(tokens), self.block_size):
            block = self.cache.get((parent, tuple(tokens[end - self.block_size : end])))
            if block is None:
                break
            found.append(block)
            parent = block
        return found

    def plan(
        self, tokens: Sequence[int], limit: int, extra_key: bytes
    ) -> tuple[list[Block], int, int]:
        """Hits, tokens held, and blocks taken from those that can be allocated."""
        hits = self.hits(tokens, extra_key)
        num_tokens = min(len(tokens), len(hits) * self.block_size + limit)
        num_new = self.blocks_for(num_tokens) - len(hits)
        held = hits[self.num_behind(hits) :]
        num_new += sum(block in self.idle or self.is_on_cpu(block) for block in held)
        return hits, num_tokens, num_new

    def num_behind(self, hits: list[Block]) -> int:
        kept = max(self.window - 1, self.block_size)
        return max(0, len(hits) * self.block_size - kept) // self.block_size if self.window else 0

    def can_allocate(self, tokens: Sequence[int], limit: int, extra_key: bytes) -> CanAllocate:
        most = self.blocks_for(len(tokens))
        if self.window:
            span = max(self.window - 1, self.block_size) + limit
            most = min(most, 1 + self.blocks_for(span - 1))
        if most > self.num_blocks:
            return CanAllocate.NEVER
        left = int(self.watermark * self.num_blocks) if self.seqs else 0
        fits = self.num_allocatable - self.plan(tokens, limit, extra_key)[2] >= left
        return CanAllocate.OK if fits else CanAllocate.LATER

    # -- blocks ----------------------------------------------------------------------------------
    def hold(self, block: Block) -> None:
        block.num_refs += 1
        self.idle.pop(block, None)
        self.cpu_idle.pop(block, None)
        if block.num_refs == 1:
            self.waiting = [entry for entry in self.waiting if entry[1] is not block]

    def drop(self, block: Block, pool: dict[int, Block]) -> None:
        block.num_refs -= 1
        if block.num_refs > 0:
            return
        block.is_incoming = False
        self.waiting = [entry for entry in self.waiting if entry[1] is not block]
        if self.steps:
            self.waiting.append((self.last_step, block, pool))
        else:
            self.settle(block, pool)

    def settle(self, block: Block, pool: dict[int, Block]) -> None:
        if block.key is not None:
            (self.cpu_idle if pool is self.cpu else self.idle)[block] = None
            block.idle_since = self.last_step
        else:
            del pool[block.id]

    def unpublish(self, block: Block) -> None:
        for child in [b for b in self.cache.values() if b.key is not None and b.key[0] is block]:
            self.unpublish(child)
        assert block.key is not None
        del self.cache[block.key]
        block.key = None
        if block in self.idle:
            del self.idle[block]
            del self.blocks[block.id]
        if block in self.cpu_idle:
            del self.cpu_idle[block]
            del self.cpu[block.id]

    def is_on_cpu(self, block: Block) -> bool:
        return self.cpu.get(block.id) is block

    def idle_steps(self, block: Block) -> int:
        is_idle = block in self.idle or block in self.cpu_idle
        return self.last_step - block.idle_since if is_idle else 0

    def touch(self, block: Block) -> None:
        for idle in (self.idle, self.cpu_idle):
            if block in idle:
                idle[block] = idle.pop(block)
                block.idle_since = self.last_step

    def content(self, block: Block) -> tuple[bytes, tuple[int, ...]]:
        assert block.key is not None
        parent, tokens = block.key
        if isinstance(parent, bytes):
            return parent, tokens
        extra_key, before = self.content(parent)
        return extra_key, before + tokens

    def miss_reason(self, tokens: Sequence[int], extra_key: bytes) -> MissReason:
        """Of the block at which a match of tokens ends."""
        end = (len(self.hits(tokens, extra_key)) + 1) * self.block_size
        if end >= len(tokens):
            return MissReason.NONE
        was_there = (extra_key, tuple(tokens[:end])) in self.lost
        return MissReason.EVICTED if was_there else MissReason.NEVER_CACHED

    def take(self, block_id: int, pool: dict[int, Block]) -> Block:
        assert block_id not in pool, f"block {block_id} was handed out while it is not free"
        pool[block_id] = Block(block_id, num_refs=1)
        return pool[block_id]


COUNTED = (
    "prefix_cache_queries",
    "prefix_cache_hits",
    "prefix_cache_cpu_hits",
    "num_evictions",
    "num_offloaded",
    "num_onloaded",
    "num_offload_drops",
    "num_copies",
    "num_swapped_out",
    "num_swapped_in",
)
