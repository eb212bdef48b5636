"""What Python may hand over: every integer and array is checked, refused by name and value, and a
refused call changes nothing."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from pagedkv.block_manager import (
    BlockManager,
    DoubleFree,
    InvariantViolation,
    OutOfBlocks,
    StepState,
    StepTables,
    UnknownSequence,
)

HUGE = 2**70


@pytest.fixture
def manager() -> BlockManager:
    made = BlockManager(8, 4, num_cpu_blocks=2, watermark=0.0)
    made.allocate(1, [1, 2, 3, 4, 5, 6])
    made.allocate(2, [7, 8])
    made.free(2)
    return made


def state(manager: BlockManager) -> tuple[Any, ...]:
    snapshot = manager.snapshot()
    columns = (snapshot.ref_counts, snapshot.states, snapshot.seq_ids, snapshot.block_ids)
    return (repr(snapshot.statistics), *(column.tolist() for column in columns))


I32 = "between -2147483648 and 2147483647"
NOT_INTEGERS = "token_ids must be an array of integers, got dtype"

# case: call, error, a part of its message
REFUSED: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "a negative count": (
        lambda m: m.append(1, -1),
        ValueError,
        "num_tokens must be between 0 and 2147483647, got -1",
    ),
    "a huge count": (lambda m: m.append(1, HUGE), ValueError, f"got {HUGE}"),
    "a hugely negative count": (lambda m: m.append(1, -HUGE), ValueError, f"got {-HUGE}"),
    "a fraction": (
        lambda m: m.append(1, 1.5),
        TypeError,
        "num_tokens must be an integer, got float",
    ),
    "a bool": (lambda m: m.append(1, True), TypeError, "must be an integer, got bool"),
    "text as id": (lambda m: m.free("1"), TypeError, "seq_id must be an integer, got str"),
    "None as id": (lambda m: m.append(None), TypeError, "seq_id must be an integer, got None"),
    "a huge id": (lambda m: m.free(HUGE), ValueError, "seq_id must be between -92233720368547"),
    "an unknown id": (lambda m: m.append(9), UnknownSequence, "seq_id 9 is not known"),
    "a freed id": (lambda m: m.append(2), UnknownSequence, "seq_id 2 was freed"),
    "a double free": (lambda m: m.free(2), DoubleFree, "seq_id 2 was freed before"),
    "too many tokens": (
        lambda m: m.append(1, 27),
        OutOfBlocks,
        "append needs 7 blocks, 6 of 8 can be taken",
    ),
    "more than int32": (lambda m: m.append(1, 2**31 - 1), ValueError, "cannot grow by 2147483647"),
    "an id that lives": (lambda m: m.allocate(1, [1]), ValueError, "seq_id 1 exists already"),
    "an empty prompt": (lambda m: m.allocate(5, []), ValueError, "token_ids is empty"),
    "a negative token": (
        lambda m: m.allocate(5, [1, -2]),
        ValueError,
        "token_ids[1] is -2; ids are not negative",
    ),
    "a token beyond int32": (
        lambda m: m.allocate(5, [1, 2**31]),
        ValueError,
        f"token_ids[1] must be {I32}, got 2147483648",
    ),
    "a uint64 token": (
        lambda m: m.allocate(5, np.array([2**63 + 1], np.uint64)),
        ValueError,
        f"token_ids[0] must be {I32}, got 9223372036854775809",
    ),
    "a uint64 id": (
        lambda m: m.free_batch(np.array([2**63], np.uint64)),
        ValueError,
        "seq_ids[0] must be between",
    ),
    "a token beyond int64": (
        lambda m: m.allocate(5, [HUGE]),
        TypeError,
        f"{NOT_INTEGERS} object",
    ),
    "fractional tokens": (lambda m: m.allocate(5, [1.0]), TypeError, f"{NOT_INTEGERS} float64"),
    "bool tokens": (lambda m: m.allocate(5, [True]), TypeError, f"{NOT_INTEGERS} bool"),
    "text as tokens": (
        lambda m: m.allocate(5, "hello"),
        ValueError,
        "token_ids must have one dimension, got 0",
    ),
    "nested tokens": (
        lambda m: m.allocate(5, [[1, 2]]),
        ValueError,
        "token_ids must have one dimension, got 2",
    ),
    "a negative chunk": (
        lambda m: m.allocate(5, [1], max_new_tokens=-1),
        ValueError,
        "max_new_tokens must be between 0 and 2147483647, got -1",
    ),
    "a negative reserve": (
        lambda m: m.can_allocate([1], reserve_tokens=-1),
        ValueError,
        "reserve_tokens must be between 0 and 2147483647, got -1",
    ),
    "a huge reserve": (
        lambda m: m.can_allocate([1], reserve_tokens=HUGE),
        ValueError,
        f"got {HUGE}",
    ),
    "a number as extra key": (
        lambda m: m.match([1], extra_key=5),
        TypeError,
        "incompatible function arguments",
    ),
    "too few counts": (
        lambda m: m.append_batch([1], []),
        ValueError,
        "counts has 0 entries for 1 sequences",
    ),
    "an id twice in a batch": (
        lambda m: m.append_batch([1, 1], [1, 1]),
        ValueError,
        "seq_id 1 stands twice in one batch",
    ),
    "an id twice in a free": (lambda m: m.free_batch([1, 1]), DoubleFree, "seq_id 1 stands twice"),
    "more computed than held": (
        lambda m: m.publish(1, [1], 7),
        ValueError,
        "num_computed_tokens of seq_id 1 must be between 0 and 6",
    ),
    "hugely many computed": (
        lambda m: m.publish(1, [], HUGE),
        ValueError,
        "num_computed_tokens must be between",
    ),
    "counts beyond the ids": (
        lambda m: m.publish_batch([1], [9], [2], [6]),
        ValueError,
        "counts[0] must be between 0 and the 1 token_ids left, got 2",
    ),
    "a fork onto itself": (lambda m: m.fork(1, 1), ValueError, "seq_id 1 exists already"),
    "no such step": (
        lambda m: m.end_step(1),
        ValueError,
        "step_id 1 cannot end: no step is in flight",
    ),
    "not swapped": (lambda m: m.swap_in([1]), ValueError, "seq_id 1 is not swapped out"),
}


@pytest.mark.parametrize(("call", "error", "message"), list(REFUSED.values()), ids=list(REFUSED))
def test_a_bad_argument_is_refused_by_name_and_value_and_changes_nothing(
    manager: BlockManager, call: Callable[[Any], Any], error: type[Exception], message: str
) -> None:
    before = state(manager)
    with pytest.raises(error, match=re.escape(message)):
        call(manager)
    assert state(manager) == before
    manager.check_invariants()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"num_blocks": 0}, ValueError, "num_blocks must be between 1 and 67108864, got 0"),
        ({"num_blocks": -5}, ValueError, "got -5"),
        ({"num_blocks": HUGE}, ValueError, f"got {HUGE}"),
        ({"num_blocks": 2.0}, TypeError, "num_blocks must be an integer, got float"),
        ({"block_size": 0}, ValueError, "block_size must be between 1 and 65536, got 0"),
        ({"block_size": -1}, ValueError, "got -1"),
        ({"num_cpu_blocks": -1}, ValueError, "num_cpu_blocks must be between 0 and"),
        ({"watermark": 1.0}, ValueError, "watermark must be at least 0 and below 1, got 1"),
        ({"watermark": float("nan")}, ValueError, "watermark must be at least 0"),
        ({"watermark": -0.1}, ValueError, "watermark must be at least 0"),
        ({"hash_secret": b""}, ValueError, "hash_secret must have at least 16 bytes, got 0"),
        ({"hash_secret": b"\0" * 15}, ValueError, "at least 16 bytes, got 15"),
        ({"hash_bits": 129}, ValueError, "hash_bits must be between 1 and 128, got 129"),
        ({"shuffle_seed": -1}, ValueError, "shuffle_seed must be between 0 and"),
        ({"unknown": 1}, TypeError, "incompatible"),
    ],
)
def test_an_impossible_configuration_is_refused(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        BlockManager(**{"num_blocks": 4, "block_size": 4, **arguments})


def test_every_kind_of_integer_array_is_understood() -> None:
    prompt = list(range(1, 10))
    strided = np.repeat(np.array(prompt), 2)[::2]
    kinds = [
        prompt,
        tuple(prompt),
        range(1, 10),
        strided,
        torch.tensor(prompt),
        torch.tensor(prompt, dtype=torch.int32),
        *(np.array(prompt, dtype) for dtype in "bhilqBHILQ"),
        np.array(prompt, ">i4"),
    ]
    manager = BlockManager(64, 4)
    manager.allocate(0, prompt)
    manager.publish(0, [], 9)
    for i, kind in enumerate(kinds, 1):
        assert manager.match(kind) == 8
        assert manager.allocate(np.int64(i), kind) == 8
    ids = list(range(len(kinds) + 1))
    assert manager.append_batch(np.array(ids, np.uint8), np.ones(len(ids), np.int16)).shape == (
        0,
        2,
    )
    manager.free_batch(torch.tensor(ids))
    manager.check_invariants()


def buffers(**changed: Any) -> dict[str, Any]:
    made = {
        "block_tables": np.full((4, 8), -9, np.int32),
        "slot_mapping": np.full(16, -9, np.int64),
        "positions": np.full(16, -9, np.int64),
        "seq_lens": np.full(4, -9, np.int32),
        "query_start_loc": np.full(5, -9, np.int32),
    }
    return {**made, **changed}


READ_ONLY = np.zeros((4, 8), np.int32)
READ_ONLY.flags.writeable = False


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        (
            {"seq_lens": np.zeros(4, np.int64)},
            ValueError,
            "seq_lens must be a writable NumPy array or torch CPU tensor of int32 with 1 dimension "
            "and a contiguous last one, got int64",
        ),
        ({"positions": np.zeros(4, np.float64)}, ValueError, "positions must be"),
        ({"positions": np.zeros((4, 4), np.int64)}, ValueError, "with 2 dimensions"),
        ({"block_tables": np.zeros(32, np.int32)}, ValueError, "block_tables must be"),
        ({"block_tables": READ_ONLY}, ValueError, "read-only"),
        ({"slot_mapping": np.zeros(32, np.int64)[::2]}, ValueError, "with strides"),
        ({"slot_mapping": [0] * 16}, TypeError, "slot_mapping must be a writable NumPy array"),
        ({"seq_lens": torch.zeros(4)}, ValueError, "seq_lens must be"),
        ({"slot_mapping": np.zeros(0, np.int64)}, ValueError, "has 0 entries, the step needs 1"),
        ({"block_tables": np.zeros((4, 7), np.int32)}, ValueError, "has rows of 7 entries"),
        (
            {"block_tables": np.zeros((2, 8), np.int32)},
            ValueError,
            "slots[0] must be between 0 and 1, got 3",
        ),
    ],
)
def test_a_bad_buffer_is_refused_and_nothing_is_written(
    manager: BlockManager, changed: dict[str, Any], error: type[Exception], message: str
) -> None:
    tables = StepTables(manager, 4, 8)
    given = buffers(**changed)
    before = {name: np.asarray(value).copy() for name, value in given.items()}
    with pytest.raises(error, match=re.escape(message)):
        tables.write([1], [1], [3], **given)
    for name, value in given.items():
        np.testing.assert_array_equal(np.asarray(value), before[name])


def test_bad_rows_are_refused(manager: BlockManager) -> None:
    tables = StepTables(manager, 4, 8)
    for ids, lens, slots, message in [
        ([9], [1], [0], "seq_id 9 is not known"),
        ([1], [7], [0], "query_lens[0] must be between 0 and the 6 tokens"),
        ([1], [1], [4], "slots[0] must be between 0 and 3, got 4"),
        ([1], [1, 1], [0], "query_lens has 2 and slots 1 entries for 1 sequences"),
        ([1, 1], [1, 1], [0, 1], "seq_id 1 stands twice in one step"),
    ]:
        with pytest.raises((ValueError, UnknownSequence), match=re.escape(message)):
            tables.write(ids, lens, slots, **buffers())
    manager.fork(1, 3)
    with pytest.raises(InvariantViolation, match="I5: seq_id 3 would write block 1"):
        tables.write([3], [1], [0], **buffers())
    with pytest.raises(ValueError, match="max_num_slots must be between 1 and"):
        StepTables(manager, 0, 8)


def test_first_written_is_written_or_refused(manager: BlockManager) -> None:
    tables = StepTables(manager, 4, 8)
    first = np.full(2, -9, np.int32)
    given = buffers()
    for expected in (0, len(manager.block_table(1))):
        tables.write([1], [1], [3], **given, only_changed=True, first_written=first)
        assert first.tolist() == [expected, -9]
    with pytest.raises(ValueError, match="first_written has 0 entries, the step needs 1"):
        tables.write([1], [1], [3], **buffers(), first_written=first[:0])
    with pytest.raises(ValueError, match="first_written must be a writable NumPy array"):
        tables.write([1], [1], [3], **buffers(), first_written=np.zeros(2))


def test_a_state_refuses_bad_arguments_and_changes_nothing() -> None:
    state = StepState(2, 3, 4)
    step: dict[str, Any] = {
        "slots": [1],
        "query_lens": [1],
        "seq_lens": [5],
        "first_written": [0],
        "sample_rows": [0],
        "sample_draws": [0],
        "params": np.zeros((2, 8), np.int32),
        "token_ids": np.zeros((2, 12), np.int32),
    }
    for name, value, message in [
        ("slots", [2], "slots[0] must be between 0 and 1, got 2"),
        ("slots", [1, 0], "query_lens has 1 entries, expected 2"),
        ("params", np.zeros((2, 7), np.int32), "params must have 8 columns, got 7"),
        ("params", np.zeros((1, 8), np.int32), "params must have 2 rows side by side"),
        ("token_ids", np.zeros((4, 12), np.int32)[::2], "one for each slot, got 2 apart"),
        ("token_ids", np.zeros((2, 12)), "token_ids must be a writable NumPy array"),
        ("padded", (1, 3), "padded[1] must be between 1 and 2, got 3"),
        ("padded", (-1, 1), "padded[0] must be between 0 and"),
        ("padded", (1, 2, 3), "padded must be (num_tokens, num_rows), got 3 numbers"),
        ("padded", (0, 2), "num_padded_tokens must be between 1 and"),
        ("padded", (2, 1), "num_padded_tokens must be between 1 and 1, got 2"),
    ]:
        with pytest.raises(ValueError, match=re.escape(message)):
            state.update(**step | {name: value})
        assert not state.image.any()
    with pytest.raises(ValueError, match="name must be a section of the state, got 'rows'"):
        state.section("rows")
    with pytest.raises(ValueError, match="counts has 2 words, got 3"):
        state.tell("counts", [1, 2, 3])


def test_a_state_tells_the_words_that_change() -> None:
    state = StepState(2, 3, 4)
    begin, size = state.section("tables")
    tables = state.image[begin : begin + size].reshape(2, 3)
    tables[1, :2] = [7, 2]
    ids, params = np.full((2, 12), 9, np.int32), np.zeros((2, 8), np.int32)
    state.update([1], [5], [5], [0], [0], [0], params, ids)
    token_ids, indices, values = state.take()
    assert token_ids.tolist() == [9] * 5
    words = np.zeros_like(state.image)
    words[indices] = values
    assert words[begin : begin + size].tolist() == [0, 0, 0, 7, 2, 0]
    lens = state.section("lens")[0]
    words[lens + 1] += 5  # as the device does
    assert np.array_equal(words, state.image)
    assert [one.size for one in state.take()[1:]] == [0, 0]
    state.tell("prefix_groups", [0, 2, 1])
    assert state.take()[2].tolist() == [2, 1]
    state.forget()
    assert not state.image.any()


def test_torch_buffers_are_written_in_place(manager: BlockManager) -> None:
    as_torch = {name: torch.from_numpy(value) for name, value in buffers().items()}
    wide = torch.full((4, 16), -9, dtype=torch.int32)
    as_torch["block_tables"] = wide[:, :8]  # rows 16 apart
    assert StepTables(manager, 4, 8).write([1], [6], [2], **as_torch) == 6
    assert wide[2, :3].tolist() == [*manager.block_table(1).tolist(), -9]
    assert as_torch["positions"][:7].tolist() == [0, 1, 2, 3, 4, 5, -9]
    assert as_torch["seq_lens"].tolist() == [6, -9, -9, -9]
