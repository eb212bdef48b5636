"""The baselines give every request its solo answer under the scheduler's own simulation, seed by
seed, with every invariant checked after every call.
"""

from __future__ import annotations

import numpy as np
import pytest
from baselines import (
    Contiguous,
    Oracle,
    PipelinedContiguous,
    PipelinedOracle,
    PowersOfTwo,
    StaticOracle,
)
from test_pipelined_simulation import simulate as simulate_pipelined
from test_simulation import simulate

from claims.contiguous import ContiguousManager
from claims.regions import Holes
from claims.reserving import Reservation, reserved_tokens
from pagedkv.block_manager import CanAllocate, OutOfBlocks

NUM_SEEDS = 60
KINDS = (Contiguous, PowersOfTwo, Oracle, StaticOracle)


@pytest.mark.parametrize("kind", KINDS)
def test_every_request_ends_with_its_solo_answer(kind: type[Contiguous]) -> None:
    num_copies = num_preempted = num_held_back = num_answers = 0
    batches: list[int] = []
    for seed in range(NUM_SEEDS):
        try:
            simulation = simulate(seed, kind)
            simulation.check_outcome()
        except Exception as error:
            raise AssertionError(f"{kind.__name__}, seed {seed} fails") from error
        num_copies += simulation.manager.statistics().num_copies
        num_preempted += simulation.num_preempted
        num_held_back += simulation.launched.num_held_back
        num_answers += len(simulation.finished)
        if isinstance(simulation, StaticOracle):
            batches += simulation.batching.batches
    assert num_answers > 400
    assert num_copies > 100
    assert num_preempted > 3
    assert num_held_back > 30
    if kind is StaticOracle:
        assert max(batches) > 2


@pytest.mark.parametrize("kind", [PipelinedContiguous, PipelinedOracle])
def test_every_request_of_a_pipelined_run_too(kind: type[PipelinedContiguous]) -> None:
    num_ahead = num_held_back = 0
    for seed in range(NUM_SEEDS):
        try:
            simulation = simulate_pipelined(seed, kind)
            simulation.check_outcome()
        except Exception as error:
            raise AssertionError(f"{kind.__name__}, seed {seed} fails") from error
        num_ahead += simulation.num_ahead
        num_held_back += simulation.launched.num_held_back
    assert num_ahead > 500
    assert num_held_back > 50


def test_best_fit_takes_the_smallest_hole_that_holds_and_joins_what_comes_back() -> None:
    holes = Holes(30)
    starts = [holes.take(size) for size in (5, 3, 3, 2, 3, 14)]
    assert starts == [0, 5, 8, 11, 13, 16]
    assert holes.take(1) is None
    for start, size in ((0, 5), (8, 3), (13, 3)):
        holes.give_back(start, size)
    assert holes.as_pairs() == [(0, 5), (8, 3), (13, 3)]
    assert holes.take(3) == 8
    assert holes.take(6) is None, "8 blocks are free, but not together"
    assert holes.num_free == 8
    holes.give_back(5, 3)
    assert holes.as_pairs() == [(0, 8), (13, 3)]
    holes.give_back(8, 3)
    holes.give_back(11, 2)
    assert holes.as_pairs() == [(0, 16)]
    holes.check_invariants(30)


def test_how_much_each_variant_reserves() -> None:
    lens = (100, 200, 2048)
    assert [reserved_tokens(one, *lens) for one in ("max", "pow2", "oracle")] == [2047, 355, 299]
    assert reserved_tokens("pow2", 100, 256, 2048) == 355
    assert reserved_tokens("pow2", 1500, 300, 2048) == 2011
    assert reserved_tokens("pow2", 1700, 300, 2048) == 2047, "no more than the context"
    with pytest.raises(ValueError, match=r"one of max, pow2, oracle, got 'buddy'"):
        reserved_tokens("buddy", *lens)


def prompt(length: int) -> np.ndarray:
    return np.arange(length, dtype=np.int32)


def key(name: str, num_tokens: int, num_lanes: int = 1) -> bytes:
    return Reservation(name, num_tokens, num_lanes).salt.encode()


def test_a_request_is_refused_for_fragmentation_where_enough_is_free() -> None:
    manager = ContiguousManager(12, block_size=4)
    for seq_id, name in enumerate("abc"):
        manager.allocate(seq_id, prompt(3), extra_key=key(name, 16))
    manager.free_batch([0, 2])
    assert manager.holes() == [(0, 4), (8, 4)]
    assert manager.num_allocatable_blocks == 8
    assert manager.can_allocate(prompt(3), extra_key=key("d", 20)) is CanAllocate.LATER
    assert manager.can_allocate(prompt(3), extra_key=key("d", 16)) is CanAllocate.OK
    assert manager.can_allocate(prompt(3), extra_key=key("d", 49)) is CanAllocate.NEVER
    with pytest.raises(OutOfBlocks, match="5 blocks fits in no hole: 8 blocks are free, 4 of them"):
        manager.allocate(3, prompt(3), extra_key=key("d", 20))
    manager.check_invariants()
    with pytest.raises(ValueError, match="tokens/lanes/family, got b''"):
        manager.allocate(3, prompt(3))


def test_a_fork_copies_the_whole_context_into_a_lane_of_its_own() -> None:
    manager = ContiguousManager(20, block_size=4)
    manager.allocate(0, prompt(10), extra_key=key("a", 16, num_lanes=3))
    assert manager.statistics().num_referenced == 12, "all answers' lanes from the beginning"
    manager.fork_batch([0, 0], [1, 2])
    pairs = manager.append_batch([0, 1, 2], [1, 1, 1])
    assert pairs.tolist() == [[0, 4], [1, 5], [2, 6], [0, 8], [1, 9], [2, 10]]
    assert manager.append_batch([0, 1, 2], [1, 1, 1]).size == 0
    assert manager.statistics().num_tokens == 36
    with pytest.raises(OutOfBlocks, match=r"12 \+ 5 tokens in a region for 16"):
        manager.append_batch([0], [5])
    manager.free_batch([0, 1])
    assert manager.statistics().num_referenced == 12, "the region goes as a whole"
    manager.free_batch([2])
    assert manager.statistics().num_free == 20
