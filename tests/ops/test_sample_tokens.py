"""sample_tokens on the CPU against its oracle: filter sets, draws, edits, rows that fail."""

from __future__ import annotations

import pytest
import torch
from sampling_cases import LOGITS, OPTIONS, assert_right, edit_rows, made_call, random_edits

from pagedkv import ops
from pagedkv.ops import reference

VOCABULARIES = [1, 2, 63, 65, 512, 5003]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("vocab", VOCABULARIES)
@pytest.mark.parametrize("kind", LOGITS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_choices_are_the_oracles(kind: str, vocab: int, dtype: torch.dtype) -> None:
    call = made_call(kind, vocab, dtype)
    ops.sample_tokens(**call)
    assert_right(call)


@pytest.mark.parametrize("kind", ["normal", "few are possible"])
def test_the_oracle_is_right_too(kind: str) -> None:
    call = made_call(kind, 900, torch.float32) | random_edits(len(OPTIONS), 900, 1)
    reference.sample_tokens(**call)
    assert_right(call)


@pytest.mark.parametrize("vocab", [1, 65, 5003])
@pytest.mark.parametrize("dtype", DTYPES)
def test_edits_are_made_before_anything_else(vocab: int, dtype: torch.dtype) -> None:
    call = made_call("normal", vocab, dtype, repeats=2)
    call |= random_edits(2 * len(OPTIONS), vocab, vocab)
    before = call["logits"].clone()
    ops.sample_tokens(**call)
    assert_right(call)
    assert torch.equal(call["logits"], before)


@pytest.mark.parametrize("bad", [torch.nan, -torch.nan, torch.inf])
@pytest.mark.parametrize("limited", [False, True])
def test_rows_without_usable_logits_are_told_and_spoil_no_other(bad: float, limited: bool) -> None:
    right = made_call("normal", 700, torch.float32)
    ops.sample_tokens(**right)
    call = made_call("normal", 700, torch.float32)
    call["logits"][::2, 699] = bad
    # Outside of what is allowed, and where it is forbidden.
    some = ([5], [[0.0, 1.0, 0.0]], limited)
    ops.sample_tokens(**call, **edit_rows(len(OPTIONS), some, ([], [], False), some))
    assert call["token_ids"][::2].tolist() == [-1] * len(call["token_ids"][::2])
    assert call["cuts"][::2].isnan().all()
    assert torch.equal(call["token_ids"][1::2], right["token_ids"][1::2])
    assert torch.equal(call["cuts"][1::2], right["cuts"][1::2])


def test_nothing_left_is_no_usable_logit() -> None:
    call = made_call("normal", 3, torch.float32)
    everything = ([0, 1, 2], [[0.0, 1.0, torch.inf]] * 3, False)
    ops.sample_tokens(**call, **edit_rows(len(OPTIONS), *[everything] * len(OPTIONS)))
    assert (call["token_ids"] == -1).all()


def test_rows_may_be_a_part_of_wider_ones_and_cuts_be_left_out() -> None:
    call = made_call("normal", 300, torch.float32)
    wide = torch.randn(len(OPTIONS), 411)
    wide[:, 5:305] = call["logits"]
    ops.sample_tokens(**call)
    again = call | {"logits": wide[:, 5:305], "cuts": None, "token_ids": call["token_ids"] * 0}
    ops.sample_tokens(**again)
    assert torch.equal(again["token_ids"], call["token_ids"])
