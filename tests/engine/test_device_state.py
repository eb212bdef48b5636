"""What the device makes of its own state is what the host would write from scratch, whatever
happens to the running sequences; and little is sent to it."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_model import make_engine
from harness import answer, run

from pagedkv.block_manager import StepTables
from pagedkv.engine import Engine, device_state
from pagedkv.engine.input_builder import InputBuilder, PaddedSize, StepTensors
from pagedkv.engine.packed_copy import PackedCopy
from pagedkv.records import PENDING, ScheduledStep
from pagedkv.sampling import RowTensors, SlotParams
from pagedkv.sampling_params import SamplingParams

CASES: dict[str, dict[str, Any]] = {
    "pipelined": {"async_scheduling": True},
    "step by step": {"async_scheduling": False},
    "small chunks": {"max_num_batched_tokens": 7, "max_num_seqs": 6, "async_scheduling": True},
    "a pool that is too small": {"num_gpu_blocks_override": 15, "async_scheduling": True},
    # CPU blocks of 32 bytes.
    "swapped": {
        "num_gpu_blocks_override": 15,
        "swap_space": 60 * 2**-25,
        "preemption_mode": "swap",
    },
    "without prefix cache": {"enable_prefix_caching": False, "num_gpu_blocks_override": 30},
}


def expected_inputs(
    inputs: InputBuilder, step: ScheduledStep, token_ids: Any, params: SlotParams, size: PaddedSize
) -> dict[str, np.ndarray]:
    """From scratch: the manager's tables and the slot tables alone."""
    state, num_rows, num_samples = inputs.state, step.slots.size, step.sample_rows.size
    num_slots, width = state.block_tables.shape
    most, more_rows = size.num_tokens, size.num_rows - num_rows
    more_tokens = most - step.num_tokens
    more_samples = size.num_rows - num_samples if more_rows else 0
    tables = np.zeros((num_slots, width), dtype=np.int32)
    slot_mapping, positions = np.full(most, -1), np.zeros(most, dtype=np.int64)
    lens = np.zeros(size.num_rows, dtype=np.int32)
    starts = np.zeros(size.num_rows + 1, dtype=np.int32)
    StepTables(inputs._tables_manager, num_slots, width).write(  # type: ignore[attr-defined]
        step.seq_ids,
        step.query_lens,
        step.slots,
        block_tables=tables,
        slot_mapping=slot_mapping,
        positions=positions,
        seq_lens=lens,
        query_start_loc=starts,
    )
    starts[num_rows + 1 :] = np.minimum(step.num_tokens + 1 + np.arange(more_rows), most)
    starts[-1] = most
    owners = np.repeat(step.slots, step.query_lens)
    ids = token_ids[owners, positions[: step.num_tokens]].astype(np.int64)
    ids = np.where(ids == PENDING, state.latest.numpy()[owners], ids)
    rows = params.rows(step.slots[step.sample_rows], step.sample_draws)
    drawn = RowTensors.of(rows, lens[step.sample_rows].astype(np.int64))

    def padded(values: Any, padding: float = 0) -> np.ndarray:
        return np.concatenate([np.asarray(values), np.full(more_samples, padding)])

    return {
        "input_ids": np.concatenate([ids, np.zeros(more_tokens, dtype=np.int64)]),
        "positions": positions,
        "slot_mapping": slot_mapping,
        "seq_lens": lens,
        "query_start_loc": starts,
        "logit_rows": padded(starts[step.sample_rows + 1] - 1),
        "sample_slots": padded(step.slots[step.sample_rows], num_slots),
        "inverse_temperatures": padded(drawn.inverse_temperatures),
        "top_k": padded(drawn.top_k),
        "top_p": padded(drawn.top_p, 1),
        "min_p": padded(drawn.min_p),
        "seeds": padded(drawn.seeds),
        "sample_positions": padded(drawn.positions),
        "draws": padded(drawn.draws),
        "tables": tables[step.slots],
        "num_samples": np.array(num_samples + more_samples),
    }


def written_inputs(tensors: StepTensors, num_rows: int) -> dict[str, np.ndarray]:
    metadata, draws = tensors.attn_metadata, tensors.draws
    found = {
        "input_ids": tensors.input_ids,
        "positions": tensors.positions,
        "slot_mapping": metadata.slot_mapping,
        "seq_lens": metadata.seq_lens,
        "query_start_loc": metadata.query_start_loc,
        "logit_rows": tensors.logit_rows,
        "sample_slots": tensors.sample_slots,
        "inverse_temperatures": draws.inverse_temperatures,
        "top_k": draws.top_k,
        "top_p": draws.top_p,
        "min_p": draws.min_p,
        "seeds": draws.seeds,
        "sample_positions": draws.positions,
        "draws": draws.draws,
        "tables": metadata.block_tables[:num_rows],
        "num_samples": torch.tensor(draws.draws.numel()),
    }
    return {name: one.numpy().copy() for name, one in found.items()}


