"""advance_edits against its oracle on random lists, with everything it must not touch watched."""

from __future__ import annotations

import pytest
import torch
from calls import edit_rows_of
from operands import assert_same
from step_cases import random_edits_call

from pagedkv import ops
from pagedkv.ops import reference
from pagedkv.ops.step import FORBIDDEN, NO_EDIT, UNSEEN


@pytest.mark.parametrize("longest", [0, 1, 3, 40])
@pytest.mark.parametrize("seed", range(25))
def test_it_is_the_oracle_s(seed: int, longest: int) -> None:
    got, wanted = (random_edits_call(seed, longest) for _ in range(2))
    ops.advance_edits(**got)
    reference.advance_edits(**wanted)
    for name, one in wanted.items():
        assert_same(got[name], one, name)


def test_one_step_after_the_other_counts_what_was_chosen() -> None:
    source = torch.Generator().manual_seed(4)
    tokens = torch.randint(12, (60,), generator=source)
    size = 13
    ids, counts = torch.full((2, size), NO_EDIT, dtype=torch.int32)
    counts[:] = UNSEEN
    values = torch.zeros(size, 3)
    ids[:2], counts[:2] = torch.tensor([3, 9]), torch.tensor([0, FORBIDDEN])
    sent = torch.empty(0, 3, dtype=torch.int32)
    starts, rows = torch.tensor([0, size], dtype=torch.int32), edit_rows_of((0, size, 0))
    for step, token in enumerate(tokens):
        last = ids.clone(), counts.clone(), values.clone()
        made = ids, counts, values, starts, torch.zeros(1, dtype=torch.int32), rows
        ops.advance_edits(*made, token[None], *last, sent)
        so_far = tokens[: step + 1].tolist()
        listed = sorted({3, 9, *so_far})
        assert ids.tolist() == listed + [NO_EDIT] * (size - len(listed))
        expected = [FORBIDDEN if one == 9 else so_far.count(one) for one in listed]
        assert counts[: len(listed)].tolist() == expected
