"""The compiled manager as a Python library: results, records, lifetimes. Its behaviour in detail is
checked in C++ (tests/core) and against the dictionary model (test_stateful.py)."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from pagedkv.block_manager import (
    BlockManager,
    BlockState,
    CanAllocate,
    DoubleFree,
    MissReason,
    OutOfBlocks,
    StepTables,
    UnknownSequence,
)

ROOT = Path(__file__).parent.parent.parent


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT / "python",
    )
    return done.stdout.strip()


def test_the_block_manager_imports_no_torch() -> None:
    use = "import sys, pagedkv; pagedkv.BlockManager, pagedkv.StepTables"
    assert run_python(f"{use}; print('torch' in sys.modules)") == "False"


def test_a_configured_secret_is_taken() -> None:
    manager = BlockManager(8, 4, hash_secret=b"sixteen bytes or more")
    manager.allocate(0, range(5))
    manager.publish(0, [], 5)
    assert manager.match(range(5)) == 4


def test_the_example_of_the_package_docstring() -> None:
    manager = BlockManager(num_blocks=8, block_size=4)
    assert manager.allocate(0, [1, 2, 3, 4, 5, 6]) == 0
    manager.fork(0, 1)
    assert manager.append(1) == [(1, 2)]
    assert manager.block_table(0).tolist() == [0, 1]
    assert manager.block_table(1).tolist() == [0, 2]


def test_errors_are_the_errors_python_users_expect() -> None:
    assert issubclass(UnknownSequence, KeyError)
    assert issubclass(OutOfBlocks, RuntimeError)
    assert issubclass(DoubleFree, RuntimeError)
    assert [answer.name for answer in CanAllocate] == ["OK", "LATER", "NEVER"]
    assert BlockState(1) is BlockState.CACHED_IDLE


def test_admission_answers() -> None:
    manager = BlockManager(8, 4, watermark=0.25)
    assert manager.can_allocate([1] * 32) is CanAllocate.OK
    assert manager.can_allocate([1] * 33) is CanAllocate.NEVER
    manager.allocate(0, [1] * 12)
    assert manager.can_allocate([2] * 12) is CanAllocate.OK
    assert manager.can_allocate([2] * 13) is CanAllocate.LATER
    assert manager.can_allocate([2] * 13, max_new_tokens=12) is CanAllocate.OK


def test_membership_and_sizes() -> None:
    manager = BlockManager(8, 4)
    manager.allocate(-7, [1, 2, 3])
    assert -7 in manager
    assert 7 not in manager
    assert (manager.num_blocks, manager.block_size, manager.num_tokens(-7)) == (8, 4, 3)
    assert manager.num_allocatable_blocks == 7
    assert not manager.is_swapped(-7)


def test_pairs_are_arrays_in_batches_and_lists_in_single_calls() -> None:
    manager = BlockManager(8, 4, num_cpu_blocks=4)
    manager.allocate(0, [1, 2])
    manager.fork_batch([0, 0], [1, 2])
    copies = manager.append_batch([0, 1, 2], [1, 1, 1])
    assert copies.dtype == np.int64
    assert copies.tolist() == [[0, 1], [0, 2]]
    assert manager.swap_out([1]) == [(2, 0)]
    assert manager.block_table(1).tolist() == [-1]
    assert manager.num_swap_in_blocks([1]) == 1
    assert manager.swap_in([1]) == [(0, 2)]


def test_statistics_add_up_and_print_themselves() -> None:
    manager = BlockManager(10, 4, num_cpu_blocks=3)
    manager.allocate(0, [1] * 9)
    manager.publish(0, [], 9)
    manager.allocate(1, [1] * 9)
    manager.begin_step()
    manager.free(1)
    s = manager.statistics()
    states = (s.num_free, s.num_cached_idle, s.num_referenced, s.num_in_transit, s.num_draining)
    assert states == (6, 0, 3, 0, 1)
    assert sum(states) == s.num_blocks
    assert manager.num_returning_blocks == 1
    assert (s.prefix_cache_queries, s.prefix_cache_hits) == (18, 8)
    assert s.token_occupancy == pytest.approx(9 / 40)
    assert s.block_occupancy == pytest.approx(4 / 10)
    assert "num_draining=1" in repr(s)
    with pytest.raises(AttributeError):
        s.num_free = 3  # type: ignore[misc]


def test_a_snapshot_is_read_only_and_outlives_its_manager() -> None:
    manager = BlockManager(8, 4)
    manager.allocate(5, [1, 2, 3, 4, 5])
    states = manager.snapshot().states
    snapshot = manager.snapshot()
    manager.free(5)
    del manager
    gc.collect()
    assert snapshot.seq_ids.tolist() == [5]
    assert snapshot.block_ids.tolist() == [0, 1]
    assert states.tolist() == [BlockState.REFERENCED.value] * 2 + [BlockState.FREE.value] * 6
    with pytest.raises(ValueError, match="read-only"):
        snapshot.ref_counts[0] = 5


def test_snapshots_are_read_beside_the_owner() -> None:
    manager = BlockManager(64, 2)
    newest = [manager.snapshot()]
    is_done = threading.Event()
    bad: list[int] = []

    def read() -> None:
        while not is_done.is_set():
            snapshot = newest[0]
            held = np.bincount(snapshot.block_ids, minlength=64)
            if not np.array_equal(held, snapshot.ref_counts):
                bad.append(snapshot.version)

    reader = threading.Thread(target=read)
    reader.start()
    for seq_id in range(500):
        manager.allocate(seq_id, [seq_id % 5] * 5)
        manager.fork(seq_id, -1 - seq_id)
        newest[0] = manager.snapshot()
        manager.free_batch([seq_id, -1 - seq_id])
    is_done.set()
    reader.join()
    assert not bad


def test_evictions_are_reported_once() -> None:
    manager = BlockManager(4, 2)
    manager.allocate(0, [1, 2, 3, 4])
    manager.publish(0, [], 4)
    manager.free(0)
    manager.end_step(manager.begin_step())
    manager.allocate(1, [9] * 7)
    assert manager.take_evicted().tolist() == [[1, 1, 1, -1], [0, 1, 1, -1]]
    assert manager.take_evicted().tolist() == []
    statistics = manager.statistics()
    assert statistics.prefix_cache_evictions == 4
    assert statistics.prefix_cache_misses == 4 + 7
    assert manager.last_miss.reason is MissReason.NEVER_CACHED
    manager.free(1)
    manager.allocate(2, [1, 2, 3])
    miss = manager.last_miss
    assert (miss.reason, miss.evicted_in, miss.evicted_for) == (MissReason.EVICTED, 2, 1)
    assert manager.reset_prefix_cache() == 0


def test_step_tables_keep_their_manager_and_buffers_alive() -> None:
    tables = StepTables(BlockManager(4, 2), 1, 4)
    gc.collect()
    others = {
        "slot_mapping": np.zeros(4, np.int64),
        "positions": np.zeros(4, np.int64),
        "seq_lens": np.zeros(1, np.int32),
        "query_start_loc": np.zeros(2, np.int32),
    }
    addresses = set()
    for _ in range(4):
        block_tables = np.zeros((1, 4), np.int32)
        addresses.add(block_tables.ctypes.data)
        assert tables.write([], [], [], block_tables=block_tables, **others, only_changed=True) == 0
        del block_tables
    assert len(addresses) == 4  # memory whose content is remembered is not given to another array


def test_only_changed_writes_less_and_forget_writes_all() -> None:
    manager = BlockManager(32, 2)
    manager.allocate(0, [1] * 20)
    tables = StepTables(manager, 1, 16)
    buffers = {
        "block_tables": np.zeros((1, 16), np.int32),
        "slot_mapping": np.zeros(32, np.int64),
        "positions": np.zeros(32, np.int64),
        "seq_lens": np.zeros(1, np.int32),
        "query_start_loc": np.zeros(2, np.int32),
    }

    def num_written() -> int:
        before = tables.num_entries_written
        tables.write([0], [1], [0], **buffers, only_changed=True)
        return tables.num_entries_written - before

    assert [num_written(), num_written()] == [10, 0]
    manager.append(0)
    assert num_written() == 1
    tables.forget(buffers["block_tables"])
    assert num_written() == 11
    assert buffers["block_tables"][0, :11].tolist() == manager.block_table(0).tolist()
