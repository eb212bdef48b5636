"""advance_step against its oracle on random states, with everything it must not touch watched."""

from __future__ import annotations

import pytest
import torch
from operands import assert_same
from step_cases import random_call

from pagedkv import ops
from pagedkv.ops import reference

BLOCK_SIZES = [1, 4, 16]


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("seed", range(25))
def test_it_is_the_oracle_s(seed: int, block_size: int) -> None:
    got, wanted = (random_call(seed, block_size) for _ in range(2))
    ops.advance_step(**got)
    reference.advance_step(**wanted)
    for name, one in wanted.items():
        if isinstance(one, torch.Tensor):
            assert_same(got[name], one, name)


def test_one_step_after_the_other_needs_nothing_but_calls() -> None:
    call = random_call(2, 4) | {"counts": torch.tensor([2, 2], dtype=torch.int32)}
    starts = torch.arange(3, dtype=torch.int32)
    call |= {"query_start_loc": starts, "sample_start_loc": starts}
    call |= {"slots": starts[1:], "seq_lens": starts[1:].clone()}
    call |= {"block_tables": torch.zeros(2, 5, dtype=torch.int32)}
    call |= {"lens": torch.full((6,), 6, dtype=torch.int32)}
    call |= {"tokens": torch.zeros(3, 2, dtype=torch.int64)}
    call |= {"samples": torch.zeros(6, 2, dtype=torch.int64)}
    call |= {"filters": torch.zeros(2, 2, dtype=torch.float64)}
    call |= {"inverse_temperatures": torch.zeros(2)}
    for step in range(10):
        ops.advance_step(**call)
        assert call["tokens"][1].tolist() == [6 + step] * 2
        for row in range(2):
            block = int(call["tables"][row + 1, (6 + step) // 4])
            assert int(call["tokens"][2, row]) == block * 4 + (6 + step) % 4
    assert call["lens"].tolist() == [6, 16, 16, 6, 6, 6]
