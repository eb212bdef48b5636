"""The memory that a step's arrays share, and what is in them of prefixes that decodes share."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from pagedkv.block_manager import BlockManager, PrefixGrouper
from pagedkv.config import SchedulerConfig
from pagedkv.engine.input_builder import InputBuilder
from pagedkv.engine.step_arrays import StepArrays
from pagedkv.records import empty_step
from pagedkv.sampling import SlotParams

CPU = torch.device("cpu")


def test_what_is_written_is_what_the_tensor_has_and_nothing_overlaps() -> None:
    arrays = StepArrays(300, CPU)
    for _ in range(3):
        arrays.begin(300)
        taken = [
            arrays.take(np.int64, 3),
            arrays.take(np.int32, 5),
            arrays.take(np.float32, 1),
            arrays.take(np.int32, 0),
            arrays.take(np.float64, 2),
            arrays.take(np.int32, 3, 2),
        ]
        for number, (array, _) in enumerate(taken):
            array[...] = number
        arrays.send()
        for number, (array, tensor) in enumerate(taken):
            assert tensor.shape == array.shape
            assert tensor.data_ptr() % 16 == 0 or not tensor.numel()
            assert (tensor == number).all()


@pytest.mark.parametrize("num_bytes", [100, 101, 4000])
def test_a_step_that_is_larger_than_usual_has_memory_of_its_own(num_bytes: int) -> None:
    arrays = StepArrays(100, CPU)
    arrays.begin(num_bytes)
    large = arrays.take(np.int64, num_bytes // 8)[0]
    large[:] = 7
    arrays.begin(100)
    usual = arrays.take(np.int64, 12)[0]
    usual[:] = 1
    assert (large == 7).all() == (num_bytes > 100)


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
        built = inputs.build(step, token_ids, params.rows(rows), **options)
        found = built.attn_metadata.prefix_groups
        return None if found is None else found.tolist()

    assert groups([0, 1, 2, 3], [1, 1, 1, 1]) == [[1, 3, 2]]
    assert groups([1, 2, 3], [1, 1, 1], num_padded=6) == [[0, 3, 2]]
    assert groups([0, 1], [1, 1]) is None
    for seq_id in (4, 5):
        manager.allocate(seq_id, [*range(20, 29), seq_id])
        manager.publish(seq_id, [], num_computed_tokens=10)
    assert groups([1, 2, 4, 5], [1] * 4, num_padded=6) == [[0, 2, 2], [2, 2, 2], [0, 0, 0]]
    assert groups([3], [1], num_padded=4) is None
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
    found = inputs.written_blocks(step).tolist()
    tables = [manager.block_table(seq_id).tolist() for seq_id in range(3)]
    assert sorted(found) == sorted([*tables[0], tables[1][1], tables[2][0]])
    built = inputs.build(step, np.zeros((6, 32), dtype=np.int32), SlotParams(6).rows(rows[:0]))
    assert np.unique(built.attn_metadata.slot_mapping // 4).tolist() == found
    assert built.attn_metadata.block_tables[:, 0].tolist() == [table[0] for table in tables]
    assert inputs.written_blocks(empty_step()).size == 0
