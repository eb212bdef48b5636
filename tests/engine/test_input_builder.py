"""The one copy of a step, what is in it of prefixes that decodes share, and which blocks a step
writes."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from pagedkv.block_manager import BlockManager, PrefixGrouper
from pagedkv.config import SchedulerConfig
from pagedkv.engine.input_builder import InputBuilder, PaddedSize
from pagedkv.engine.packed_copy import PackedCopy
from pagedkv.records import empty_step
from pagedkv.sampling import SlotParams

CPU = torch.device("cpu")


def int32(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def test_what_is_sent_is_what_the_tensors_have_and_nothing_overlaps() -> None:
    copy = PackedCopy(100, CPU)
    begin = copy.usual(torch.int32, 25).data_ptr()
    for number in range(3):
        arrays = [
            int32(number, 1, 2, 3, 4),
            np.array([number, -1, 2**40]),
            int32(),
            int32(7, number),
        ]
        sent = copy.send(*arrays)
        assert sent is not None
        assert sent[0].data_ptr() == begin
        assert [one.tolist() for one in sent] == [one.tolist() for one in arrays]
    assert copy.num_bytes_sent == 3 * (24 + 24 + 8)


def test_nothing_to_send_is_no_copy() -> None:
    copy = PackedCopy(100, CPU)
    assert copy.send(int32(), np.empty(0, dtype=np.int64)) is None
    assert copy.num_bytes_sent == 0


@pytest.mark.parametrize("size", [25, 26, 1000])
def test_a_step_that_is_larger_than_usual_has_memory_of_its_own(size: int) -> None:
    copy = PackedCopy(100, CPU)
    large = copy.send(np.full(size, 7, dtype=np.int32))
    copy.send(int32(*range(25)))
    assert large is not None
    assert (large[0] == 7).all() == (size > 25)


def test_decodes_that_share_a_prefix_are_told_with_empty_entries_behind_them() -> None:
    manager = BlockManager(40, 4)
    config = SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=16)
    inputs = InputBuilder(manager, config, max_model_len=32, grouper=PrefixGrouper(4))
    shared = list(range(9))
    for seq_id, prompt in ((0, [1]), (1, [*shared, 9]), (2, [*shared, 8]), (3, [*shared, 7])):
        manager.allocate(seq_id, prompt)
        manager.publish(seq_id, [], num_computed_tokens=len(prompt))
    token_ids = np.zeros((6, 32), dtype=np.int32)
    params = SlotParams(6)

    def groups(seq_ids: list[int], lens: list[int], **options: Any) -> Any:
        manager.append_batch(seq_ids, lens)
        rows = np.array(seq_ids)
        step = dataclasses.replace(
            empty_step(),
            slots=rows,
            seq_ids=rows,
            query_lens=np.array(lens),
            sample_rows=np.arange(rows.size),
            sample_draws=np.zeros_like(rows),
            num_tokens=sum(lens),
        )
        built = inputs.build(step, token_ids, params, **options)
        found = built.attn_metadata.prefix_groups
        return None if found is None else found.tolist()

    assert groups([0, 1, 2, 3], [1, 1, 1, 1]) == [[1, 3, 2]]
    assert groups([1, 2, 3], [1, 1, 1], padded=PaddedSize(6, 6, 1)) == [[0, 3, 2]]
    assert groups([0, 1], [1, 1]) is None
    for seq_id in (4, 5):
        manager.allocate(seq_id, [*range(20, 29), seq_id])
        manager.publish(seq_id, [], num_computed_tokens=10)
    assert groups([1, 2, 4, 5], [1] * 4, padded=PaddedSize(6, 6, 1)) == [
        [0, 2, 2],
        [2, 2, 2],
        [0, 0, 0],
    ]
    assert groups([3], [1], padded=PaddedSize(4, 4, 1)) is None
    # Beside a chunk of a prompt, unless it is a large one.
    assert groups([1, 2, 3], [1, 1, 2]) == [[0, 2, 2]]
    assert groups([1, 2, 3], [1, 1, 11]) is None
    plain = InputBuilder(manager, config, max_model_len=32)
    inputs = plain
    assert groups([1, 2], [1, 1]) is None


def test_written_blocks_are_those_of_the_slots_and_asking_changes_nothing() -> None:
    manager = BlockManager(40, 4)
    config = SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=16)
    inputs = InputBuilder(manager, config, max_model_len=32)
    for seq_id, prompt_len in ((0, 9), (1, 4), (2, 3)):
        manager.allocate(seq_id, list(range(prompt_len)))
    manager.append_batch([1, 2], [1, 1])
    rows, lens = np.array([0, 1, 2]), np.array([6, 1, 1])
    step = dataclasses.replace(
        empty_step(), slots=rows, seq_ids=rows, query_lens=lens, num_tokens=8
    )
    for _ in range(2):
        found = inputs.written_blocks(step).tolist()
    tables = [manager.block_table(seq_id).tolist() for seq_id in range(3)]
    assert sorted(found) == sorted([*tables[0], tables[1][1], tables[2][0]])
    built = inputs.build(step, np.zeros((6, 32), dtype=np.int32), SlotParams(6))
    inputs.advance(built)
    assert np.unique(built.attn_metadata.slot_mapping // 4).tolist() == found
    assert built.attn_metadata.block_tables[:, 0].tolist() == [table[0] for table in tables]
    assert inputs.written_blocks(empty_step()).size == 0
