"""Paged attention on the CPU against the oracle: every case with poison around what it may read and
write, run twice. test_instruction_sets.py runs this file on every instruction set."""

from __future__ import annotations

import pytest
import torch
from attention_cases import CORNERS, CORRECTNESS, FACTORS, AttentionCase, all_pairs, pairwise
from attention_operands import AttentionCall, again, make, oracle, plain
from operands import assert_matches, assert_same

from pagedkv import ops


def run(call: AttentionCall) -> AttentionCall:
    """Run it; nothing but the rows of out and lse that belong to a sequence has changed."""
    ops.paged_attention(**call.arguments())
    written = [tensor for tensor in (call.out, call.lse) if tensor is not None]
    call.arena.check_untouched(written)
    for tensor in written:
        assert torch.isnan(tensor[call.num_rows :].float()).all(), "a row of no sequence changed"
    return call


def check(case: AttentionCase) -> None:
    call = run(make(case))
    rows = slice(0, call.num_rows)
    truth, truth_lse = oracle(call)
    rough, rough_lse = plain(call)
    assert_matches(call.out[rows], truth[rows], rough[rows])
    if call.lse is not None:
        assert_matches(call.lse[rows], truth_lse[rows], rough_lse[rows], "lse")
    repeated = run(again(call))
    assert_same(repeated.out, call.out, "out of the second run")
    if call.lse is not None:
        assert repeated.lse is not None
        assert_same(repeated.lse, call.lse, "lse of the second run")


def test_the_cases_cover_every_pair_of_values() -> None:
    covered = set()
    for choice in pairwise():
        names = list(FACTORS)
        covered |= {(a, choice[a], b, choice[b]) for a in names for b in names if a != b}
    assert not all_pairs() - covered
    assert len({case.name for case in CORRECTNESS + CORNERS}) == len(CORRECTNESS + CORNERS)


@pytest.mark.parametrize("case", CORRECTNESS, ids=lambda case: case.name)
def test_it_is_the_oracle(case: AttentionCase) -> None:
    check(case)


@pytest.mark.parametrize("case", CORNERS, ids=lambda case: case.name)
def test_corners(case: AttentionCase) -> None:
    check(case)
