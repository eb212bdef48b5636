"""The edits of logits that rules become, against a plain NumPy oracle and the processors of
transformers: exact values, in the documented order, row by row.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from edits_by_hand import edit_tensors
from transformers import generation as hf

from pagedkv.ops.reference_sampling import edited
from pagedkv.request import Request
from pagedkv.sampling import (
    LogitRules,
    RowTensors,
    RuledRow,
    SlotParams,
    call_functions,
    choose,
)
from pagedkv.sampling_params import SamplingParams

VOCAB = 50
PROMPT = [3, 3, 7, 11, 49]
OUTPUT = [7, 20, 20, 20, 0, 5, 6]
INF = float("inf")

OPTIONS: dict[str, dict[str, Any]] = {
    "bias": {"logit_bias": {0: 5.0, 49: -100.0, 20: 0.25}},
    "repetition": {"repetition_penalty": 1.7},
    "repetition below 1": {"repetition_penalty": 0.5},
    "frequency": {"frequency_penalty": 0.7},
    "presence": {"presence_penalty": -1.3},
    "allowed": {"allowed_token_ids": [4, 20, 4, 9]},
    "bad words": {"bad_words": ["a"]},
    "too few tokens": {"min_tokens": 8, "stop_token_ids": [30, 31]},
    "enough tokens": {"min_tokens": 7, "stop_token_ids": [30, 31]},
    "all": {
        "logit_bias": {20: 3.0, 5: 1.5},
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.3,
        "presence_penalty": 0.2,
        "allowed_token_ids": range(40),
        "bad_words": ["a"],
        "min_tokens": 9,
        "stop_token_ids": [30, 39],
    },
}
BAD = ((5, 6, 8), (6, 9), (40,), (6, 5, 2), (0, 1))


def rules_of(vocab: int = VOCAB, **options: Any) -> LogitRules:
    params = SamplingParams(**{"max_tokens": 40, **options})
    request = Request(
        "r",
        np.array(PROMPT, dtype=np.int32),
        40,
        stop_token_ids=(*params.stop_token_ids, 99),  # the last lies in the padding
        sampling_params=params,
        bad_token_ids=BAD if params.bad_words else (),
    )
    rules = LogitRules.of(request, vocab)
    assert rules is not None
    return rules


def ruled(row: int, **options: Any) -> RuledRow:
    return RuledRow(row, rules_of(**options), np.array(PROMPT + OUTPUT, dtype=np.int32))


def process_logits(logits: torch.Tensor, rows: list[RuledRow]) -> torch.Tensor:
    """What a token is chosen from: functions called, and the edits made by the op's oracle."""
    changed = call_functions(logits, rows).float().clone()
    edits = edit_tensors(rows, len(changed))
    starts = edits.start_loc.tolist()
    for i, row in enumerate(changed.numpy()):
        mine = slice(starts[i], starts[i + 1])
        edited(row, edits.ids[mine], edits.values[mine], bool(edits.is_limited[i]))
    return changed


def oracle(logits: np.ndarray, options: dict[str, Any]) -> np.ndarray:
    """Token by token, in the documented order."""
    row = logits.astype(np.float32).copy()
    for token, bias in options.get("logit_bias", {}).items():
        row[token] += np.float32(bias)
    penalty = np.float32(options.get("repetition_penalty", 1.0))
    for token in set(PROMPT + OUTPUT):
        row[token] = row[token] / penalty if row[token] > 0 else row[token] * penalty
        count = OUTPUT.count(token)
        taken = options.get("frequency_penalty", 0) * count
        taken += options.get("presence_penalty", 0) * (count > 0)
        row[token] -= np.float32(taken)
    allowed = options.get("allowed_token_ids", range(VOCAB))
    for token in range(VOCAB):
        if token not in allowed:
            row[token] = -INF
    for bad in BAD if "bad_words" in options else ():
        if OUTPUT[len(OUTPUT) + 1 - len(bad) :] == list(bad[:-1]):
            row[bad[-1]] = -INF
    if len(OUTPUT) < options.get("min_tokens", 0):
        row[options["stop_token_ids"]] = -INF
    return row


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_option_and_all_together_equal_the_oracle_exactly(
    name: str, dtype: torch.dtype
) -> None:
    logits = torch.from_numpy(np.random.default_rng(2).normal(size=(3, VOCAB)) * 3).to(dtype)
    before = logits.clone()
    got = process_logits(logits, [ruled(1, **OPTIONS[name])])
    assert torch.equal(logits, before)
    np.testing.assert_array_equal(got[1], oracle(logits[1].float().numpy(), OPTIONS[name]))
    assert torch.equal(got[[0, 2]], logits[[0, 2]].float())


