"""sample_tokens on a GPU: the oracle's sets and draws for logits of every kind, size and stride; a
row does not depend on its neighbours; bitwise the same again."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sampling_cases import (
    LOGITS,
    OPTIONS,
    assert_right,
    assert_scores,
    edit_rows,
    made_call,
    random_edits,
    score_call,
)

from pagedkv import ops

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def there(call: dict[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    return {name: None if one is None else one.to(device) for name, one in call.items()}


def run(call: dict[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """The call after it was made there, twice, as bitwise the same."""
    found = there(call, device)
    ops.sample_tokens(**found)
    again = found | {name: found[name] * 0 for name in ("token_ids", "cuts")}
    ops.sample_tokens(**again)
    assert torch.equal(again["token_ids"], found["token_ids"])
    assert torch.equal(again["cuts"].view(torch.int32), found["cuts"].view(torch.int32))
    return found


@pytest.mark.parametrize("vocab", [1, 2, 31, 511, 512, 513, 5003, 32_000, 128_256])
@pytest.mark.parametrize("kind", LOGITS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_choices_are_the_oracles(kind: str, vocab: int, dtype: torch.dtype, device) -> None:
    if vocab == 128_256 and dtype == torch.float16:
        pytest.skip("the oracle sorts for seconds, and bf16 is the same code")
    assert_right(run(made_call(kind, vocab, dtype), device))


@pytest.mark.parametrize("vocab", [151_936, 262_144])
def test_choices_among_the_largest_vocabularies(vocab: int, device) -> None:
    assert_right(run(made_call("normal", vocab, torch.bfloat16), device))


def test_more_tokens_than_any_vocabulary_has(device) -> None:
    options = [(0.0, 0, 1.0, 0.0), (1.0, 2000, 1.0, 0.0), (1.0, 0, 0.9, 0.0), (1.0, 0, 1.0, 0.1)]
    assert_right(run(made_call("normal", 2**20, torch.float32, options=options), device))


@pytest.mark.parametrize("vocab", [1, 65, 5003, 40_000])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["normal", "tied"])
def test_edits_are_made_before_anything_else(
    kind: str, vocab: int, dtype: torch.dtype, device
) -> None:
    call = made_call(kind, vocab, dtype, repeats=2)
    call |= random_edits(2 * len(OPTIONS), vocab, vocab)
    found = run(call, device)
    assert_right(found)
    assert torch.equal(found["logits"].cpu(), call["logits"])


@pytest.mark.parametrize("begin", [0, 1, 8])
@pytest.mark.parametrize("width", [5104, 5111])
def test_rows_may_be_a_part_of_wider_ones(begin: int, width: int, device) -> None:
    call = made_call("normal", 5003, torch.bfloat16)
    wide = torch.full((len(OPTIONS), width), torch.nan, dtype=torch.bfloat16, device=device)
    wide[:, begin : begin + 5003] = call["logits"]
    part = wide[:, begin : begin + 5003]
    found = run(call, device)
    assert_right(found)
    again = found | {"logits": part, "token_ids": found["token_ids"] * 0}
    ops.sample_tokens(**again)
    assert torch.equal(again["token_ids"], found["token_ids"])


@pytest.mark.parametrize("rows", [1, 3, 200])
def test_a_row_does_not_depend_on_its_neighbours(rows: int, device) -> None:
    call = there(made_call("normal", 40_001, torch.bfloat16, repeats=12), device)
    ops.sample_tokens(**call)
    order = torch.from_numpy(np.random.default_rng(rows).permutation(228)).to(device)[:rows]
    some = {name: one[order] for name, one in call.items()}
    right = some["token_ids"].clone(), some["cuts"].clone()
    ops.sample_tokens(**some)
    assert torch.equal(some["token_ids"], right[0])
    assert torch.equal(some["cuts"], right[1])


def test_an_inverse_temperature_beyond_any_weight_takes_the_largest(device) -> None:
    options = [OPTIONS[1], (1.0, 3, 1.0, 0.0), (1.0, 0, 0.9, 0.0), (1.0, 0, 1.0, 0.5)]
    call = made_call("normal", 5003, torch.float32, options=options)
    call["inverse_temperatures"] = torch.tensor([3.2e38, 3.2e38, 3.2e38, 3.2e38])
    best = call["logits"].argmax(1)
    call = {name: one.to(device) for name, one in call.items()}
    ops.sample_tokens(**call)
    assert call["token_ids"].tolist() == best.tolist()


@pytest.mark.parametrize("bad", [torch.nan, -torch.nan, torch.inf])
@pytest.mark.parametrize("limited", [False, True])
def test_rows_without_usable_logits_are_told_and_spoil_no_other(
    bad: float, limited: bool, device
) -> None:
    right = run(made_call("normal", 5000, torch.float32), device)
    call = made_call("normal", 5000, torch.float32)
    call["logits"][::2, 4999] = bad
    call["logits"][4] = -torch.inf
    some = ([5], [[0.0, 1.0, 0.0]], limited)
    call |= edit_rows(len(OPTIONS), some, ([], [], False), some)
    found = run(call, device)
    assert (found["token_ids"][::2] == -1).all()
    assert found["cuts"][::2].isnan().all()
    assert torch.equal(found["token_ids"][1::2], right["token_ids"][1::2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_frequencies_pass_a_chi_square_test(dtype: torch.dtype, device) -> None:
    vocab, draws = 300, 200_000
    logits = (torch.randn(1, vocab, generator=torch.manual_seed(1)) * 1.5).to(device, dtype)
    options = [(0.8, 40, 0.95, 0.01)]
    call = there(made_call("normal", vocab, dtype, options=options), device)
    call = {name: one.expand(draws, *one.shape[1:]).contiguous() for name, one in call.items()}
    call |= {"logits": logits.expand(draws, vocab), "positions": torch.arange(draws).to(device)}
    ops.sample_tokens(**call)
    kept = logits[0].float() >= call["cuts"][0]
    shifted = ((logits[0].float() - logits.max()) * call["inverse_temperatures"][0]).double()
    weights = torch.where(kept, shifted.exp(), 0)
    expected = (weights / weights.sum() * draws).cpu()
    counts = call["token_ids"].cpu().bincount(minlength=vocab)
    assert counts[expected == 0].sum() == 0
    some = expected[expected > 0]
    chi_square = float(((counts[expected > 0] - some) ** 2 / some).sum())
    degrees = len(some) - 1
    assert degrees > 10
    assert abs(chi_square - degrees) < 4 * (2 * degrees) ** 0.5


def test_no_rows_are_no_work_and_nothing_waits_for_the_gpu(device) -> None:
    call = there(made_call("normal", 900, torch.bfloat16), device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        ops.sample_tokens(**call)
        ops.sample_tokens(**{name: one[:0] for name, one in call.items()})
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_right(call)


@pytest.mark.parametrize(
    ("vocab", "num_top"), [(1, 1), (2, 0), (511, 511), (5003, 20), (40_001, 512), (128_256, 20)]
)
@pytest.mark.parametrize("kind", LOGITS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_are_the_oracles(
    kind: str, vocab: int, num_top: int, dtype: torch.dtype, device
) -> None:
    call = score_call(kind, vocab, dtype, num_top)
    if kind == "normal":
        call["logits"][3, 0], call["logits"][4] = torch.nan, -torch.inf
    found = there(call, device)
    ops.score_tokens(**found)
    assert_scores(found, atol=3e-6)
    again = found | {"top_ids": found["top_ids"] * 0, "logprobs": found["logprobs"] * 0}
    ops.score_tokens(**again)
    assert torch.equal(again["top_ids"], found["top_ids"])
    assert torch.equal(again["logprobs"].view(torch.int64), found["logprobs"].view(torch.int64))
