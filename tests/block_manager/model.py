"""A block manager as plain dictionaries: slow, small and obviously right. The stateful test runs it
beside the compiled one and compares everything after every operation.

It predicts all but one thing: which free block an allocation takes. That it reads off the real
block table (`observed`) and only checks that the block was free.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from model_offloading import OffloadingBlocks
from model_values import FREED, Block, Seq

from pagedkv.block_manager import DoubleFree, OutOfBlocks


@dataclass
class Model(OffloadingBlocks):
    """The dictionary model. Each method has the name of the call it predicts."""

    # -- calls -----------------------------------------------------------------------------------
    def allocate(
        self, seq_id: int, tokens: list[int], limit: int, extra_key: bytes, observed: list[int]
    ) -> int:
        if seq_id in self.seqs:
            raise ValueError("exists")
        hits, num_tokens, num_taken = self.plan(tokens, limit, extra_key)
        if num_taken > self.num_allocatable:
            raise OutOfBlocks
        behind = self.num_behind(hits)
        for block in reversed(hits[:behind]):
            self.touch(block)
        for block in hits[behind:]:
            self.hold_hit(block)
        on_cpu = [i for i in range(behind, len(hits)) if self.is_on_cpu(hits[i])]
        num_new = self.blocks_for(num_tokens) - len(hits) + len(on_cpu)
        self.make_room(num_new, [seq_id])
        for i in on_cpu:
            self.bring_back(hits[i], observed[i])
        table = [FREED] * behind + hits[behind:]
        table += [self.take(block_id, self.blocks) for block_id in observed[len(hits) :]]
        self.seqs[seq_id] = Seq(table, list(tokens), extra_key, num_tokens, len(hits))
        self.seqs[seq_id].num_freed = behind
        self.freed.discard(seq_id)
        self.counts["prefix_cache_queries"] += len(tokens)
        self.counts["prefix_cache_hits"] += len(hits) * self.block_size
        return len(hits) * self.block_size

    def num_blocks_needed(self, seq_ids: list[int], counts: list[int]) -> int:
        shared: dict[Block, int] = {}
        needed = 0
        for seq, count in zip(self.get_all(seq_ids), counts, strict=True):
            if count < 0 or seq.is_swapped:
                raise ValueError("count or swapped")
            needed += self.blocks_for(seq.num_tokens + count) - len(seq.table)
            if self.must_copy(seq, count):
                shared[seq.table[-1]] = shared.get(seq.table[-1], 0) + 1
        return needed + sum(min(n, block.num_refs - 1) for block, n in shared.items())

    def must_copy(self, seq: Seq, count: int) -> bool:
        is_partial = seq.num_tokens % self.block_size > 0
        return count > 0 and is_partial and seq.table[-1].num_refs > 1

    def append_batch(
        self, seq_ids: list[int], counts: list[int], observed: list[list[int]]
    ) -> list[tuple[int, int]]:
        needed = self.num_blocks_needed(seq_ids, counts)
        if needed > self.num_allocatable:
            raise OutOfBlocks
        self.make_room(needed, seq_ids)
        copies = []
        for seq_id, count, ids in zip(seq_ids, counts, observed, strict=True):
            seq = self.seqs[seq_id]
            if self.must_copy(seq, count):
                old, at = seq.table[-1], len(seq.table) - 1
                seq.table[-1] = self.take(ids[at], self.blocks)
                self.drop(old, self.blocks)
                copies.append((old.id, ids[at]))
            seq.num_tokens += count
            seq.table += [self.take(i, self.blocks) for i in ids[len(seq.table) :]]
        self.counts["num_copies"] += len(copies)
        return copies

    def publish_batch(
        self, seq_ids: list[int], tokens: list[list[int]], num_computed: list[int]
    ) -> None:
        for seq, new, computed in zip(self.get_all(seq_ids), tokens, num_computed, strict=True):
            if not 0 <= computed <= min(seq.num_tokens, len(seq.tokens) + len(new)):
                raise ValueError("num_computed_tokens")
        for seq_id, new, computed in zip(seq_ids, tokens, num_computed, strict=True):
            seq = self.seqs[seq_id]
            seq.tokens += new
            while seq.can_publish and seq.num_published < computed // self.block_size:
                if not self.publish_next(seq):
                    break

    def publish_next(self, seq: Seq) -> bool:
        i, size = seq.num_published, self.block_size
        parent: Any = seq.extra_key if i == 0 else seq.table[i - 1]
        block = seq.table[i]
        if i > 0 and (parent.key is None or self.cache.get(parent.key) is not parent):
            seq.can_publish = False
            return False
        if self.cpu.get(block.id) is block:
            return False
        key = (parent, tuple(seq.tokens[i * size : (i + 1) * size]))
        there = self.cache.get(key)
        if there is None and block.key is not None:
            seq.can_publish = False
            return False
        if there is None:
            block.key = key
            self.cache[key] = block
        elif self.is_on_cpu(there):
            if block.key is not None:
                seq.can_publish = False
                return False
            self.take_over(block, there)
        elif there is not block:
            self.hold(there)
            seq.table[i] = there
            self.drop(block, self.blocks)
        seq.num_published += 1
        return True

    def fork(self, parent_id: int, child_id: int) -> None:
        parent = self.get(parent_id)
        if child_id in self.seqs:
            raise ValueError("exists")
        child = Seq(
            list(parent.table), list(parent.tokens), parent.extra_key, parent.num_tokens,
            parent.num_published, parent.can_publish, parent.is_swapped, parent.num_freed,
        )  # fmt: skip
        for block in child.held:
            block.num_refs += 1
        self.seqs[child_id] = child
        self.freed.discard(child_id)

    def free_batch(self, seq_ids: list[int]) -> None:
        for i, seq_id in enumerate(seq_ids):
            if seq_id in self.freed or (seq_id in self.seqs and seq_id in seq_ids[:i]):
                raise DoubleFree
            self.get(seq_id)
        for seq_id in seq_ids:
            for block in reversed(self.seqs.pop(seq_id).held):
                self.drop(block, self.cpu if self.cpu.get(block.id) is block else self.blocks)
            self.freed.add(seq_id)

    def free_behind_batch(self, seq_ids: list[int], first_needed: list[int]) -> int:
        for seq, first in zip(self.get_all(seq_ids), first_needed, strict=True):
            if seq.is_swapped or not 0 <= first <= seq.num_tokens:
                raise ValueError("swapped or out of range")
        num_dropped = 0
        for seq_id, first in zip(seq_ids, first_needed, strict=True):
            seq, end = self.seqs[seq_id], first // self.block_size
            if end <= seq.num_freed:
                continue
            if seq.can_publish and end == seq.num_published:
                end -= 1
            seq.can_publish = seq.can_publish and end <= seq.num_published
            for i in reversed(range(seq.num_freed, end)):
                self.drop(seq.table[i], self.blocks)
                seq.table[i] = FREED
                num_dropped += 1
            seq.num_freed = end
        return num_dropped

    def swap_out(self, seq_ids: list[int], observed: list[list[int]]) -> list[tuple[int, int]]:
        seqs = self.get_all(seq_ids)
        if any(seq.is_swapped for seq in seqs):
            raise ValueError("swapped")
        held = [block for seq in seqs for block in seq.held]
        alone = {block for block in held if held.count(block) == block.num_refs}
        alone = {block for block in alone if block.id not in self.arriving}
        if len(alone) > self.num_cpu_blocks - len(self.cpu) + len(self.cpu_idle):
            raise OutOfBlocks
        pairs: dict[Block, Block] = {}
        for seq in seqs:
            published = seq.table[seq.num_freed : seq.num_published]
            if seq.num_freed > 0 and any(block in alone for block in published[:1]):
                seq.can_publish = False  # its parent is not held
            if seq.can_publish and any(block.key is None for block in published):
                seq.can_publish = False
        while len(alone) > self.num_cpu_blocks - len(self.cpu):
            self.give_up(next(iter(self.cpu_idle)), tuple(seq_ids[:1]))
        for seq, ids in zip(seqs, observed, strict=True):
            for i, block in enumerate(seq.table):
                if block not in alone:
                    continue
                if block not in pairs:
                    pairs[block] = self.take(-1 - ids[i], self.cpu)
                else:
                    pairs[block].num_refs += 1
                seq.num_published = min(seq.num_published, i)
                seq.table[i] = pairs[block]
                self.drop(block, self.blocks)
            seq.is_swapped = True
        self.counts["num_swapped_out"] += len(pairs)
        return [(source.id, target.id) for source, target in pairs.items()]

    def swap_in(self, seq_ids: list[int], observed: list[list[int]]) -> list[tuple[int, int]]:
        seqs = self.get_all(seq_ids)
        if not all(seq.is_swapped for seq in seqs):
            raise ValueError("not swapped")
        away = {b for seq in seqs for b in seq.table if self.cpu.get(b.id) is b}
        if len(away) > self.num_allocatable:
            raise OutOfBlocks
        self.make_room(len(away), seq_ids[:1])
        if self.offloads:
            for block in away:
                block.num_refs += 1
            self.held += away
        pairs: dict[Block, Block] = {}
        for seq, ids in zip(seqs, observed, strict=True):
            for i, block in enumerate(seq.table):
                if block not in away:
                    continue
                if block not in pairs:
                    pairs[block] = self.take(ids[i], self.blocks)
                    if self.steps:
                        pairs[block].is_incoming = True
                        self.waiting.append((self.last_step, pairs[block], self.blocks))
                else:
                    pairs[block].num_refs += 1
                seq.table[i] = pairs[block]
                self.drop(block, self.cpu)
            seq.is_swapped = False
        self.counts["num_swapped_in"] += len(pairs)
        return [(source.id, target.id) for source, target in pairs.items()]

    def begin_step(self) -> int:
        self.last_step += 1
        self.steps.append(self.last_step)
        self.begin_moves()
        return self.last_step

    def end_step(self, step: int, has_failed: bool) -> None:
        if not self.steps or step != self.steps[0]:
            raise ValueError("not the oldest")
        self.steps.pop(0)
        ended = [entry for entry in self.waiting if entry[0] <= step]
        self.waiting = [entry for entry in self.waiting if entry[0] > step]
        for _, block, pool in ended:
            block.is_incoming = False
            if block.num_refs == 0:
                self.settle(block, pool)
        if has_failed:
            self.forget_moves(step)

    def reset_prefix_cache(self) -> int:
        num_before = len(self.cache)
        self.lost.clear()
        for seq in self.seqs.values():
            seq.can_publish = False
        while self.cache:
            self.unpublish(next(iter(self.cache.values())))
        return num_before

    # -- what can be seen ------------------------------------------------------------------------
    def statistics(self) -> dict[str, int]:
        held = [block for block in self.blocks.values() if block.num_refs > 0]
        incoming = sum(block.is_incoming for block in held)
        fill: dict[Block, int] = {}
        for seq in self.seqs.values():
            for i, block in enumerate(seq.table):
                if self.blocks.get(block.id) is block:
                    fill[block] = min(self.block_size, seq.num_tokens - i * self.block_size)
        return {
            "num_free": self.num_blocks - len(self.blocks),
            "num_cached_idle": len(self.idle),
            "num_referenced": len(held) - incoming,
            "num_shared": sum(block.num_refs > 1 for block in held),
            # Draining and, outgoing, in transit: the model does not tell these two apart.
            "num_waiting": self.num_returning + incoming,
            "num_cpu_free": self.num_cpu_blocks - len(self.cpu),
            "num_cpu_cached_idle": len(self.cpu_idle),
            "num_sequences": len(self.seqs),
            "num_tokens": sum(fill.values()),
            **self.counts,
        }