def assert_from_scratch(
    inputs: InputBuilder,
    tensors: StepTensors,
    step: ScheduledStep,
    token_ids: Any,
    params: SlotParams,
    size: PaddedSize | None = None,
) -> None:
    own = PaddedSize(step.num_tokens, step.slots.size, 0)
    wanted = expected_inputs(inputs, step, token_ids, params, size or own)
    found = written_inputs(tensors, step.slots.size)
    lens, size = wanted["seq_lens"], inputs._block_size
    for row in range(step.slots.size):  # behind a table's end is nobody's
        used = -(-int(lens[row]) // size)
        wanted["tables"][row, used:] = found["tables"][row, used:] = 0
    for name, one in wanted.items():
        np.testing.assert_array_equal(found[name], one, err_msg=name)


def compare_every_step(engine: Engine, source: np.random.Generator) -> tuple[list[str], list[str]]:
    """What a step's tensors are is compared with what they should be, before the model sees them;
    now and then the step is built twice, padded, or after everything was forgotten.

    Returns what has been seen, and what was wrong: an error in a step only ends its requests.
    """
    inputs = engine._runner._inputs
    inputs._tables_manager = engine._manager  # type: ignore[attr-defined]
    build, advance = inputs.build, inputs.advance
    seen: list[str] = []
    wrong: list[str] = []
    last: list[Any] = []

    def compare(*compared: Any) -> None:
        try:
            assert_from_scratch(inputs, *compared)
        except AssertionError as error:
            wrong.append(str(error))

    def built(step: ScheduledStep, token_ids: Any, params: SlotParams, **_: Any) -> StepTensors:
        free = engine.max_num_seqs - step.slots.size
        has_answers = bool((np.diff(step.sample_rows) == 0).any())  # several of a prompt
        chance = source.random()
        if seen.count("step") % 20 == 19:
            inputs.forget()
            seen.append("forgotten")
        elif chance < 0.2 and free and not has_answers:
            rows, tokens = source.integers([1, 0], [free + 1, 6]).tolist()
            most = min(step.num_tokens + tokens, engine._config.scheduler.max_num_batched_tokens)
            size = PaddedSize(most, step.slots.size + rows, most)
            padded = build(step, token_ids, params, padded=size)
            advance(padded)
            compare(padded, step, token_ids, params, size)
            assert padded.attn_metadata.max_query_len == most
            seen.append("padded")
        if step.swap_out.size:
            inputs.written_blocks(step)
        last[:] = [step, token_ids, params]
        for kind in ("preempted", "forked", "copies", "swap_out", "swap_in"):
            if len(getattr(step, kind)):
                seen.append(kind)
        return build(step, token_ids, params)

    def advanced(tensors: StepTensors) -> None:
        advance(tensors)
        compare(tensors, *last)
        seen.append("step")

    inputs.build, inputs.advance = built, advanced  # type: ignore[method-assign]
    return seen, wrong


def random_params(source: np.random.Generator) -> SamplingParams:
    length = int(source.integers(1, 30))
    kind = source.random()
    if kind < 0.15:
        return SamplingParams(beam_width=3, max_tokens=length)
    options: dict[str, Any] = {"temperature": 0}
    if kind < 0.7:
        options = {
            "temperature": float(source.uniform(0.2, 2)),
            "seed": int(source.integers(2**63)),
        }
        options |= {"top_k": int(source.integers(0, 40)), "top_p": float(source.uniform(0.5, 1))}
        options["min_p"] = float(source.uniform(0, 0.1))
    if kind > 0.9 and options["temperature"] == 0:
        options |= {"presence_penalty": 0.5, "logprobs": 2}
    n = int(source.integers(1, 4)) if options["temperature"] else 1
    return SamplingParams(n=n, max_tokens=length, ignore_eos=source.random() < 0.5, **options)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", CASES)
def test_a_random_run_s_inputs_are_those_from_scratch(
    tokenizer_folder: Path, name: str, seed: int
) -> None:
    source = np.random.default_rng([seed, len(name)])
    options = {"block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 40} | CASES[name]
    engine = make_engine(tokenizer_folder, **options)
    seen, wrong = compare_every_step(engine, source)
    shared = "the prompt that many share, "
    alive: list[str] = []
    for number in range(120):
        action = source.random()
        if action < 0.3 and len(alive) < 14:
            text = shared[: int(source.integers(1, len(shared)))] * int(source.integers(1, 3))
            with contextlib.suppress(ValueError):  # more than the pool has
                engine.add_request(f"r{number}", text, random_params(source))
                alive.append(f"r{number}")
        elif action < 0.35 and alive:
            engine.abort(alive[int(source.integers(len(alive)))])
        elif action < 0.4 and alive:
            parent = alive[int(source.integers(len(alive)))]
            with contextlib.suppress(ValueError):  # it has several answers itself
                alive += engine.fork(parent, 2)
        finished = engine.step().finished
        assert all(output.error is None for output in finished)
        done = {output.request_id for output in finished}
        alive = [one for one in alive if one not in done]
        engine.check_invariants()
    assert all(output.error is None for output in run(engine)[0].values())
    assert not wrong, wrong[0]
    assert seen.count("step") > 60
    assert {"padded", "forgotten", "forked"} <= set(seen)
    if "num_gpu_blocks_override" in options and "prefix" not in name:
        assert "preempted" in seen
    if name == "swapped":
        assert {"swap_out", "swap_in"} <= set(seen)


@pytest.mark.parametrize("limit", ["_USUAL_CHANGES", "_MAX_SIZES"])
def test_larger_steps_and_more_sizes_than_memory_is_kept_for_have_the_same_inputs(
    tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(device_state, limit, {"_USUAL_CHANGES": 0, "_MAX_SIZES": 2}[limit])
    made: list[int] = []
    pieces, view = PackedCopy._pieces, device_state.DeviceState._view

    def taken(self: PackedCopy, num_bytes: int, count: int) -> Any:
        made.append(num_bytes)
        return pieces(self, num_bytes, count)

    def viewed(self: device_state.DeviceState, *size: int) -> Any:
        assert len(self._views) < 2 or limit == "_USUAL_CHANGES"
        return view(self, *size)

    monkeypatch.setattr(PackedCopy, "_pieces", taken)
    monkeypatch.setattr(device_state.DeviceState, "_view", viewed)
    engine = make_engine(
        tokenizer_folder, block_size=4, max_num_seqs=8, max_num_batched_tokens=40,
        async_scheduling=True,
    )  # fmt: skip
    usual = list(made)
    _, wrong = compare_every_step(engine, np.random.default_rng(4))
    for i in range(12):
        params = SamplingParams(temperature=0, max_tokens=4 + 3 * i, ignore_eos=True)
        engine.add_request(str(i), "of some tokens " * (1 + i % 3), params)
    assert all(output.error is None for output in run(engine)[0].values())
    assert not wrong, wrong[0]
    assert (len(made) > len(usual) + 3) == (limit == "_USUAL_CHANGES")
    assert all(size > usual[0] for size in made[len(usual) :])


def bytes_by_step(engine: Engine, num_steps: int) -> list[int]:
    state = engine._runner._inputs.state
    sent = [state.num_bytes_sent]
    for _ in range(num_steps):
        engine.step()
        sent.append(state.num_bytes_sent)
    return np.diff(sent).tolist()


@pytest.mark.parametrize("num_rows", [1, 5, 32])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_steady_decode_sends_nothing_but_new_blocks(
    tokenizer_folder: Path, num_rows: int, temperature: float
) -> None:
    engine = make_engine(
        tokenizer_folder, block_size=8, max_num_seqs=32, async_scheduling=True,
        max_num_batched_tokens=400,
    )  # fmt: skip
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=60, ignore_eos=True)
    for i in range(num_rows):
        engine.add_request(str(i), f"request {i:03}", params)  # 11 tokens
    bytes_by_step(engine, 3)
    sent = bytes_by_step(engine, 32)
    # The index of a word and a block id, for each row in every eighth step; the first request began
    # a step before the others.
    assert sum(sent) == 4 * 12 * num_rows
    assert sent.count(0) == 32 - (4 if num_rows == 1 else 8)
    while engine.has_work:
        engine.step()


def test_what_has_to_be_told_when_a_request_ends_are_the_rows_behind_it(
    tokenizer_folder: Path,
) -> None:
    engine = make_engine(tokenizer_folder, block_size=64, max_num_seqs=16, async_scheduling=True)
    for i in range(12):
        length = 12 if i == 7 else 40
        params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
        engine.add_request(str(i), "all alike", params)
    bytes_by_step(engine, 5)
    sent = [one for one in bytes_by_step(engine, 20) if one]
    assert sent == [12 * (4 + 2)]  # the slots of four rows, and how many rows and tokens there are
    run(engine)


def test_tokens_that_the_host_has_chosen_from_are_sent_to_it(tokenizer_folder: Path) -> None:
    engine = make_engine(tokenizer_folder, block_size=64, async_scheduling=False)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    for name in ("a", "b", "c"):
        engine.add_request(name, name, params)
    bytes_by_step(engine, 3)
    assert bytes_by_step(engine, 10) == [12] * 10
    run(engine)


def test_a_step_that_fails_leaves_nothing_that_is_taken_for_known(tokenizer_folder: Path) -> None:
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=12)
    right = answer(tokenizer_folder, "stays", params)
    engine = make_engine(tokenizer_folder, max_num_seqs=4)
    inputs = engine._runner._inputs
    for broken in ("advance", "build"):
        engine.add_request("goes", "goes", params)
        engine.step()
        whole = getattr(inputs, broken)

        def fails(*args: Any, whole: Any = whole, **options: Any) -> Any:
            whole(*args, **options)
            raise RuntimeError("injected")

        setattr(inputs, broken, fails)
        while engine.has_work:
            engine.step()
        setattr(inputs, broken, whole)
        engine.add_request("stays", "stays", params)
        assert run(engine)[0]["stays"].outputs == right.outputs
