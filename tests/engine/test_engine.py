"""The engine on a fake model: answers equal the solo ones under every pressure, ends are right,
failures stay with the requests concerned.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_model import EOS_ID, hash_of, logits_of, make_engine
from harness import GREEDY, answer, fake_of, greedy_by_hand, run

from pagedkv.sampling import RowTensors, SlotParams, choose, philox4x32
from pagedkv.sampling_params import SamplingParams

PROMPTS = ["hello there", "x", "a" * 50, "shared prefix of two: one", "shared prefix of two: two"]
# Options under which no answer may change.
PRESSURES: dict[str, dict[str, Any]] = {
    "alone at a time": {"max_num_seqs": 1},
    "chunks of 5": {"max_num_seqs": 4, "max_num_batched_tokens": 5},
    "tiny pool": {"num_gpu_blocks_override": 10, "block_size": 8},
    "tiny pool, no prefix cache": {
        "num_gpu_blocks_override": 19,
        "block_size": 4,
        "enable_prefix_caching": False,
        "watermark": 0.0,
    },
    "blocks of one": {"block_size": 1, "num_gpu_blocks_override": 100},
    "one huge block each": {"block_size": 256, "num_gpu_blocks_override": 3},
}


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_greedy_answer_is_the_models_own(tokenizer_folder: Path, prompt: str) -> None:
    output = answer(tokenizer_folder, prompt, GREEDY)
    assert output.outputs[0].token_ids == greedy_by_hand(prompt, 24)
    assert output.prompt == prompt
    assert output.prompt_token_ids == list(prompt.encode())


@pytest.mark.parametrize("n", [1, 2])
def test_no_list_of_a_prompt_is_made_until_somebody_asks(tokenizer_folder: Path, n: int) -> None:
    engine = make_engine(tokenizer_folder)
    request = engine.make_request("a", [97, 98, 99], SamplingParams(n=n, max_tokens=2))
    engine.add(request)
    output = run(engine)[0]["a"]
    assert output.prompt_ids is request.prompt_token_ids
    assert output.prompt_token_ids == [97, 98, 99]
    assert output.prompt_len == 3


@pytest.mark.parametrize("name", PRESSURES)
@pytest.mark.parametrize("kind", ["greedy", "seeded"])
def test_batches_chunks_and_preemption_change_no_answer(
    tokenizer_folder: Path, name: str, kind: str
) -> None:
    def params(i: int) -> SamplingParams:
        if kind == "greedy":
            return GREEDY
        return SamplingParams(
            temperature=0.9, top_k=(0, 30)[i % 2], top_p=0.9, seed=i, max_tokens=24
        )

    solo = [answer(tokenizer_folder, one, params(i)) for i, one in enumerate(PROMPTS)]
    engine = make_engine(tokenizer_folder, **PRESSURES[name])
    for i, one in enumerate(PROMPTS):
        engine.add_request(str(i), one, params(i))
    outputs, _ = run(engine)
    for i, right in enumerate(solo):
        assert outputs[str(i)].outputs == right.outputs
    if name.startswith("tiny"):
        assert sum(output.num_preemptions for output in outputs.values()) > 0
    if name == "chunks of 5":
        assert max(fake_of(engine).max_query_lens) == 5


def test_a_prompt_asked_again_is_found_in_the_prefix_cache(tokenizer_folder: Path) -> None:
    engine = make_engine(tokenizer_folder, block_size=4)
    prompt = "0123456789ab"  # three full blocks: the last token must be computed all the same
    for name, cached in (("cold", 0), ("warm", 8)):
        before = fake_of(engine).num_tokens
        engine.add_request(name, prompt, SamplingParams(temperature=0, max_tokens=1))
        output = run(engine)[0][name]
        assert output.num_cached_tokens == cached
        assert fake_of(engine).num_tokens - before == len(prompt) - cached
        assert output.outputs[0].token_ids == greedy_by_hand(prompt, 1)
    off = make_engine(tokenizer_folder, block_size=4, enable_prefix_caching=False)
    for name in ("one", "two"):
        off.add_request(name, prompt, SamplingParams(temperature=0, max_tokens=1))
        assert run(off)[0][name].num_cached_tokens == 0


def test_a_draw_is_keyed_by_the_seed_and_the_tokens_own_position(tokenizer_folder: Path) -> None:
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=77, max_tokens=12, ignore_eos=True)
    rows = SlotParams(1)
    rows.set(0, params, 77)
    context = list(b"keyed")
    for _ in range(12):
        logits = logits_of(hash_of(np.array(context)), ascii_only=True)[None, :258]
        context.append(int(choose(logits, RowTensors.of(rows, np.array([len(context)])))))
    output = answer(tokenizer_folder, "keyed", params, max_num_batched_tokens=2, max_num_seqs=1)
    assert output.outputs[0].token_ids == context[5:]


def test_a_seed_gives_the_same_draws_whatever_the_neighbours(tokenizer_folder: Path) -> None:
    seeded = SamplingParams(temperature=1.0, seed=11, max_tokens=20, ignore_eos=True)
    right = answer(tokenizer_folder, "draw", seeded).outputs
    engine = make_engine(tokenizer_folder, max_num_seqs=4)
    for i in range(6):
        engine.add_request(f"other{i}", "d" * i + "noise", SamplingParams(max_tokens=3 * i + 1))
        if i == 3:
            engine.add_request("seeded", "draw", seeded)
    assert run(engine)[0]["seeded"].outputs == right
    other = answer(
        tokenizer_folder, "draw", SamplingParams(seed=12, max_tokens=20, ignore_eos=True)
    )
    assert other.outputs != right


def test_requests_without_a_seed_differ_unless_the_engine_has_one(tokenizer_folder: Path) -> None:
    params = SamplingParams(max_tokens=20, ignore_eos=True)

    def texts(**options: Any) -> list[str]:
        engine = make_engine(tokenizer_folder, **options)
        for name in "ab":
            engine.add_request(name, "same", params)
        outputs, _ = run(engine)
        return [outputs[name].outputs[0].text for name in "ab"]

    first = texts(seed=5)
    assert first[0] != first[1]
    assert texts(seed=5) == first
    assert texts(seed=6) != first
    assert texts() != texts()


def test_the_kth_request_without_a_seed_has_the_kth_seed_of_the_engine(
    tokenizer_folder: Path,
) -> None:
    engine = make_engine(tokenizer_folder, seed=2**40 + 5)
    seeds = [engine.make_request("a", [1], SamplingParams()).seed for _ in range(130)]
    key = tuple(np.array([word], dtype=np.uint64) for word in (5, 2**8))
    for k in (0, 1, 63, 64, 129):
        counter = tuple(np.array([word], dtype=np.uint64) for word in (k, 0, 0, 1))
        low, high, _, _ = philox4x32(counter, key)
        assert seeds[k] == int(high[0]) << 32 | int(low[0])
    assert engine.make_request("a", [1], SamplingParams(seed=7)).seed == 7


def test_padding_rows_of_the_embedding_are_never_sampled(tokenizer_folder: Path) -> None:
    for params in (GREEDY, SamplingParams(max_tokens=50, ignore_eos=True)):
        assert max(answer(tokenizer_folder, "pad", params).outputs[0].token_ids) < 258


def test_the_head_runs_on_the_rows_that_sample_alone(tokenizer_folder: Path) -> None:
    engine = make_engine(tokenizer_folder, max_num_seqs=2, max_num_batched_tokens=8)
    fake, num_rows = fake_of(engine), []
    compute = fake.compute_logits

    def counted(hidden: torch.Tensor) -> torch.Tensor:
        num_rows.append(len(hidden))
        return compute(hidden)

    fake.compute_logits = counted  # type: ignore[method-assign]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    engine.add_request("short", "s", params)
    engine.add_request("long", "of eighteen tokens", params)
    run(engine)
    # Chunks of 7 beside the short one's token each, and the last 4 of the prompt.
    assert num_rows == [1, 1, 2, 2, 1, 1]


@pytest.mark.parametrize("max_tokens", [1, 2, 17])
def test_max_tokens_ends_with_length(tokenizer_folder: Path, max_tokens: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    output = answer(tokenizer_folder, "count", params).outputs[0]
    assert len(output.token_ids) == max_tokens
    assert (output.finish_reason, output.stop_reason) == ("length", None)


@pytest.mark.parametrize(("prompt_len", "max_tokens", "generated"), [
    (30, 1, 1), (30, 2, 2), (30, 50, 2), (31, 1, 1), (31, 9, 1), (31, None, 1), (3, None, 29),
])  # fmt: skip
def test_the_context_bounds_an_answer(
    tokenizer_folder: Path, prompt_len: int, max_tokens: int | None, generated: int
) -> None:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    output = answer(tokenizer_folder, "p" * prompt_len, params, max_model_len=32).outputs[0]
    assert len(output.token_ids) == generated
    assert output.finish_reason == "length"


def test_without_max_tokens_an_answer_fills_what_the_pool_holds(tokenizer_folder: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    output = answer(tokenizer_folder, "abc", params, num_gpu_blocks_override=2, block_size=4)
    assert len(output.outputs[0].token_ids) == 2 * 4 + 1 - 3


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_token_ends_the_text_and_is_named(tokenizer_folder: Path, include: bool) -> None:
    ids = greedy_by_hand("stop at", 24)
    last = next(i for i in range(5, 24) if ids[i] not in ids[:i])
    params = SamplingParams(
        temperature=0,
        max_tokens=24,
        stop_token_ids=[ids[last], 3],
        include_stop_str_in_output=include,
    )
    output = answer(tokenizer_folder, "stop at", params).outputs[0]
    assert output.token_ids == ids[: last + 1]
    assert (output.finish_reason, output.stop_reason) == ("stop", ids[last])
    assert output.text == bytes(ids[: last + include]).decode()


def test_the_end_token_stops_without_a_reason_and_can_be_ignored(tokenizer_folder: Path) -> None:
    long = SamplingParams(temperature=1.0, seed=1, max_tokens=200)
    output = answer(tokenizer_folder, "until the end", long).outputs[0]
    assert output.token_ids[-1] == EOS_ID
    assert (output.finish_reason, output.stop_reason) == ("stop", None)
    assert "<|" not in output.text
    on = SamplingParams(temperature=1.0, seed=1, max_tokens=200, ignore_eos=True)
    ignored = answer(tokenizer_folder, "until the end", on).outputs[0]
    assert len(ignored.token_ids) == 200
    assert ignored.token_ids[: len(output.token_ids)] == output.token_ids


def test_a_failing_step_ends_its_requests_and_the_engine_goes_on(tokenizer_folder: Path) -> None:
    engine = make_engine(tokenizer_folder, max_num_seqs=2, block_size=4)
    fake = fake_of(engine)

    def explode_on_marker(input_ids: torch.Tensor) -> None:
        if (input_ids == ord("!")).any():
            raise RuntimeError("injected")

    fake.before_step = explode_on_marker
    engine.add_request("before", "calm words", SamplingParams(temperature=0, max_tokens=2))
    engine.add_request("bad", "boom boom boom!", GREEDY)
    engine.add_request("after", "calm words again", GREEDY)
    outputs, _ = run(engine)
    assert outputs["bad"].outputs[0].finish_reason == "error"
    assert "RuntimeError: injected" in (outputs["bad"].error or "")
    assert outputs["after"].outputs[0].token_ids == greedy_by_hand("calm words again", 24)
    # Nothing of the failed step was published: the same prompt finds no prefix.
    fake.before_step = lambda input_ids: None
    engine.add_request("again", "boom boom boom!", GREEDY)
    again = run(engine)[0]["again"]
    assert again.num_cached_tokens == 0
    assert again.outputs[0].token_ids == greedy_by_hand("boom boom boom!", 24)


def test_nan_logits_end_only_their_own_request(tokenizer_folder: Path) -> None:
    engine = make_engine(tokenizer_folder)
    fake_of(engine).is_bad = lambda context: bytes(context[:3].astype(np.uint8)) == b"bad"
    fine = SamplingParams(seed=3, max_tokens=24)
    engine.add_request("good", "fine prompt", fine)
    engine.add_request("nan", "bad prompt", GREEDY)
    outputs, _ = run(engine)
    assert outputs["nan"].outputs[0].finish_reason == "error"
    assert "NaN" in (outputs["nan"].error or "")
    assert outputs["nan"].outputs[0].token_ids == []
    assert outputs["good"].outputs == answer(tokenizer_folder, "fine prompt", fine).outputs


def test_an_interrupt_ends_the_step_and_leaves_a_usable_engine(tokenizer_folder: Path) -> None:
    engine = make_engine(tokenizer_folder)

    def interrupt(input_ids: torch.Tensor) -> None:
        raise KeyboardInterrupt

    fake_of(engine).before_step = interrupt
    engine.add_request("one", "hello", GREEDY, stream=True)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine.check_invariants()
    assert not engine.has_work
    fake_of(engine).before_step = lambda input_ids: None
    engine.add_request("one", "hello", GREEDY)
    assert run(engine)[0]["one"].outputs[0].token_ids == greedy_by_hand("hello", 24)


@pytest.mark.parametrize("num_steps", [0, 1, 2, 5])
def test_an_abort_returns_the_output_so_far(tokenizer_folder: Path, num_steps: int) -> None:
    engine = make_engine(tokenizer_folder)
    engine.add_request("gone", "abort me", GREEDY)
    engine.add_request("stays", "keep me", GREEDY, stream=True)
    for _ in range(num_steps):
        engine.step()
    output = engine.abort("gone")
    assert output is not None
    assert output.outputs[0].finish_reason == "abort"
    assert output.outputs[0].token_ids == greedy_by_hand("abort me", 24)[:num_steps]
    assert engine.abort("gone") is None
    assert engine.abort("never heard of") is None
    outputs, _ = run(engine)
    assert outputs["stays"].outputs[0].token_ids == greedy_by_hand("keep me", 24)
    assert "gone" not in outputs


def test_the_cache_view_names_who_holds_what(tokenizer_folder: Path) -> None:
    engine = make_engine(tokenizer_folder, block_size=4)
    engine.add_request("ann", "0123456789", GREEDY)
    engine.add_request("bob", "xy", GREEDY)
    engine.step()
    view = engine.cache_view()
    held = {
        view.names[seq_id]: num_tokens
        for seq_id, num_tokens in zip(
            view.snapshot.seq_ids.tolist(), view.snapshot.seq_num_tokens.tolist(), strict=True
        )
    }
    assert held == {"ann": 10, "bob": 2}
    run(engine)
    assert engine.cache_view().names == {}
    assert view.snapshot.statistics.num_referenced == 4
