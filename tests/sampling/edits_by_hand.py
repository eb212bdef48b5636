"""Edits of logits without an engine: of a batch whose rows are given with their tokens, and of
sequences that go on from step to step, compared with what the host would make of all their tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from pagedkv.ops.step import FORBIDDEN, NO_EDIT
from pagedkv.records import PENDING
from pagedkv.request import Request
from pagedkv.sampling import EditLists, EditTensors, LogitRules, RuledRow
from pagedkv.sampling.edits import edits_of
from pagedkv.sampling_params import SamplingParams

VOCAB = 30
PENALTIES = {"repetition_penalty": 1.3, "frequency_penalty": 0.7, "presence_penalty": 0.4}
OPTIONS: list[dict[str, Any]] = [
    PENALTIES,
    {"presence_penalty": -0.5},
    {**PENALTIES, "logit_bias": {3: 2.0, 29: -1.0}, "bad_words": ["a"]},
    {**PENALTIES, "allowed_token_ids": range(4, 25)},
    {**PENALTIES, "min_tokens": 5, "stop_token_ids": [7, 8]},
    {"logit_bias": {1: 1.0}},
    {"min_tokens": 3, "stop_token_ids": [9]},
    {"repetition_penalty": 1.1, "bad_words": ["a b"]},
    {**PENALTIES, "logits_processors": [lambda prompt, output, logits: logits]},
    {},
]
BAD = {"a": ((6,),), "a b": ((6,), (5, 4))}


def edit_tensors(
    rows: list[RuledRow], num_rows: int, device: torch.device | str = "cpu"
) -> EditTensors:
    """Each row at the slot of its number."""
    lists = EditLists(num_rows, device)
    lens = np.zeros(num_rows, dtype=np.int64)
    for one in rows:
        lists.set(one.row, one.rules)
        lens[one.row] = one.token_ids.size
    table = np.zeros((num_rows, int(lens.max(initial=1))), dtype=np.int32)
    for one in rows:
        table[one.row, : one.token_ids.size] = one.token_ids
    latest = torch.zeros(num_rows + 1, dtype=torch.int64, device=device)
    edits = lists.advance(np.arange(num_rows), lens, table, latest, num_rows)
    if edits is None:
        nothing = torch.zeros(num_rows + 1, dtype=torch.int32, device=device)
        return EditTensors(nothing, nothing[:0], torch.zeros(0, 3, device=device), nothing[1:])
    return edits


def rules_of(prompt: np.ndarray, options: dict[str, Any]) -> LogitRules | None:
    params = SamplingParams(max_tokens=10**6, **options)
    bad = BAD[params.bad_words[0]] if params.bad_words else ()
    request = Request("r", prompt, 10**6, params.stop_token_ids, params, bad_token_ids=bad)
    return LogitRules.of(request, VOCAB)


def assert_from_scratch(edits: EditTensors, row: int, rules: LogitRules, tokens: Any) -> None:
    """The edits of a row are those of the host, made of all its tokens."""
    mine = slice(*edits.start_loc[row : row + 2].tolist())
    ids, values = edits.ids[mine].cpu(), edits.values[mine].cpu()
    want = edits_of(RuledRow(row, rules, tokens), before=not rules.processors)
    assert ids[len(want.ids) :].tolist() == [NO_EDIT] * (len(ids) - len(want.ids))
    assert ids[: len(want.ids)].tolist() == want.ids.tolist()
    assert bool(edits.is_limited[row]) == want.is_limited
    params, counts = rules.params, np.maximum(want.counts, 0)
    taken = params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
    taken[want.counts == FORBIDDEN] = np.inf
    factor = np.where(want.counts >= 0, params.repetition_penalty, 1.0)
    expected = np.stack([want.bias, factor, taken], axis=1).astype(np.float32)
    np.testing.assert_array_equal(values[: len(want.ids)], expected)
    assert values[len(want.ids) :].tolist() == [[0.0, 1.0, 0.0]] * (len(ids) - len(want.ids))


class Sequences:
    """Sequences at slots, and a device that knows the latest token of each."""

    def __init__(self, num_slots: int, source: np.random.Generator, device: Any = "cpu") -> None:
        self.lists = EditLists(num_slots, device)
        self.source = source
        self.tokens: dict[int, list[int]] = {}
        self.rules: dict[int, LogitRules | None] = {}
        self.table = np.full((num_slots, 4000), 99, dtype=np.int32)
        self.latest = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)

    def start(self, slot: int, options: dict[str, Any], length: int = 0) -> None:
        prompt = self.source.integers(0, VOCAB, length or self.source.integers(1, 40))
        self.tokens[slot] = prompt.tolist()
        self.rules[slot] = rules_of(prompt.astype(np.int32), options)
        self.lists.set(slot, self.rules[slot])

    def step(self, slots: list[int], num_padding: int = 0, *, ahead: bool = True) -> None:
        """One with a sample of each, compared; ahead: their last tokens are not known where the
        host need not know them."""
        rows = np.array(slots, dtype=np.int64)
        lens = np.array([len(self.tokens[slot]) for slot in slots], dtype=np.int64)
        for slot in slots:
            own = self.tokens[slot]
            self.table[slot, : len(own)] = own
            rules = self.rules[slot]
            is_read = rules is not None and bool(rules.processors or rules.bad_behind)
            if ahead and not is_read and rules is not None and len(own) > rules.prompt_len:
                self.table[slot, len(own) - 1] = PENDING
        edits = self.lists.advance(rows, lens, self.table, self.latest, len(slots) + num_padding)
        assert (edits is None) == all(self.rules[slot] is None for slot in slots)
        for row, slot in enumerate(slots):
            rules = self.rules[slot]
            if rules is not None:
                assert_from_scratch(edits, row, rules, np.array(self.tokens[slot], dtype=np.int32))
            elif edits is not None:
                assert edits.start_loc[row] == edits.start_loc[row + 1]
        for slot in slots:
            self.tokens[slot].append(int(self.source.integers(0, VOCAB)))
            self.latest[slot] = self.tokens[slot][-1]

    def run_at_random(self, num_steps: int) -> None:
        """Sequences come, go, miss steps, change their order and their slots."""
        source, num_slots = self.source, self.table.shape[0]

        def options() -> dict[str, Any]:
            return OPTIONS[int(source.integers(len(OPTIONS)))]

        for slot in range(num_slots // 2):
            self.start(slot, options())
        for _ in range(num_steps):
            chance = source.random()
            alive = list(self.tokens)
            if chance < 0.15:  # perhaps in a slot that is in use
                self.start(int(source.integers(num_slots)), options())
            elif chance < 0.2 and len(alive) > 3:
                del self.tokens[alive[int(source.integers(len(alive)))]]
            elif chance < 0.25:
                self.lists.forget()
            alive = sorted(self.tokens)
            if source.random() < 0.3:
                count = int(source.integers(1, len(alive) + 1))
                alive = source.permutation(alive)[:count].tolist()
            self.step(alive, int(source.integers(3)), ahead=source.random() < 0.8)