def test_a_step_looks_only_at_bad_words_that_go_on_from_its_last_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared: list[int] = []
    equal = np.array_equal

    def count(*sequences: Any) -> bool:
        compared.append(len(sequences[0]))
        return equal(*sequences)

    monkeypatch.setattr("pagedkv.sampling.logit_rules.np.array_equal", count)
    row = ruled(0, bad_words=["a"])
    last = OUTPUT[-1]
    assert row.rules.forbidden(row.token_ids).size
    assert len(compared) == sum(len(one) > 1 and one[-2] == last for one in BAD) < len(BAD)
    compared.clear()
    assert row.rules.forbidden(np.array(PROMPT)).tolist() == [40]  # nothing has been generated
    assert not compared


def test_the_forbidden_tokens_are_those_that_the_names_say() -> None:
    got = process_logits(torch.zeros(1, VOCAB), [ruled(0, bad_words=["a"])])[0]
    assert np.flatnonzero(got == -INF).tolist() == [8, 9, 40]  # behind (5, 6), behind (6), alone
    got = process_logits(torch.zeros(1, VOCAB), [ruled(0, min_tokens=8, stop_token_ids=[30])])[0]
    assert np.flatnonzero(got == -INF).tolist() == [30]


def test_all_rules_in_one_batch_equal_each_alone() -> None:
    logits = torch.randn(len(OPTIONS) + 2, VOCAB, generator=torch.manual_seed(1)) * 4
    rows = [ruled(i + 1, **options) for i, options in enumerate(OPTIONS.values())]
    together = process_logits(logits, rows)
    for one in rows:
        alone = process_logits(logits[one.row : one.row + 1], [one._replace(row=0)])
        assert torch.equal(together[one.row], alone[0])
    assert torch.equal(together[[0, -1]], logits[[0, -1]])


