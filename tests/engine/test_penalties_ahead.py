"""Requests with penalties beside others: no step waits for their tokens, little is sent, and what a
token is drawn from follows from all tokens before it, whatever happens to the sequences."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_model import EOS_ID, make_engine
from harness import answer, fake_of, run

from pagedkv.engine import Engine
from pagedkv.ops.step import NO_EDIT, UNSEEN
from pagedkv.records import PENDING
from pagedkv.sampling import EditTensors, RuledRow
from pagedkv.sampling.edits import edits_of
from pagedkv.sampling_params import SamplingParams

PENALTIES = {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.3}
CASES: dict[str, dict[str, Any]] = {
    "pipelined": {"async_scheduling": True},
    "step by step": {"async_scheduling": False},
    "small chunks": {"max_num_batched_tokens": 7, "max_num_seqs": 6, "async_scheduling": True},
    "computed again": {"num_gpu_blocks_override": 16, "async_scheduling": True},
    # CPU blocks of 32 bytes.
    "swapped": {
        "num_gpu_blocks_override": 16,
        "swap_space": 60 * 2**-25,
        "preemption_mode": "swap",
        "async_scheduling": True,
    },
}


def compare_every_draw(engine: Engine, source: np.random.Generator) -> tuple[list[str], list[str]]:
    """What each token is drawn from is compared with what the host would make of all tokens; now
    and then the lists are forgotten before.

    Returns what has been seen, and what was wrong: an error in a step only ends its requests.
    """
    lists, seen, wrong = engine._runner._edits, [], []
    advance = lists.advance

    def compared(edits: EditTensors, row: int, slot: int, tokens: np.ndarray) -> None:
        rules = lists._rules[slot]
        begin, end = edits.start_loc[row : row + 2].tolist()
        if rules is None:
            assert begin == end
            return
        want = edits_of(RuledRow(row, rules, tokens), before=not rules.processors)
        ids = edits.ids[begin:end][edits.ids[begin:end] != NO_EDIT]
        np.testing.assert_array_equal(ids, want.ids)
        assert bool(edits.is_limited[row]) == want.is_limited
        values = edits.values[begin : begin + len(ids)].numpy()
        params, counts = rules.params, np.maximum(want.counts, 0)
        taken = params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
        taken[want.counts < UNSEEN] = np.inf
        np.testing.assert_array_equal(values[:, 0], want.bias)
        np.testing.assert_array_equal(values[:, 2], taken.astype(np.float32))
        factor = np.where(want.counts >= 0, params.repetition_penalty, 1.0)
        np.testing.assert_array_equal(values[:, 1], factor.astype(np.float32))

    def advanced(slots: Any, lens: Any, token_ids: Any, latest: torch.Tensor, num_rows: int) -> Any:
        if source.random() < 0.05:
            lists.forget()
            seen.append("forgotten")
        before = lists.num_bytes_sent
        edits = advance(slots, lens, token_ids, latest, num_rows)
        for row, slot in enumerate(slots.tolist()):
            tokens = token_ids[slot, : lens[row]].copy()
            if tokens[-1] == PENDING:
                seen.append("ahead")
                tokens[-1] = latest[slot]
            if edits is not None:
                try:
                    compared(edits, row, slot, tokens)
                except AssertionError as error:
                    wrong.append(str(error))
        seen.append("sent" if lists.num_bytes_sent > before else "kept")
        return edits

    lists.advance = advanced  # type: ignore[method-assign]
    return seen, wrong


def random_params(source: np.random.Generator) -> SamplingParams:
    kind = source.random()
    options: dict[str, Any] = {"max_tokens": int(source.integers(1, 50))}
    if source.random() < 0.5:
        options["temperature"] = 0
    else:
        options |= {"seed": int(source.integers(99)), "n": int(source.integers(1, 4))}
    if kind < 0.6:
        options |= {
            "repetition_penalty": float(source.uniform(0.7, 1.8)),
            "frequency_penalty": float(source.uniform(-1, 1)),
            "presence_penalty": float(source.choice([0.0, 0.5])),
        }
    if kind < 0.15:
        options |= {"logit_bias": {101: 3.0, 7: -1.0}, "min_tokens": min(4, options["max_tokens"])}
    elif kind < 0.2:
        options |= {"allowed_token_ids": [*range(97, 120), EOS_ID]}
    elif kind < 0.25:
        options |= {"bad_words": ["ab", "e"]}
    elif kind < 0.28:
        options |= {"logits_processors": [lambda prompt, output, logits: logits.roll(1)]}
    elif kind > 0.8:
        options |= {"logit_bias": {102: 1.0}}
    return SamplingParams(ignore_eos=source.random() < 0.5, **options)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", CASES)
def test_a_random_run_draws_from_what_the_host_would_make_of_all_tokens(
    tokenizer_folder: Path, name: str, seed: int
) -> None:
    source = np.random.default_rng([seed, len(name)])
    options = {"block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 40} | CASES[name]
    engine = make_engine(tokenizer_folder, **options)
    seen, wrong = compare_every_draw(engine, source)
    asked: dict[str, tuple[str, SamplingParams]] = {}
    alive: list[str] = []
    outputs = {}
    for number in range(100):
        action = source.random()
        if action < 0.3 and len(alive) < 12:
            text = "the prompt that many share, "[: int(source.integers(1, 28))]
            params = random_params(source)
            with contextlib.suppress(ValueError):  # more than the pool has
                engine.add_request(f"r{number}", text, params)
                alive.append(f"r{number}")
                asked[f"r{number}"] = text, params
        elif action < 0.34 and alive:
            engine.abort(alive[int(source.integers(len(alive)))])
        elif action < 0.38 and alive:
            parent = alive[int(source.integers(len(alive)))]
            with contextlib.suppress(ValueError):  # it has several answers itself
                alive += engine.fork(parent, 2)
        outputs |= {one.request_id: one for one in engine.step().finished}
        alive = [one for one in alive if one not in outputs]
        engine.check_invariants()
    outputs |= run(engine)[0]
    assert not wrong, wrong[0]
    assert all(one.error is None for one in outputs.values())
    assert {"forgotten", "sent"} <= set(seen)
    if name in ("pipelined", "step by step"):
        assert ("ahead" in seen) == (name == "pipelined")
    if "num_gpu_blocks_override" in options:
        assert any(one.num_preemptions for one in outputs.values())
    done = [one for one in asked if one in outputs and outputs[one].outputs[0].finish_reason]
    for name in done[::4]:
        text, params = asked[name]
        if params.logits_processors or outputs[name].outputs[0].finish_reason == "abort":
            continue
        alone = answer(tokenizer_folder, text, params, async_scheduling=False)
        assert [one.token_ids for one in outputs[name].outputs] == [
            one.token_ids for one in alone.outputs
        ]


@pytest.mark.parametrize("rules", [PENALTIES, {**PENALTIES, "min_tokens": 9}])
def test_one_request_with_penalties_holds_no_step_up(
    tokenizer_folder: Path, rules: dict[str, Any]
) -> None:
    engine = make_engine(tokenizer_folder, async_scheduling=True, max_num_seqs=8)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    for i in range(5):
        own = dataclasses.replace(params, **rules) if i == 2 else params
        engine.add_request(str(i), f"request {i}", own)
    in_flight = []
    for _ in range(30):
        engine.step()
        in_flight.append(len(engine._scheduler._in_flight))
    assert in_flight == [1] * 30
    run(engine)


def test_in_steady_decode_nothing_is_sent_for_penalties_but_places_now_and_then(
    tokenizer_folder: Path,
) -> None:
    engine = make_engine(
        tokenizer_folder, async_scheduling=True, max_num_seqs=8, block_size=64,
        max_num_batched_tokens=400,
    )  # fmt: skip
    params = SamplingParams(seed=1, max_tokens=80, ignore_eos=True, **PENALTIES)  # type: ignore[arg-type]
    for i in range(6):
        engine.add_request(str(i), f"request {i}", params)
    for _ in range(4):
        engine.step()
    lists, state = engine._runner._edits, engine._runner._inputs.state
    sent, before = [], state.num_bytes_sent
    for _ in range(64):
        sent.append(lists.num_bytes_sent)
        engine.step()
    sent.append(lists.num_bytes_sent)
    steps = [one for one in np.diff(sent).tolist() if one]
    # A row's source and what is counted, its place, whether it is limited.
    assert steps == [6 * (32 + 4 + 4) + 4] * 4
    assert state.num_bytes_sent - before <= 12 * 6
    run(engine)


def test_a_step_that_fails_leaves_no_list_that_is_taken_for_known(tokenizer_folder: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, **PENALTIES)  # type: ignore[arg-type]
    right = answer(tokenizer_folder, "stays", params)
    engine = make_engine(tokenizer_folder, async_scheduling=True, max_num_seqs=2)
    failing = {4: torch.OutOfMemoryError("injected"), 9: torch.OutOfMemoryError("injected")}
    count = 0

    def before_step(_: torch.Tensor) -> None:
        nonlocal count
        count += 1
        if count in failing:
            raise failing[count]

    fake_of(engine).before_step = before_step
    for name in ("stays", "too"):
        engine.add_request(name, name, params)
    outputs, _ = run(engine)
    assert outputs["stays"].outputs == right.outputs
    assert outputs["too"].outputs == answer(tokenizer_folder, "too", params).outputs
    assert count > 20
