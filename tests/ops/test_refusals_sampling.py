"""Every refusal of sample_tokens and score_tokens, by its message."""

from __future__ import annotations

import math

import pytest
import torch
from calls import CALLS
from refusing import Refusal, assert_refused, int32_like, repeated, transposed_rows

from pagedkv import ops

DTYPES = {
    "inverse_temperatures": "float32",
    "top_k": "int64",
    "top_p": "float64",
    "min_p": "float64",
    "seeds": "int64",
    "positions": "int64",
    "draws": "int64",
    "edit_start_loc": "int32",
    "edit_ids": "int32",
    "edit_values": "float32",
    "is_limited": "int32",
}
ROWS = list(DTYPES)[:7]
OP = "sample_tokens"
SCORE = "score_tokens"


def with_entry(i: int, value: float):
    def changed(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        tensor[i] = value
        return tensor

    return changed


REFUSALS = [
    Refusal(
        OP,
        {"logits": torch.Tensor.double},
        "logits has dtype float64, expected float32, bfloat16 or float16",
    ),
    Refusal(OP, {"token_ids": torch.Tensor.int}, "token_ids has dtype int32, expected int64"),
    Refusal(OP, {"cuts": torch.Tensor.half}, "cuts has dtype float16, expected float32"),
    *(
        Refusal(OP, {name: torch.Tensor.half}, f"{name} has dtype float16, expected {dtype}")
        for name, dtype in DTYPES.items()
    ),
    *(
        Refusal(OP, {name: lambda t: t[:2]}, f"{name} has shape [2], expected [num_rows] = [3]")
        for name in ("token_ids", "cuts", *ROWS, "is_limited")
    ),
    *(
        Refusal(
            OP,
            {name: lambda t: t.repeat_interleave(2)[::2]},
            f"{name} has strides [2], expected a contiguous last dimension",
        )
        for name in ("token_ids", "cuts", *ROWS, "edit_start_loc", "edit_ids", "is_limited")
    ),
    Refusal(
        OP, {"logits": lambda t: t[0]}, "logits has shape [8], expected [num_rows, vocab_size]"
    ),
    Refusal(
        OP,
        {"logits": transposed_rows},
        "logits has strides [1, 3], expected a contiguous last dimension",
    ),
    Refusal(OP, {"logits": lambda t: t[:, :0]}, "vocab_size is 0, expected 1 to 1048576"),
    Refusal(
        OP,
        {"logits": lambda t: t[:, :1].expand(3, 2**20 + 1)},
        "logits has strides [8, 0], expected a contiguous last dimension",
    ),
    Refusal(
        OP,
        {"logits": lambda _: torch.zeros(3, 2**20 + 1)},
        "vocab_size is 1048577, expected 1 to 1048576",
    ),
    Refusal(
        OP,
        {"token_ids": lambda t: t[:1].expand(3)},
        "token_ids has strides [0], expected a contiguous last dimension",
    ),
    Refusal(
        OP,
        {"edit_start_loc": lambda t: t[:3]},
        "edit_start_loc has shape [3], expected [num_rows + 1] = [4]",
    ),
    Refusal(
        OP,
        {"edit_values": lambda t: t[:2]},
        "edit_values has shape [2, 3], expected [num_edits, 3] = [3, 3]",
    ),
    Refusal(
        OP,
        {"edit_values": repeated},
        "edit_values has strides [0, 1], expected a contiguous tensor",
    ),
    *(
        Refusal(OP, {name: None}, f"{name} is missing, expected it beside edit_start_loc")
        for name in ("edit_ids", "edit_values", "is_limited")
    ),
    Refusal(
        OP, {"edit_start_loc": None}, "edit_ids is given, expected none without edit_start_loc"
    ),
    # ---- score_tokens
    Refusal(
        SCORE,
        {"logits": torch.Tensor.double},
        "logits has dtype float64, expected float32, bfloat16 or float16",
    ),
    *(
        Refusal(
            "score_tokens", {name: torch.Tensor.half}, f"{name} has dtype float16, expected {t}"
        )
        for name, t in (
            ("logprobs", "float64"),
            ("ranks", "int64"),
            ("top_ids", "int64"),
            ("top_logprobs", "float64"),
            ("token_ids", "int64"),
        )
    ),
    *(
        Refusal(
            "score_tokens", {name: lambda t: t[:2]}, f"{name} has shape [2], expected [num_rows]"
        )
        for name in ("logprobs", "ranks", "token_ids")
    ),
    Refusal(
        SCORE,
        {"top_ids": lambda t: t[:2]},
        "top_ids has shape [2, 3], expected [num_rows, num_top] = [3, *]",
    ),
    Refusal(
        SCORE,
        {"top_logprobs": lambda t: t[:, :2].contiguous()},
        "top_logprobs has shape [3, 2], expected [num_rows, num_top] = [3, 3]",
    ),
    Refusal(
        SCORE,
        {"top_ids": repeated},
        "top_ids has strides [0, 1], expected no overlap in a tensor that is written",
    ),
    Refusal(
        SCORE,
        {"logits": transposed_rows},
        "logits has strides [1, 3], expected a contiguous last dimension",
    ),
    Refusal(
        SCORE,
        {
            "top_ids": lambda _: torch.zeros(3, 9, dtype=torch.int64),
            "top_logprobs": lambda _: torch.zeros(3, 9, dtype=torch.float64),
        },
        "num_top is 9, expected 0 to 8",
    ),
    Refusal(
        SCORE,
        {
            "logits": lambda _: torch.zeros(3, 600),
            "top_ids": lambda _: torch.zeros(3, 513, dtype=torch.int64),
            "top_logprobs": lambda _: torch.zeros(3, 513, dtype=torch.float64),
        },
        "num_top is 513, expected 0 to 512",
    ),
    # ---- what only the CPU reads
    *(
        Refusal(
            OP,
            {"inverse_temperatures": with_entry(1, value)},
            f"inverse_temperatures[1] is {text}, expected a finite number of at least 0",
        )
        for value, text in ((-1.0, "-1"), (math.inf, "inf"), (math.nan, "nan"))
    ),
    Refusal(OP, {"top_k": with_entry(2, -1)}, "top_k[2] is -1, expected at least 0"),
    Refusal(OP, {"top_p": with_entry(0, 0)}, "top_p[0] is 0, expected above 0, at most 1"),
    Refusal(OP, {"top_p": with_entry(0, 1.5)}, "top_p[0] is 1.5, expected above 0, at most 1"),
    Refusal(OP, {"min_p": with_entry(0, -0.5)}, "min_p[0] is -0.5, expected 0 to 1"),
    Refusal(OP, {"min_p": with_entry(0, 1.5)}, "min_p[0] is 1.5, expected 0 to 1"),
    Refusal(OP, {"edit_start_loc": int32_like(1, 1, 1, 3)}, "edit_start_loc[0] is 1, expected 0"),
    Refusal(
        OP, {"edit_start_loc": int32_like(0, 1, 0, 3)}, "edit_start_loc[2] is 0, expected 1 to 3"
    ),
    Refusal(
        OP, {"edit_start_loc": int32_like(0, 0, 1, 4)}, "edit_start_loc[3] is 4, expected 1 to 3"
    ),
    Refusal(
        OP,
        {"edit_ids": int32_like(8, 2, 5)},
        "edit_ids[0] is 8, expected 0 to 7, ascending in row 1",
    ),
    Refusal(
        OP,
        {"edit_ids": int32_like(6, 5, 5)},
        "edit_ids[2] is 5, expected 6 to 7, ascending in row 2",
    ),
    Refusal(
        OP,
        {"edit_ids": int32_like(6, 2**31 - 1, 5)},
        "edit_ids[2] is 5, expected 2147483648 to 7, ascending in row 2",
    ),
]


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda r: r.name)
def test_it_is_refused(refusal) -> None:
    assert_refused(refusal)


@pytest.mark.parametrize(
    ("op", "written", "other"),
    [
        (OP, "token_ids", "seeds"),
        (OP, "cuts", "logits"),
        (SCORE, "ranks", "token_ids"),
        (SCORE, "logprobs", "top_logprobs"),
    ],
)
def test_memory_of_another_operand_must_not_be_written(op: str, written: str, other: str) -> None:
    call = CALLS[op][1]()
    with pytest.raises(RuntimeError, match=f"{written} overlaps {other} in memory"):
        getattr(ops, op)(**call | {written: call[other].flatten()[:3]})
