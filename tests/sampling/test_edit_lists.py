"""Edits that go on from step to step on the device are those that the host would make of all the
tokens, whatever happens to the sequences meanwhile; and nothing is sent that is there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from edits_by_hand import OPTIONS, PENALTIES, Sequences, assert_from_scratch

from pagedkv.sampling.edit_lists import _ROOM


@pytest.mark.parametrize("seed", range(6))
def test_a_random_run_s_edits_are_those_from_scratch(seed: int) -> None:
    Sequences(12, np.random.default_rng(seed)).run_at_random(200)


def test_several_answers_of_a_prompt_begin_alike_and_go_on_from_what_the_host_knows() -> None:
    some = Sequences(4, np.random.default_rng(1))
    some.start(1, PENALTIES)
    lens = np.full(3, len(some.tokens[1]))
    some.table[1, : lens[0]] = some.tokens[1]
    edits = some.lists.advance(np.array([1, 1, 1]), lens, some.table, some.latest, 3)
    assert edits is not None
    for row in range(3):
        assert_from_scratch(edits, row, some.rules[1], np.array(some.tokens[1], dtype=np.int32))  # type: ignore[arg-type]
    some.latest[1] = 5  # of another answer
    some.tokens[1].append(17)
    some.step([1], ahead=False)


def test_in_steady_decode_nothing_is_sent_but_new_places(monkeypatch: pytest.MonkeyPatch) -> None:
    some = Sequences(8, np.random.default_rng(2))
    for slot in range(7):
        some.start(slot, OPTIONS[slot], 20)
    sent = [0]
    for _ in range(3 * _ROOM):
        some.step(list(range(7)))
        sent.append(some.lists.num_bytes_sent)
    steps = np.flatnonzero(np.diff(sent)).tolist()
    # A place, and that it is its own from there on; two lose stop ids that were forbidden.
    lifted = [3, 4, 5, 6]
    assert steps[:2] == [0, 1]
    assert set(steps) - {0, 1, *lifted} == {6 + _ROOM, 7 + _ROOM, 7 + 2 * _ROOM, 8 + 2 * _ROOM}
    for slot in range(7):
        del some.tokens[slot]
    some.start(0, {}, 3)
    before = some.lists.num_bytes_sent
    some.step([0])
    assert some.lists.num_bytes_sent == before


@pytest.mark.parametrize("options", [{}, {"logit_bias": {1: 1.0}}, PENALTIES])
def test_whoever_gets_a_slot_has_nothing_of_the_one_before(options: dict[str, Any]) -> None:
    some = Sequences(3, np.random.default_rng(2))
    for slot in range(3):
        some.start(slot, PENALTIES)
    for _ in range(3):
        for _ in range(4):
            some.step([0, 1, 2])
        some.start(1, options)


def test_a_list_of_what_may_be_chosen_does_not_grow() -> None:
    some = Sequences(1, np.random.default_rng(3))
    some.start(0, OPTIONS[3])
    for _ in range(3 * _ROOM):
        some.step([0])
    assert some.lists._sizes[0] == 21
