"""Every refusal of advance_step and advance_edits, by its message."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from calls import advance_edits, advance_step
from refusing import Refusal, assert_refused, int32_like, repeated, transposed_rows

from pagedkv import ops

OP = "advance_step"
INTS = (
    "lens", "block_tables", "seq_lens", "counts", "slots", "query_start_loc", "sample_start_loc",
    "tables", "draws", "params", "token_ids",
)  # fmt: skip
LAST = "expected a contiguous last dimension"

REFUSALS = [
    *(
        Refusal(OP, {name: torch.Tensor.half}, f"{name} has dtype float16, expected int32")
        for name in INTS
    ),
    *(
        Refusal(OP, {name: torch.Tensor.int}, f"{name} has dtype int32, expected int64")
        for name in ("tokens", "samples", "latest")
    ),
    Refusal(OP, {"filters": torch.Tensor.float}, "filters has dtype float32, expected float64"),
    Refusal(
        OP,
        {"inverse_temperatures": torch.Tensor.double},
        "inverse_temperatures has dtype float64, expected float32",
    ),
    *(
        Refusal(OP, {name: transposed_rows}, f"{name} has strides [1, {rows}], {LAST}")
        for name, rows in (("tokens", 3), ("block_tables", 3), ("samples", 6), ("filters", 2))
    ),
    *(
        Refusal(
            OP, {name: transposed_rows}, f"{name} has strides [1, 6], expected a contiguous tensor"
        )
        for name in ("tables", "params")
    ),
    *(
        Refusal(
            OP, {name: lambda t: t.repeat_interleave(2)[::2]}, f"{name} has strides [2], {LAST}"
        )
        for name in ("lens", "seq_lens", "inverse_temperatures", "counts", "slots",
                     "query_start_loc", "sample_start_loc", "draws", "latest", "token_ids")
    ),
    *(
        Refusal(OP, {name: repeated}, f"{name} has strides [0, 1], expected no overlap in a tensor")
        for name in ("tokens", "block_tables", "samples", "filters")
    ),
    Refusal(OP, {"tokens": lambda t: t[:2]}, "tokens has shape [2, 6], expected [3, num_tokens]"),
    Refusal(
        OP,
        {"block_tables": lambda t: t[:2]},
        "block_tables has shape [2, 3], expected [num_rows, max_num_blocks] = [3, *]",
    ),
    Refusal(
        OP,
        {"samples": lambda t: t[:5]},
        "samples has shape [5, 4], expected [6, num_samples] = [6, 4]",
    ),
    Refusal(
        OP,
        {"filters": lambda t: t[:, :3]},
        "filters has shape [2, 3], expected [2, num_samples] = [2, 4]",
    ),
    Refusal(OP, {"counts": lambda t: t[:1]}, "counts has shape [1], expected [2] = [2]"),
    Refusal(OP, {"slots": lambda t: t[:2]}, "slots has shape [2], expected [num_rows] = [3]"),
    *(
        Refusal(
            OP, {name: lambda t: t[:3]}, f"{name} has shape [3], expected [num_rows + 1] = [4]"
        )
        for name in ("query_start_loc", "sample_start_loc")
    ),
    Refusal(
        OP,
        {"tables": lambda t: t[:5]},
        "tables has shape [5, 3], expected [num_slots, max_num_blocks] = [6, *]",
    ),
    Refusal(OP, {"draws": lambda t: t[:5]}, "draws has shape [5], expected [num_slots] = [6]"),
    Refusal(
        OP,
        {"params": lambda t: t[:, :7].contiguous()},
        "params has shape [6, 7], expected [num_slots, 8] = [6, 8]",
    ),
    Refusal(
        OP, {"latest": lambda t: t[:6]}, "latest has shape [6], expected [num_slots + 1] = [7]"
    ),
    Refusal(
        OP,
        {"params": lambda t: torch.cat([t.flatten()[:1], t.flatten()])[1:].view(6, 8)},
        "params starts 4 bytes after a multiple of 8, expected an aligned tensor",
    ),
    Refusal(OP, {"block_size": 0}, "block_size is 0, expected 1 to 256"),
    Refusal(OP, {"block_size": 257}, "block_size is 257, expected 1 to 256"),
    # ---- what only the CPU reads
    Refusal(
        OP, {"counts": int32_like(4, 1)}, "counts[0] is 4, expected 0 to the 3 rows there are"
    ),
    Refusal(OP, {"counts": int32_like(2, -1)}, "counts[1] is -1, expected at least 0"),
    Refusal(
        OP,
        {"query_start_loc": int32_like(0, 1, 4, 7)},
        "query_start_loc[3] is 7, expected at most the 6 tokens there are",
    ),
    Refusal(
        OP,
        {"sample_start_loc": int32_like(0, 2, 1, 4)},
        "sample_start_loc[2] is 1, expected at least 2, the entry before",
    ),
    Refusal(OP, {"slots": int32_like(5, 6, 0)}, "slots[1] is 6, expected 0 to 5"),
    Refusal(OP, {"slots": int32_like(-1, 2, 0)}, "slots[0] is -1, expected 0 to 5"),
    Refusal(
        OP,
        {"lens": int32_like(0, 0, 10, 0, 0, 5)},
        "lens[2] is 10, expected 0 to 9 (what block_tables holds, less the step's tokens)",
    ),
    Refusal(OP, {"lens": int32_like(0, 0, -1, 0, 0, 5)}, "lens[2] is -1, expected 0 to 9"),
    Refusal(
        OP, {"token_ids": lambda t: t[:2]}, "token_ids has 2 ids, expected at least 3"
    ),
]  # fmt: skip


EDITS = "advance_edits"
EDIT_INTS = (
    "ids", "counts", "start_loc", "is_limited", "rows", "last_ids", "last_counts", "sent"
)  # fmt: skip


def with_slot(slot: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def changed(rows: torch.Tensor) -> torch.Tensor:
        rows = rows.clone()
        rows[0, 2] = slot
        return rows

    return changed


def with_source(row: int, source: int, length: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def changed(rows: torch.Tensor) -> torch.Tensor:
        rows = rows.clone()
        rows[row, 0], rows[row, 1] = source, length
        return rows

    return changed


REFUSALS += [
    *(
        Refusal(EDITS, {name: torch.Tensor.half}, f"{name} has dtype float16, expected int32")
        for name in EDIT_INTS
    ),
    Refusal(EDITS, {"latest": torch.Tensor.int}, "latest has dtype int32, expected int64"),
    *(
        Refusal(EDITS, {name: torch.Tensor.double}, f"{name} has dtype float64, expected float32")
        for name in ("values", "last_values")
    ),
    *(
        Refusal(
            EDITS, {name: lambda t: t.repeat_interleave(2)[::2]}, f"{name} has strides [2], {LAST}"
        )
        for name in ("ids", "counts", "start_loc", "is_limited", "latest", "last_ids",
                     "last_counts")
    ),
    *(
        Refusal(
            EDITS,
            {name: transposed_rows},
            f"{name} has strides [1, {rows}], expected a contiguous tensor",
        )
        for name, rows in (("values", 9), ("rows", 3), ("last_values", 5), ("sent", 3))
    ),
    Refusal(EDITS, {"counts": lambda t: t[:8]}, "counts has shape [8], expected [num_edits] = [9]"),
    Refusal(
        EDITS,
        {"values": lambda t: t[:8]},
        "values has shape [8, 3], expected [num_edits, 3] = [9, 3]",
    ),
    Refusal(
        EDITS,
        {"start_loc": lambda t: t[:3]},
        "start_loc has shape [3], expected [num_rows + 1] = [4]",
    ),
    Refusal(
        EDITS,
        {"is_limited": lambda t: t[:2]},
        "is_limited has shape [2], expected [num_rows] = [3]",
    ),
    Refusal(
        EDITS,
        {"rows": lambda t: t[:, :7].contiguous()},
        "rows has shape [3, 7], expected [num_rows, 8] = [3, 8]",
    ),
    Refusal(
        EDITS,
        {"last_counts": lambda t: t[:4]},
        "last_counts has shape [4], expected [num_last] = [5]",
    ),
    Refusal(
        EDITS,
        {"last_values": lambda t: t[:4]},
        "last_values has shape [4, 3], expected [num_last, 3] = [5, 3]",
    ),
    Refusal(
        EDITS,
        {"sent": lambda t: t[:, :2].contiguous()},
        "sent has shape [3, 2], expected [num_sent, 3] = [*, 3]",
    ),
    Refusal(
        EDITS,
        {"rows": lambda t: torch.cat([t.flatten()[:1], t.flatten()])[1:].view(3, 8)},
        "rows starts 4 bytes after a multiple of 8, expected an aligned tensor",
    ),
    # ---- what only the CPU reads
    Refusal(EDITS, {"start_loc": int32_like(1, 4, 6, 8)}, "start_loc[0] is 1, expected 0"),
    Refusal(EDITS, {"start_loc": int32_like(0, 6, 4, 8)}, "start_loc[2] is 4, expected 6 to 9"),
    Refusal(EDITS, {"start_loc": int32_like(0, 4, 6, 10)}, "start_loc[3] is 10, expected 6 to 9"),
    Refusal(EDITS, {"rows": with_source(0, 0, -1)}, "rows[0] has -1 entries, expected 0 to 4"),
    Refusal(EDITS, {"rows": with_source(0, 3, 3)}, "rows[0] has 3 entries, expected 0 to 2"),
    Refusal(EDITS, {"rows": with_source(0, 9, 1)}, "rows[0] has 1 entries, expected 0 to 0"),
    Refusal(EDITS, {"rows": with_source(1, -3, 2)}, "rows[1] has 2 entries, expected 0 to 1"),
    Refusal(
        EDITS, {"start_loc": int32_like(0, 4, 5, 7)}, "rows[1] has 2 entries, expected 0 to 1"
    ),
    Refusal(
        EDITS, {"rows": with_slot(3)}, "rows[0] counts the token of slot 3, expected -1 to 2"
    ),
    Refusal(
        EDITS, {"rows": with_slot(-2)}, "rows[0] counts the token of slot -2, expected -1 to 2"
    ),
    Refusal(
        EDITS,
        {"latest": torch.tensor([6, 9, -1])},
        "latest[2] is -1, expected 0 to 2147483646",
    ),
    Refusal(
        EDITS,
        {"start_loc": int32_like(0, 3, 5, 7)},
        "rows[0] has no place for token 4 among its 3 entries, expected one more",
    ),
]  # fmt: skip


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda r: r.name)
def test_it_is_refused(refusal) -> None:
    assert_refused(refusal)


@pytest.mark.parametrize(
    ("written", "other"),
    [("lens", "draws"), ("seq_lens", "slots"), ("inverse_temperatures", None)],
)
def test_memory_of_another_operand_must_not_be_written(written: str, other: str | None) -> None:
    call = advance_step()
    if other is None:
        call[written] = call["filters"].view(torch.float32).flatten()[:4]
        message = "filters overlaps inverse_temperatures in memory"
    else:
        call[written] = call[other].flatten()[: call[written].numel()]
        message = f"{written} overlaps {other} in memory"
    with pytest.raises(RuntimeError, match=message):
        ops.advance_step(**call)


@pytest.mark.parametrize(
    ("written", "other"),
    [("ids", "counts"), ("ids", "last_ids"), ("counts", "sent"), ("values", "last_values")],
)
def test_edits_are_made_in_memory_of_their_own(written: str, other: str) -> None:
    call = advance_edits()
    memory = torch.zeros(64, dtype=torch.int32)
    for name in (written, other):
        shape, kind = call[name].shape, call[name].dtype
        call[name] = memory[: call[name].numel()].view(kind).view(shape)
    with pytest.raises(RuntimeError, match=f"{written} overlaps {other} in memory"):
        ops.advance_edits(**call)
