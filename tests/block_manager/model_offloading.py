"""The dictionary model's CPU pool as second level of the prefix cache: what eviction moves there,
what a hit brings back, what must be left alone until the step has begun.

A moved block keeps its object, whatever its id; a CPU block that it left and that may not be used
yet gets an object without content. Which CPU block a move goes to is read off the real manager.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from model_blocks import Blocks
from model_values import Block


@dataclass
class OffloadingBlocks(Blocks):
    """Blocks, and where their content goes."""

    offloads: bool = False
    held: list[Block] = field(default_factory=list)  # CPU blocks of moves, until a step begins
    arriving: set[int] = field(default_factory=set)  # blocks that moves fill, until then
    moved_in: dict[tuple[bool, int], int] = field(default_factory=dict)  # (on the CPU, id) -> step
    out: list[tuple[int, int]] = field(default_factory=list)  # moves of this call
    back: list[tuple[int, int]] = field(default_factory=list)
    observed: deque[int] = field(default_factory=deque)  # CPU blocks that the real moves went to

    def make_room(self, num_blocks: int, for_whom: Sequence[int]) -> None:
        while self.num_blocks - len(self.blocks) < num_blocks:
            self.evict(next(iter(self.idle)), tuple(for_whom))

    def evict(self, victim: Block, for_whom: tuple[int, ...]) -> None:
        can_move = self.offloads and victim.id not in self.arriving
        if not (can_move and self.make_cpu_room(for_whom)):
            self.give_up(victim, for_whom)
            return
        if victim.key is None:  # given up with what was dropped on the CPU
            return
        cpu_block = self.observed.popleft()
        assert cpu_block not in self.cpu, f"CPU block {cpu_block} is not free"
        self.evicted.append((victim.id, self.idle_steps(victim), for_whom, cpu_block))
        self.out.append((victim.id, cpu_block))
        del self.idle[victim]
        del self.blocks[victim.id]
        victim.id, victim.num_refs = cpu_block, 1
        self.cpu[cpu_block] = victim
        self.held.append(victim)
        self.moved_in[True, cpu_block] = self.last_step + 1
        self.counts["num_evictions"] += 1
        self.counts["num_offloaded"] += 1

    def make_cpu_room(self, for_whom: tuple[int, ...]) -> bool:
        if len(self.cpu) == self.num_cpu_blocks and self.cpu_idle:
            self.give_up(next(iter(self.cpu_idle)), for_whom)
        return len(self.cpu) < self.num_cpu_blocks

    def give_up(self, block: Block, for_whom: tuple[int, ...]) -> None:
        before = [
            (one, self.is_on_cpu(one), self.idle_steps(one), self.content(one))
            for one in self.cache.values()
        ]
        self.unpublish(block)
        for one, on_cpu, idle_steps, content in before:
            if one.key is not None:
                continue
            place = (
                (-1, idle_steps, for_whom, one.id) if on_cpu else (one.id, idle_steps, for_whom, -1)
            )
            self.evicted.append(place)
            self.lost.add(content)
            self.counts["num_offload_drops" if on_cpu else "num_evictions"] += 1

    def hold_hit(self, block: Block) -> None:
        self.hold(block)
        if self.is_on_cpu(block):
            self.held.append(block)

    def bring_back(self, block: Block, block_id: int) -> None:
        assert block_id not in self.blocks, f"block {block_id} is not free"
        self.back.append((block.id, block_id))
        self.leave_cpu(block)
        block.id, block.num_refs = block_id, 1
        self.blocks[block_id] = block
        self.arriving.add(block_id)
        self.moved_in[False, block_id] = self.last_step + 1
        if self.steps:
            block.is_incoming = True
            self.waiting.append((self.last_step, block, self.blocks))
        self.counts["num_onloaded"] += 1
        self.counts["prefix_cache_cpu_hits"] += self.block_size

    def leave_cpu(self, block: Block) -> None:
        """Its content is elsewhere from now on."""
        if block in self.cpu_idle:
            del self.cpu_idle[block]
            del self.cpu[block.id]
            return
        empty = Block(block.id, num_refs=block.num_refs)
        self.cpu[block.id] = empty
        self.held = [empty if one is block else one for one in self.held]
        self.waiting = [(step, empty if b is block else b, pool) for step, b, pool in self.waiting]

    def take_over(self, computed: Block, found: Block) -> None:
        """found, on the CPU, is where computed is from now on; who held the one holds the other."""
        self.leave_cpu(found)
        found.id, found.num_refs = computed.id, computed.num_refs
        found.is_incoming = computed.is_incoming
        self.blocks[found.id] = found
        for seq in self.seqs.values():
            seq.table = [found if one is computed else one for one in seq.table]
        self.waiting = [
            (step, found if b is computed else b, pool) for step, b, pool in self.waiting
        ]

    def take_moves(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        taken = self.out, self.back
        self.out, self.back = [], []
        assert not self.observed, "the real manager moved more"
        return taken

    def begin_moves(self) -> None:
        for block in self.held:
            self.drop(block, self.cpu)
        self.held.clear()
        self.arriving.clear()

    def forget_moves(self, step: int) -> None:
        for (on_cpu, block_id), moved_in in self.moved_in.items():
            block = (self.cpu if on_cpu else self.blocks).get(block_id)
            if moved_in >= step and block is not None and block.key is not None:
                self.unpublish(block)
