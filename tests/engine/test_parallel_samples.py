"""n and best_of: one prefill, shared blocks, copies only where a fork writes, n answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_model import VOCAB, hash_of, logits_of, make_engine
from harness import answer, fake_of, run

from pagedkv.engine import Engine
from pagedkv.sampling import RowTensors, SlotParams, choose, chosen_logprobs
from pagedkv.sampling_params import SamplingParams

PROMPT = "a prompt that takes some blocks: "  # 33 tokens


def sampled(n: int, **options: Any) -> SamplingParams:
    settings = {"temperature": 1.0, "seed": 11, "max_tokens": 12, "ignore_eos": True} | options
    return SamplingParams(n=n, **settings)


def peak_of(engine: Engine) -> int:
    """Run to the end; the most blocks referenced after any step."""
    peak = 0
    while engine.has_work:
        engine.step()
        engine.check_invariants()
        peak = max(peak, engine.statistics().num_referenced)
    return peak


def solo_answers(folder: Path, params: SamplingParams, n: int) -> list[list[int]]:
    """Answer k from the fake's definition: drawn with (seed, k), one at a time."""
    answers = []
    for k in range(n):
        context = list(PROMPT.encode())
        slot = SlotParams(1)
        slot.set(0, params, params.seed or 0)
        for _ in range(params.max_tokens or 0):
            logits = logits_of(hash_of(np.array(context)), ascii_only=True)[:258]
            row = RowTensors.of(slot.rows(np.array([0]), np.array([k])), np.array([len(context)]))
            context.append(int(choose(logits[None], row)))
        answers.append(context[len(PROMPT) :])
    return answers


@pytest.mark.parametrize("options", [{}, {"max_num_seqs": 2}, {"enable_prefix_caching": False}])
def test_answer_k_is_drawn_with_seed_and_k(tokenizer_folder: Path, options: dict[str, Any]) -> None:
    params = sampled(4)
    output = answer(tokenizer_folder, PROMPT, params, block_size=8, **options)
    assert [one.token_ids for one in output.outputs] == solo_answers(tokenizer_folder, params, 4)
    assert [one.index for one in output.outputs] == [0, 1, 2, 3]
    assert len({tuple(one.token_ids) for one in output.outputs}) == 4


def test_one_answer_is_the_first_of_several(tokenizer_folder: Path) -> None:
    one = answer(tokenizer_folder, PROMPT, sampled(1)).outputs[0]
    four = answer(tokenizer_folder, PROMPT, sampled(4)).outputs
    assert one.token_ids == four[0].token_ids
    assert one.cumulative_logprob is None


