"""Edits that go on from step to step on a GPU are those on the CPU, entry for entry."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from edits_by_hand import Sequences
from operands import assert_same
from step_cases import random_edits_call

from pagedkv import ops


@pytest.mark.parametrize("longest", [0, 1, 3, 255, 256, 3000])
def test_they_are_those_on_the_cpu(device, longest: int) -> None:
    for seed in range(20):
        call, there = (random_edits_call(seed, longest, place) for place in ("cpu", device))
        ops.advance_edits(**call)
        ops.advance_edits(**there)
        for name, one in call.items():
            assert_same(there[name].cpu(), one, name)


@pytest.mark.parametrize("seed", range(3))
def test_a_random_run_s_edits_are_those_from_scratch(device, seed: int) -> None:
    Sequences(12, np.random.default_rng(seed), device).run_at_random(120)


def test_nobody_waits_for_edits(device) -> None:
    some = Sequences(4, np.random.default_rng(5), device)
    for slot in range(4):
        some.start(slot, {"presence_penalty": 0.5, "repetition_penalty": 1.2})
    some.step([0, 1, 2, 3])
    lens = np.array([len(one) for one in some.tokens.values()])
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(100):
            edits = some.lists.advance(np.arange(4), lens + step, some.table, some.latest, 4)
            assert edits is not None
    finally:
        torch.cuda.set_sync_debug_mode("default")