@pytest.mark.parametrize(
    ("options", "processor"),
    [
        ({"repetition_penalty": 1.7}, hf.RepetitionPenaltyLogitsProcessor(1.7)),
        ({"repetition_penalty": 0.8}, hf.RepetitionPenaltyLogitsProcessor(0.8)),
        (
            {"logit_bias": {3: 2.5, 9: -4.0}},
            hf.SequenceBiasLogitsProcessor({(3,): 2.5, (9,): -4.0}),
        ),
        ({"bad_words": ["a"]}, hf.NoBadWordsLogitsProcessor([list(one) for one in BAD])),
        (
            {"min_tokens": 8, "stop_token_ids": [30]},
            hf.MinNewTokensLengthLogitsProcessor(len(PROMPT), 8, [30]),
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_logits_are_those_of_transformers(options: dict[str, Any], processor: Any) -> None:
    logits = torch.randn(1, VOCAB, generator=torch.manual_seed(5)) * 3
    expected = processor(torch.tensor([PROMPT + OUTPUT]), logits.clone())
    torch.testing.assert_close(process_logits(logits, [ruled(0, **options)]), expected)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_unusable_logits_stay_unusable_whatever_is_forbidden(name: str, bad: float) -> None:
    logits = torch.randn(2, VOCAB)
    logits[1, 49] = bad  # outside of what is allowed
    rows = [ruled(0, **OPTIONS[name]), ruled(1, **OPTIONS[name])]
    draws = RowTensors.of(SlotParams(2).rows(np.arange(2)), np.array([5, 5]))
    got = choose(logits, draws, edit_tensors(rows, 2))
    assert (got < 0).tolist() == [False, True]


def test_min_p_keeps_what_that_of_transformers_keeps() -> None:
    logits = torch.randn(1, VOCAB, generator=torch.manual_seed(5)) * 3
    kept = torch.isfinite(hf.MinPLogitsWarper(0.15)(None, logits.clone()))
    slot = SlotParams(1)
    slot.set(0, SamplingParams(min_p=0.15), 1)
    params = slot.rows(np.zeros(4000, dtype=np.int64))
    got = choose(logits.expand(4000, -1), RowTensors.of(params, np.arange(4000)))
    assert set(got.tolist()) == set(kept[0].nonzero().flatten().tolist())


def test_functions_are_called_in_their_order_between_penalties_and_forbidden_tokens() -> None:
    seen: list[tuple[str, list[int], list[int], list[float]]] = []

    def doubled(prompt: Any, output: Any, logits: torch.Tensor) -> torch.Tensor:
        seen.append(("doubled", prompt.tolist(), output.tolist(), logits.tolist()))
        prompt[:] = 0  # reaches nobody else
        return logits * 2

    def raised(prompt: Any, output: Any, logits: torch.Tensor) -> torch.Tensor:
        seen.append(("raised", prompt.tolist(), output.tolist(), logits.tolist()))
        logits[8] = 1000.0  # a forbidden one
        return logits

    logits = torch.randn(1, VOCAB)
    one = ruled(0, presence_penalty=1.0, bad_words=["a"], logits_processors=[doubled, raised])
    got = process_logits(logits, [one])[0]
    penalised = oracle(logits[0].numpy(), {"presence_penalty": 1.0})
    assert seen == [
        ("doubled", PROMPT, OUTPUT, penalised.tolist()),
        ("raised", PROMPT, OUTPUT, (penalised * 2).tolist()),
    ]
    assert one.token_ids.tolist() == PROMPT + OUTPUT
    assert got[8] == -INF
    assert got[11] == penalised[11] * 2


@pytest.mark.parametrize(
    "result",
    [
        *(None, torch.zeros(3), "error", [0.0] * VOCAB),
        *(torch.zeros(VOCAB, dtype=dtype) for dtype in (torch.int64, torch.bool, torch.complex64)),
        torch.zeros(VOCAB, device="meta"),
        torch.zeros(VOCAB).to_sparse(),
    ],
    ids=lambda result: str(result)[:40],
)
def test_a_function_that_fails_fails_its_own_row(
    result: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(prompt: Any, output: Any, logits: torch.Tensor) -> Any:
        if isinstance(result, str):
            raise KeyError("mine")
        return result

    logits = torch.randn(2, VOCAB)
    rows = [ruled(0, logits_processors=[broken]), ruled(1, min_tokens=8)]
    got = process_logits(logits, rows)
    assert got[0].isnan().all()
    assert got[1].amax() == logits[1].amax()
    assert "a logits processor of request 'r' failed" in caplog.text


def test_prompts_of_any_lengths_share_a_batch() -> None:
    rng = np.random.default_rng(7)
    logits = torch.randn(3, VOCAB, generator=torch.manual_seed(2))
    options = {"repetition_penalty": 1.5, "frequency_penalty": 0.5}
    rows = []
    for row, (prompt_len, num_tokens) in enumerate([(900, 903), (300, 300), (1, 1)]):
        rules = dataclasses.replace(rules_of(**options), prompt_len=prompt_len)
        rows.append(RuledRow(row, rules, rng.integers(0, VOCAB, num_tokens).astype(np.int32)))
    got = process_logits(logits, rows)
    for one in rows:
        expected = logits[one.row].clone()
        for token in range(VOCAB):
            if token in one.token_ids:
                value = expected[token]
                expected[token] = value / 1.5 if value > 0 else value * 1.5
            count = int((one.token_ids[one.rules.prompt_len :] == token).sum())
            expected[token] -= 0.5 * count
        assert torch.equal(got[one.row], expected)


def test_no_rules_are_none() -> None:
    request = Request("r", np.array([1], dtype=np.int32), 4)
    assert LogitRules.of(request, VOCAB) is None


def test_words_whose_last_id_has_no_logit_forbid_nothing() -> None:
    params = SamplingParams(bad_words=["any"])
    bad = ((VOCAB,), (3, VOCAB), (VOCAB, 6), (7,))
    prompt = np.array([1, 2], dtype=np.int32)
    request = Request("r", prompt, 40, sampling_params=params, bad_token_ids=bad)
    rules = LogitRules.of(request, VOCAB)
    assert rules is not None
    assert rules.forbidden(np.array([1, 2, 3], dtype=np.int32)).tolist() == [7]
    assert rules.forbidden(np.array([1, 2, VOCAB], dtype=np.int32)).tolist() == [6, 7]
