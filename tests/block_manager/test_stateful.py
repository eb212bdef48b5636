"""The manager against the dictionary model, over random sequences of 100 operations: results,
refusals, tables and counters agree, and every invariant holds after every operation.

Hypothesis draws each sequence as 400 bytes, four per operation, and shrinks a failing one towards
zeros, which are no operation. 4,000 sequences in all: 4 variants of 4 shards of 250.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, note, seed, settings
from hypothesis import strategies as st
from model import Model

from pagedkv.block_manager import BlockManager, DoubleFree, OutOfBlocks, UnknownSequence

NUM_OPERATIONS = 100
NUM_SHARDS = 4
NUM_EXAMPLES = 250

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"num_blocks": 14, "block_size": 3},
    "shuffled": {"num_blocks": 16, "block_size": 3, "shuffle_seed": 5, "watermark": 0.2},
    "weak_hash": {"num_blocks": 16, "block_size": 2, "shuffle_seed": 6, "hash_bits": 4},
    "swap": {"num_blocks": 12, "block_size": 2, "num_cpu_blocks": 7, "shuffle_seed": 7},
    "window": {"num_blocks": 12, "block_size": 2, "num_cpu_blocks": 5, "window": 5},
    "offload": {
        "num_blocks": 11,
        "block_size": 2,
        "num_cpu_blocks": 8,
        "shuffle_seed": 8,
        "enable_kv_offloading": True,
    },
    "offload_window": {
        "num_blocks": 11,
        "block_size": 2,
        "num_cpu_blocks": 5,
        "window": 5,
        "enable_kv_offloading": True,
    },
}
REFUSALS = (ValueError, OutOfBlocks, UnknownSequence, DoubleFree)


class Pair:
    """The real manager and the model, driven through the same operations."""

    def __init__(self, config: dict[str, Any]) -> None:
        # Of evicted content whose hashes share a place, the manager remembers the last. Under this
        # secret none of the prompts here do; under a random one some would, now and then.
        config = {"watermark": 0.0, "window": 0, "hash_secret": b"of the 4,000 sequences"} | config
        self.window = config.pop("window")
        self.manager = BlockManager(**config)
        self.model = Model(
            config["num_blocks"],
            config["block_size"],
            config.get("num_cpu_blocks", 0),
            config["watermark"],
            self.window,
            offloads=config.get("enable_kv_offloading", False),
        )

        self.has_whole_hash = "hash_bits" not in config

    num_freed = 0  # calls of free_behind that gave blocks back

    def both(self, real: Callable[[], Any], predicted: Callable[[], Any]) -> Any:
        """Runs both; they give equal results or refuse for the same reason. Returns the result."""
        outcomes: list[Any] = []
        moves: list[list[list[int]]] = []
        for call in (real, predicted):
            try:
                outcomes.append(call())
            except REFUSALS as refusal:
                # UnknownSequence is a KeyError and so no ValueError; the types are told apart.
                outcomes.append(next(kind for kind in REFUSALS if isinstance(refusal, kind)))
            if not moves:
                moves = [pairs.tolist() for pairs in self.manager.take_moves()]
                self.model.observed.extend(cpu_block for _, cpu_block in moves[0])
        got, expected = outcomes
        assert got == expected
        assert moves == [[list(pair) for pair in pairs] for pairs in self.model.take_moves()]
        return got

    def table(self, seq_id: int) -> list[int]:
        return self.manager.block_table(seq_id).tolist() if seq_id in self.manager else []

    def tables(self, seq_ids: list[int]) -> list[list[int]]:
        return [self.table(seq_id) for seq_id in seq_ids]

    def pick(self, byte: int) -> int:
        """Mostly a sequence that lives."""
        live = list(self.model.seqs)
        return live[byte // 8 % len(live)] if live and byte % 8 else byte // 8 % 10

    def pick_some(self, a: int, b: int, c: int) -> list[int]:
        return [self.pick(a), self.pick(b)][: 1 + c % 2]

    # -- operations: a, b, c are bytes -----------------------------------------------------------
    def allocate(self, a: int, b: int, c: int) -> None:
        seq_id, length, limit = a % 10, 1 + b % 13, c % 16
        split, kind = 4 + b // 13 % 9, c // 16 % 3
        tokens = [i if i < split else 100 + kind for i in range(length)]
        key = b"k" if a & 64 else b""
        if self.model.offloads:  # few prompts, so that what was evicted is asked for again
            tokens, key = [100 * kind + i for i in range(length)], b""
        manager, model = self.manager, self.model
        cached = manager.match(tokens, extra_key=key)
        assert cached == len(model.hits(tokens, key)) * model.block_size
        window = self.window
        answer = manager.can_allocate(tokens, max_new_tokens=limit, extra_key=key, window=window)
        assert answer is model.can_allocate(tokens, limit, key)
        reason = model.miss_reason(tokens, key)
        result = self.both(
            lambda: manager.allocate(
                seq_id, tokens, max_new_tokens=limit, extra_key=key, window=window
            ),
            lambda: model.allocate(seq_id, tokens, limit, key, self.table(seq_id)),
        )
        if isinstance(result, int) and self.has_whole_hash:
            assert manager.last_miss.reason is reason
        if isinstance(result, int) and model.offloads:
            self.compute(seq_id, frees=a % 4 > 0)

    def compute(self, seq_id: int, *, frees: bool) -> None:
        """Publish what a sequence holds, and perhaps let it go."""
        held = self.model.seqs[seq_id].num_tokens
        self.both(
            lambda: self.manager.publish_batch([seq_id], [], [0], [held]),
            lambda: self.model.publish_batch([seq_id], [[]], [held]),
        )
        if frees:
            self.both(
                lambda: self.manager.free_batch([seq_id]), lambda: self.model.free_batch([seq_id])
            )

    def append(self, a: int, b: int, c: int) -> None:
        seq_ids = self.pick_some(a, b, c)
        counts = [1 + c // 2 % 4, c // 16 % 3][: len(seq_ids)]
        needed = self.both(
            lambda: self.manager.num_blocks_needed(seq_ids, counts),
            lambda: self.model.num_blocks_needed(seq_ids, counts),
        )
        room = self.manager.num_allocatable_blocks
        copies = self.both(
            lambda: [tuple(p) for p in self.manager.append_batch(seq_ids, counts).tolist()],
            lambda: self.model.append_batch(seq_ids, counts, self.tables(seq_ids)),
        )
        if isinstance(copies, list):
            # A copied-from block keeps a holder, so the room shrinks by what was taken.
            assert room - self.manager.num_allocatable_blocks == needed

    def publish(self, a: int, b: int, c: int) -> None:
        seq_ids = self.pick_some(a, b, c)
        new: list[list[int]] = []
        computed: list[int] = []
        for seq_id in seq_ids:
            seq = self.model.seqs.get(seq_id)
            known, held = (len(seq.tokens), seq.num_tokens) if seq else (0, 0)
            new.append([(b + i) % 2 for i in range(max(0, held - known))])
            computed.append(held - (c // 2 % 4 == 0))
        self.both(
            lambda: self.manager.publish_batch(
                seq_ids, np.array([*chain(*new)], np.int32), [len(ids) for ids in new], computed
            ),
            lambda: self.model.publish_batch(seq_ids, new, computed),
        )

    def fork(self, a: int, b: int, c: int) -> None:
        parent_id, child_id = self.pick(a), b % 10
        self.both(
            lambda: self.manager.fork(parent_id, child_id),
            lambda: self.model.fork(parent_id, child_id),
        )

    def free(self, a: int, b: int, c: int) -> None:
        seq_ids = self.pick_some(a, b, c)
        self.both(lambda: self.manager.free_batch(seq_ids), lambda: self.model.free_batch(seq_ids))

    def free_behind(self, a: int, b: int, c: int) -> None:
        if self.window == 0:
            return
        seq_ids = self.pick_some(a, b, c)
        held = [s.num_tokens if (s := self.model.seqs.get(i)) else 0 for i in seq_ids]
        first = [max(0, n - self.window + 1 + (c // 2 % 8 == 0) * self.window) for n in held]
        self.num_freed += self.both(
            lambda: self.manager.free_behind_batch(seq_ids, first),
            lambda: self.model.free_behind_batch(seq_ids, first),
        ) not in (0, *REFUSALS)

    def swap(self, a: int, b: int, c: int) -> None:
        seq_ids = self.pick_some(a, b, c)
        seq = self.model.seqs.get(seq_ids[0])
        is_away = seq is not None and seq.is_swapped
        name = "swap_in" if is_away != (c % 16 == 0) else "swap_out"
        self.both(
            lambda: getattr(self.manager, name)(seq_ids),
            lambda: getattr(self.model, name)(seq_ids, self.tables(seq_ids)),
        )

    def step(self, a: int, b: int, c: int) -> None:
        steps = self.model.steps
        if c % 2 or (len(steps) > 2 and c % 16):
            step = steps[0] if steps and c % 32 else a
            has_failed = c % 8 == 7
            self.both(
                lambda: self.manager.end_step(step, has_failed=has_failed),
                lambda: self.model.end_step(step, has_failed),
            )
        elif len(steps) < 3:
            self.both(self.manager.begin_step, self.model.begin_step)

    def reset(self, a: int, b: int, c: int) -> None:
        if a % 8 == 0:
            self.both(self.manager.reset_prefix_cache, self.model.reset_prefix_cache)

    OPERATIONS = (
        allocate, allocate, append, append, append, append, publish, publish,
        fork, fork, free, swap, swap, step, step, reset, free_behind, free_behind, free_behind,
    )  # fmt: skip

    def operate(self, kind: int, a: int, b: int, c: int) -> None:
        if kind > 0:  # Hypothesis shrinks to zeros
            operation = self.OPERATIONS[kind % len(self.OPERATIONS)]
            is_idle = not self.model.seqs and kind % 8 > 0
            (Pair.allocate if is_idle else operation)(self, a, b, c)

    def compare(self) -> None:
        manager, model = self.manager, self.model
        manager.check_invariants()
        assert manager.num_returning_blocks == model.num_returning
        got = manager.statistics()
        expected = model.statistics()
        assert got.num_draining + got.num_in_transit == expected.pop("num_waiting")
        assert {name: getattr(got, name) for name in expected} == expected
        for seq_id, seq in model.seqs.items():
            ids = [-1 - b.id if model.cpu.get(b.id) is b else b.id for b in seq.table]
            assert self.table(seq_id) == ids
            assert manager.num_freed_blocks(seq_id) == seq.num_freed
            assert manager.num_tokens(seq_id) == seq.num_tokens
            assert manager.is_swapped(seq_id) == seq.is_swapped
        evicted = sorted(manager.take_evicted().tolist(), key=lambda one: (one[0], one[3]))
        predicted = sorted(model.evicted, key=lambda one: (one[0], one[3]))
        assert [(one[0], one[2], one[3]) for one in evicted] == [
            (one[0], one[1], one[3]) for one in predicted
        ]
        assert all(got[1] in one[2] for got, one in zip(evicted, predicted, strict=True))
        model.evicted.clear()


def run_sequence(config: dict[str, Any], operations: bytes) -> Pair:
    pair = Pair(config)
    for at in range(0, len(operations), 4):
        pair.operate(*operations[at : at + 4])
        pair.compare()
    return pair


def describe(operations: bytes) -> str:
    """The operations of a sequence, for a falsifying example."""
    names = [operation.__name__ for operation in Pair.OPERATIONS]
    quads = [operations[at : at + 4] for at in range(0, len(operations), 4)]
    return "\n".join(f"{names[q[0] % len(names)]}{tuple(q[1:])}" for q in quads if q[0])


@pytest.mark.parametrize("shard", range(NUM_SHARDS))
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_manager_is_the_dictionary_model(variant: str, shard: int) -> None:
    num_run = 0
    seen: Counter[str] = Counter()

    @seed(shard * len(VARIANTS) + list(VARIANTS).index(variant))
    @settings(
        max_examples=NUM_EXAMPLES,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.binary(min_size=4 * NUM_OPERATIONS, max_size=4 * NUM_OPERATIONS))
    def check(operations: bytes) -> None:
        nonlocal num_run
        num_run += 1
        note(describe(operations))
        pair = run_sequence(VARIANTS[variant], operations)
        seen.update(pair.model.counts)
        seen["num_freed"] += pair.num_freed

    check()
    assert num_run >= NUM_EXAMPLES
    # The sequences reach what they are to test.
    wanted = {"prefix_cache_hits", "num_copies", "num_evictions"}
    wanted |= {"num_swapped_out", "num_swapped_in"} if variant in ("swap", "window") else set()
    wanted |= {"num_freed"} if "window" in variant else set()
    if "offload" in variant:
        wanted |= {"num_offloaded", "num_onloaded", "num_offload_drops"}
    assert min(seen[name] for name in wanted) > NUM_EXAMPLES / 4, seen
