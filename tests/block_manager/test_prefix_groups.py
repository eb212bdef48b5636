"""PrefixGrouper from Python, and the measured costs. The rule itself has its checks in C++."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from pagedkv.block_manager import (
    BlockManager,
    PrefixGrouper,
    PrefixRates,
    StepTables,
    prefix_costs,
)

TABLES = np.array([[9, 2, 5], [3, 1, 6], [9, 2, 7]], dtype=np.int32)
LENGTHS, ONE = [11, 12, 10], [1, 1, 1]


def test_groups_are_rows_for_the_op() -> None:
    grouper = PrefixGrouper(4)
    groups = grouper.find(TABLES[[0, 2, 1]], LENGTHS, ONE)
    assert groups.dtype == np.int32
    assert groups.tolist() == [[0, 2, 2]]
    assert grouper.find(TABLES, LENGTHS, ONE).shape == (0, 3)


def test_arrange_brings_together_what_shares() -> None:
    order, groups = PrefixGrouper(4).arrange(TABLES, LENGTHS, ONE)
    assert order.dtype == np.int64
    assert order.tolist() == [1, 0, 2]
    assert groups.tolist() == [[1, 2, 2]]


def test_takes_tensors_slots_and_strided_tables() -> None:
    wide = torch.full((6, 5), -1, dtype=torch.int32)
    wide[::2, :3] = torch.from_numpy(TABLES)
    grouper = PrefixGrouper(4)
    lengths = torch.tensor([11, 10], dtype=torch.int32)
    assert grouper.find(wide, lengths, [1, 1], [0, 4]).tolist() == [[0, 2, 2]]
    assert grouper.find(wide[::4], lengths, [1, 1]).tolist() == [[0, 2, 2]]


def test_groups_of_a_managers_step_tables() -> None:
    """Three requests with one prompt of nine blocks, and a stranger."""
    manager = BlockManager(num_blocks=64, block_size=4)
    prompt = list(range(36))
    manager.allocate(0, [*prompt, 100])
    manager.publish(0, [], num_computed_tokens=37)
    for seq_id in (1, 2):
        assert manager.allocate(seq_id, [*prompt, 100 + seq_id]) == 36
    manager.allocate(3, list(range(200, 237)))
    tables = StepTables(manager, 8, 16)
    block_tables = np.full((8, 16), -1, dtype=np.int32)
    seq_lens = np.zeros(8, dtype=np.int32)
    slots = [6, 0, 3, 5]
    tables.write(
        [0, 3, 1, 2],
        [1, 1, 1, 1],
        slots,
        block_tables=block_tables,
        slot_mapping=np.zeros(8, np.int64),
        positions=np.zeros(8, np.int64),
        seq_lens=seq_lens,
        query_start_loc=np.zeros(9, np.int32),
    )
    grouper = PrefixGrouper(4)
    assert grouper.find(block_tables, seq_lens[:4], [*ONE, 1], slots).tolist() == [[2, 2, 9]]
    order, groups = grouper.arrange(block_tables, seq_lens[:4], [*ONE, 1], slots)
    assert sorted(order.tolist()) == [0, 1, 2, 3]
    assert groups.tolist() in ([[0, 3, 9]], [[1, 3, 9]])


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a bool": ({"block_size": True}, TypeError, "block_size must be an integer, got bool"),
    "no block": ({"block_size": 0}, ValueError, "block_size must be between 1 and 65536, got 0"),
    "a negative cost": ({"per_step": -1.0}, ValueError, "per_step must be a finite number of at"),
    "no number": ({"per_row": float("nan")}, ValueError, "per_row must be a finite number of at"),
    "no tile": ({"seqs_per_tile": 0}, ValueError, "seqs_per_tile must be between 1 and"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_rules_are_refused_by_name_and_value(name: str) -> None:
    arguments, error, message = WRONG[name]
    with pytest.raises(error, match=re.escape(message)):
        PrefixGrouper(**({"block_size": 4} | arguments))


def test_wrong_batches_are_refused_by_name_and_value() -> None:
    grouper = PrefixGrouper(4)
    with pytest.raises(ValueError, match="query_lens has 2 and slots 0 entries for 3 sequences"):
        grouper.find(TABLES, LENGTHS, [1, 1])
    with pytest.raises(ValueError, match=r"slots\[2\] must be between 0 and 2, got 3"):
        grouper.find(TABLES, LENGTHS, ONE, [0, 1, 3])
    with pytest.raises(ValueError, match=r"seq_lens\[0\] is 99, block_tables has rows of 3 blocks"):
        grouper.find(TABLES, [99, 4, 4], ONE)
    with pytest.raises(ValueError, match="block_tables must be a writable NumPy array"):
        grouper.find(TABLES.astype(np.int64), LENGTHS, ONE)


def test_the_measured_costs_follow_from_three_rates() -> None:
    """A key of 4,096 bytes at 4.096 TB/s takes 1 ns."""
    rates = PrefixRates(read=4.096e12, states=2.048e12, products=5e14, launches_us=5.0)
    assert prefix_costs(32, 8, 128, rates=rates) == {
        "per_step": pytest.approx(5000.0),
        "per_row": pytest.approx(4 * 32 * 130 * 4 / 2048),  # ns
        "per_row_key": pytest.approx(4 * 32 * 128 / 5e5),
        "seqs_per_tile": 32,
    }
    float8 = prefix_costs(32, 8, 128, element_bytes=1, rates=rates)
    assert float8["per_step"] == pytest.approx(10_000.0)  # a key is read in half the time
    assert prefix_costs(64, 1, 128)["seqs_per_tile"] == 2
    assert prefix_costs(256, 1, 128)["seqs_per_tile"] == 1


# Sequences, shared keys, groups; us of the call without groups and with them, on one H200
# (benchmarks/results/2026-11-30-prefix2048-attempts.md).
MEASURED = (
    (256, 2048, 1, 175.5, 51.9),
    (1024, 2048, 1, 712.2, 223.4),
    (256, 8192, 1, 597.3, 124.8),
    (256, 2048, 8, 197.7, 67.7),
    (256, 2048, 32, 226.7, 152.6),
    (1024, 512, 4, 282.6, 190.2),
    (512, 512, 1, 134.3, 100.7),
    (256, 1024, 1, 107.2, 49.8),
    (256, 512, 1, 73.3, 49.1),
    (128, 4096, 1, 154.5, 49.2),
    (128, 2048, 1, 88.1, 39.9),
    (64, 8192, 1, 149.1, 52.7),
    (64, 2048, 1, 49.6, 31.3),
    (64, 256, 1, 20.7, 24.4),
    (32, 1024, 1, 16.3, 25.9),
    (8, 1024, 1, 9.2, 21.9),
    (8, 4096, 1, 18.8, 29.4),
    (2, 8192, 1, 16.7, 35.5),
)


@pytest.mark.parametrize(("num_seqs", "prefix_len", "num_groups", "plain", "grouped"), MEASURED)
def test_the_rule_groups_what_gains_by_it(
    num_seqs: int, prefix_len: int, num_groups: int, plain: float, grouped: float
) -> None:
    """Llama-3-8B's heads, by the default costs."""
    blocks = prefix_len // 16
    tables = np.empty((num_seqs, blocks + 1), np.int32)
    group = np.arange(num_seqs) // (num_seqs // num_groups)
    tables[:, :blocks] = group[:, None] * blocks + np.arange(blocks)
    tables[:, blocks] = num_groups * blocks + np.arange(num_seqs)
    grouper = PrefixGrouper(16, **prefix_costs(32, 8, 128))
    groups = grouper.find(tables, [prefix_len + 9] * num_seqs, [1] * num_seqs)
    assert len(groups) == (num_groups if grouped < plain else 0)