@pytest.mark.parametrize("prompt_len", [32, 33])
def test_forks_share_the_prompt_and_copy_only_its_last_partial_block(
    tokenizer_folder: Path, prompt_len: int
) -> None:
    engine = make_engine(tokenizer_folder, block_size=8)
    engine.add_request("a", PROMPT[:prompt_len], sampled(4))
    peak = peak_of(engine)
    assert fake_of(engine).num_tokens == prompt_len + 4 * 11  # the prompt once; the last id unread
    shared = prompt_len // 8
    own = -(-(prompt_len + 11) // 8) - shared
    assert peak == shared + 4 * own
    # The last to write has the block to itself by then.
    assert engine.statistics().num_copies == (3 if prompt_len % 8 else 0)
    assert engine.statistics().num_referenced == 0


@pytest.mark.parametrize(
    "options",
    [
        {"num_gpu_blocks_override": 11},
        {"num_gpu_blocks_override": 11, "enable_prefix_caching": False},
        {"num_gpu_blocks_override": 8, "watermark": 0.0},
        {"num_gpu_blocks_override": 9, "max_num_seqs": 3, "max_num_batched_tokens": 7},
    ],
)
def test_groups_preempted_in_a_small_pool_answer_the_same(
    tokenizer_folder: Path, options: dict[str, Any]
) -> None:
    params = sampled(4, max_tokens=20)
    expected = solo_answers(tokenizer_folder, params, 4)
    engine = make_engine(tokenizer_folder, block_size=8, max_model_len=60, **options)
    for name in ("a", "b"):
        engine.add_request(name, PROMPT, params)
    outputs, _ = run(engine)
    assert outputs["a"].num_preemptions + outputs["b"].num_preemptions > 0
    for output in outputs.values():
        assert [one.token_ids for one in output.outputs] == expected


def test_best_of_returns_the_best_by_cumulative_logprob(tokenizer_folder: Path) -> None:
    every = answer(tokenizer_folder, PROMPT, sampled(6)).outputs
    best = answer(tokenizer_folder, PROMPT, sampled(2, best_of=6)).outputs
    ranked = sorted(every, key=lambda one: -(one.cumulative_logprob or 0))
    assert [one.token_ids for one in best] == [one.token_ids for one in ranked[:2]]
    assert [one.index for one in best] == [0, 1]
    context = list(PROMPT.encode())
    total = 0.0
    for token_id in best[0].token_ids:
        logits = logits_of(hash_of(np.array(context)), ascii_only=True)[:258]
        total += float(torch.log_softmax(logits.double(), 0)[token_id])
        context.append(token_id)
    assert best[0].cumulative_logprob == pytest.approx(total, abs=1e-9)


def test_logprobs_are_the_models_own_whatever_the_temperature() -> None:
    logits = logits_of(5, ascii_only=False)[None, : VOCAB - 2].repeat(3, 1)
    params = SlotParams(3)
    for slot, one in enumerate([sampled(2), sampled(2, temperature=0.3, top_k=4), sampled(1)]):
        params.set(slot, one, 0)
    logprobs = chosen_logprobs(logits, params.rows(np.arange(3)), np.array([7, 7, 7]))
    assert logprobs is not None
    expected = float(torch.log_softmax(logits[0].double(), 0)[7])
    assert logprobs.tolist() == pytest.approx([expected, expected, 0.0])
    assert chosen_logprobs(logits[:1], params.rows(np.array([2])), np.array([7])) is None


def test_answers_that_stop_at_different_steps_all_arrive_and_nothing_is_left(
    tokenizer_folder: Path,
) -> None:
    params = sampled(4, max_tokens=60)
    full = answer(tokenizer_folder, PROMPT, params).outputs
    stop = full[2].text[3:5]
    expected = [one.text.split(stop)[0] for one in full]
    assert len({len(text) for text in expected}) > 1
    stopped = sampled(4, max_tokens=60, stop=stop)
    engine = make_engine(tokenizer_folder, max_num_seqs=3)
    engine.add_request("a", PROMPT, stopped)
    engine.add_request("b", PROMPT, stopped)
    outputs, _ = run(engine)
    assert outputs.keys() == {"a", "b"}
    for output in outputs.values():
        assert [one.text for one in output.outputs] == expected
        assert output.outputs[2].stop_reason == stop
        assert output.outputs[2].token_ids == full[2].token_ids[:5]
    engine.add_request("a-1", PROMPT, params)  # every name is free again
    run(engine)


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 4, 7])
def test_abort_ends_every_answer_wherever_it_is(tokenizer_folder: Path, num_steps: int) -> None:
    engine = make_engine(tokenizer_folder, block_size=8, max_num_seqs=3, max_num_batched_tokens=16)
    engine.add_request("a", PROMPT, sampled(4, stop="zzzz"))
    for _ in range(num_steps):
        engine.step()
    output = engine.abort("a")
    assert output is not None
    assert [one.finish_reason for one in output.outputs] == ["abort"] * 4
    full = answer(tokenizer_folder, PROMPT, sampled(4)).outputs
    for one, whole in zip(output.outputs, full, strict=True):
        assert one.token_ids == whole.token_ids[: len(one.token_ids)]
    engine.check_invariants()
    assert not engine.has_work
    assert engine.abort("a") is None
    assert engine.abort("a-1") is None
    run(engine)
    assert engine.statistics().num_referenced == 0


def test_a_failing_prefill_ends_all_answers_and_no_other_request(tokenizer_folder: Path) -> None:
    engine = make_engine(tokenizer_folder)
    fake_of(engine).is_bad = lambda context: len(context) == len(PROMPT)
    engine.add_request("bad", PROMPT, sampled(3))
    engine.add_request("good", "other", sampled(2))
    outputs, _ = run(engine)
    assert [one.finish_reason for one in outputs["bad"].outputs] == ["error"] * 3
    assert "NaN" in (outputs["bad"].error or "")
    assert [one.finish_reason for one in outputs["good"].outputs] == ["length"] * 2


def test_streams_of_several_answers_join_to_their_texts(tokenizer_folder: Path) -> None:
    engine = make_engine(tokenizer_folder, max_num_seqs=2)
    engine.add_request("a", PROMPT, sampled(3), stream=True)
    outputs, deltas = run(engine)
    for one in outputs["a"].outputs:
        mine = [delta for delta in deltas if delta.index == one.index]
        assert "".join(delta.text for delta in mine) == one.text
        assert [t for delta in mine for t in delta.token_ids] == one.token_ids


def test_names_of_answers_are_taken_until_the_group_ends(tokenizer_folder: Path) -> None:
    engine = make_engine(tokenizer_folder)
    engine.add_request("a", PROMPT, sampled(3))
    for name in ("a", "a-0", "a-2"):
        with pytest.raises(ValueError, match=f"'{name}' is in use"):
            engine.add_request(name, PROMPT, sampled(1))
    engine.add_request("b-1", PROMPT, sampled(1))
    with pytest.raises(ValueError, match="'b-1' is in use"):
        engine.add_request("b", PROMPT, sampled(2))
    with pytest.raises(ValueError, match="cannot stream"):
        engine.add_request("c", PROMPT, sampled(2, best_of=3), stream=True)
    outputs, _ = run(engine)
    assert outputs.keys() == {"a", "b-1"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 0}, "n must be at least 1 and at most 128, got 0"),
        ({"n": 10**9}, "n must be at least 1 and at most 128"),
        ({"n": 3, "best_of": 2}, "best_of must be at least 3 and at most 128, got 2"),
        ({"best_of": 129}, "best_of must be at least 1 and at most 128, got 129"),
    ],
)
def test_n_and_best_of_are_bounded(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**options)
