"""The engine on a GPU answers as the engine on the CPU does, in fp32 token for token: the same
model, batches, chunks, prefixes, swaps and draws."""

from __future__ import annotations

import dataclasses
import logging
import random
from typing import Any

import pytest
import torch
from small_llama import CONFIG, answers, engine_on

from pagedkv.engine import Engine
from pagedkv.engine.device import resolve_device
from pagedkv.engine.step_graphs import decode_size
from pagedkv.models import random_model
from pagedkv.records import Preempted, ScheduledStep
from pagedkv.sampling_params import SamplingParams
from pagedkv.scheduler import Rates

GREEDY = SamplingParams(temperature=0, max_tokens=24)
POOL = {"num_gpu_blocks_override": 200}
# Options under which no answer may change.
PRESSURES = {
    "one batch": POOL,
    "chunks": {**POOL, "max_num_batched_tokens": 16, "max_num_seqs": 12},
    "one at a time": {**POOL, "max_num_seqs": 1},
    "prompts kernel by kernel": {**POOL, "max_cudagraph_capture_size": 0},
    "few tokens captured": {**POOL, "max_cudagraph_capture_size": 48, "max_num_seqs": 9},
    "swapped": {
        "num_gpu_blocks_override": 18,
        "watermark": 0.0,
        "swap_space": 0.02,
        "preemption_mode": "swap",
    },
    "computed again": {"num_gpu_blocks_override": 18, "watermark": 0.0},
    "block of 128": {"num_gpu_blocks_override": 40, "block_size": 128},
}


def made_prompts() -> list[list[int]]:
    source = random.Random(3)
    shared = [source.randrange(1500) for _ in range(40)]
    prompts = [[source.randrange(1500) for _ in range(length)] for length in (1, 2, 15, 16, 17, 90)]
    return [*prompts, shared, [*shared, 5, 6], [*shared, 7], shared[:33]]


@pytest.fixture(scope="module")
def on_cpu() -> list[list[list[int]]]:
    return answers(engine_on("cpu", **POOL), made_prompts(), GREEDY)


def preempted_ahead(engine: Engine) -> list[Preempted]:
    """Those that give up their blocks in steps that are planned ahead, as it runs."""
    found: list[Preempted] = []
    plan = engine._scheduler.schedule_ahead

    def planned() -> ScheduledStep | None:
        step = plan()
        if step is not None:
            found.extend(step.preempted)
        return step

    engine._scheduler.schedule_ahead = planned  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize("name", PRESSURES)
def test_greedy_answers_are_those_of_the_cpu(device, on_cpu, name: str) -> None:
    engine = engine_on(device, **PRESSURES[name])
    gone = preempted_ahead(engine)
    assert answers(engine, made_prompts(), GREEDY) == on_cpu
    again = answers(engine, made_prompts(), GREEDY)  # from the prefix cache
    assert again == on_cpu
    assert len({tuple(one[0]) for one in on_cpu}) == len(on_cpu)
    captured = {key.size.num_tokens for key in engine._runner._graphs._graphs}
    prompts = {key for key in engine._runner._graphs._graphs if key.size.max_query_len > 1}
    assert bool(prompts) == (name not in ("prompts kernel by kernel", "one at a time"))
    if name == "few tokens captured":
        assert {16, 32, 48} <= captured
        assert max(captured) == 48
    was_swapped = engine._runner.meter.rates.link_bytes_per_s != Rates().link_bytes_per_s
    assert was_swapped == (name == "swapped")
    assert bool(gone) == (name in ("swapped", "computed again"))


@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_graphs_and_pipelining_change_no_answer(
    device, on_cpu, enforce_eager: bool, async_scheduling: bool
) -> None:
    engine = engine_on(
        device, enforce_eager=enforce_eager, async_scheduling=async_scheduling, **POOL
    )
    for i, prompt in enumerate(made_prompts()):
        engine.add_request(str(i), prompt, SamplingParams(temperature=0, max_tokens=24 - i))
    found = {}
    while engine.has_work:
        found |= {one.request_id: one.outputs[0].token_ids for one in engine.step().finished}
    assert [found[str(i)] for i in range(len(on_cpu))] == [
        one[0][: 24 - i] for i, one in enumerate(on_cpu)
    ]
    assert (engine._runner._graphs is None) == enforce_eager


@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize(
    "rules",
    [
        {},
        {"logit_bias": {7: 3.0}, "allowed_token_ids": range(900), "min_tokens": 50},
        {"presence_penalty": 0.5, "frequency_penalty": 0.1, "repetition_penalty": 1.2},
    ],
)
def test_steady_decode_never_waits_for_the_gpu_but_for_tokens(
    device, enforce_eager: bool, rules: dict[str, Any]
) -> None:
    engine = engine_on(device, enforce_eager=enforce_eager, **POOL)
    params = [
        SamplingParams(temperature=t, seed=1, max_tokens=60, ignore_eos=True, **rules)
        for t in (0.0, 0.8)
    ]
    for i, one in enumerate(params):
        engine.add_request(str(i), [5, 6, 7 + i], one)
    for _ in range(4):
        engine.step()
    num_waits = 0
    synchronize = torch.cuda.Event.synchronize

    def counted(event: torch.cuda.Event) -> None:
        nonlocal num_waits
        num_waits += 1
        synchronize(event)

    torch.cuda.Event.synchronize = counted  # type: ignore[method-assign]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(40):
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.Event.synchronize = synchronize  # type: ignore[method-assign]
    assert num_waits == 40  # for the step before the one that is on its way by then
    assert engine.has_work
    while engine.has_work:
        assert all(one.error is None for one in engine.step().finished)


def test_all_that_steps_of_decodes_ask_for_is_captured_at_start_but_logits(device) -> None:
    engine = engine_on(device, **POOL)
    graphs = engine._runner._graphs
    assert graphs is not None
    common = {(decode_size(size), True, 0) for size in graphs.sizes.decodes}
    assert {key for key in graphs._graphs if key.size.max_query_len == 1} == common
    params = SamplingParams(temperature=0.7, top_k=9, top_p=0.8, min_p=0.01, seed=3, max_tokens=12)
    right = answers(engine_on("cpu", **POOL), made_prompts(), params)
    assert answers(engine, made_prompts(), params) == right
    assert {key for key in graphs._graphs if key.size.max_query_len == 1} == common
    params = dataclasses.replace(params, logprobs=2, presence_penalty=0.5)
    answers(engine, made_prompts(), params)
    assert {chooses for _, chooses, _ in graphs._graphs} == {True, False}


def test_a_short_step_with_prompts_is_a_graph_unless_it_needs_more(device) -> None:
    engine = engine_on(device, **POOL)
    replayed: list[int] = []
    graphs = engine._runner._graphs
    graph_for = graphs.graph_for

    def counted(tensors: Any, *, chooses: bool) -> Any:
        replayed.append(tensors.attn_metadata.max_query_len)
        return graph_for(tensors, chooses=chooses)

    graphs.graph_for = counted  # type: ignore[method-assign]
    right = engine_on("cpu", **POOL)
    prompts = [[i % 1500 for i in range(length)] for length in (3, 40, 100, 256, 257)]
    for prompt, padded in zip(prompts, ([16], [64], [128], [256], []), strict=True):
        replayed.clear()
        assert answers(engine, [prompt], GREEDY) == answers(right, [prompt], GREEDY)
        assert [one for one in replayed if one > 1] == padded
        engine.reset_prefix_cache()
        right.reset_prefix_cache()
    for options in ({"n": 2, "temperature": 0.5, "seed": 1}, {"prompt_logprobs": 1}):
        params = SamplingParams(**{"temperature": 0, "max_tokens": 4} | options)
        replayed.clear()
        answers(engine, [[9, 8, 7, 6]], params)
        assert max(replayed) == 1


def test_two_answers_of_a_prompt_beside_another_prompt_are_no_graph_of_decodes(device) -> None:
    """Rows [decode, last token of the prompt with two answers, first token of the other prompt]:
    as many tokens as rows as samples, which are not one of each."""
    options = {"max_num_seqs": 3, "max_num_batched_tokens": 3, "enable_prefix_caching": False}
    params = [
        SamplingParams(temperature=0.8, seed=1, max_tokens=9, ignore_eos=True),
        SamplingParams(temperature=0.8, seed=2, max_tokens=5, n=2),
        SamplingParams(temperature=0.8, seed=3, max_tokens=5),
    ]
    prompts = [[5], [6, 7, 8], [9, 10, 11]]
    seen: list[tuple[list[int], list[int]]] = []
    found = []
    for place, eager in (("cpu", True), (device, True), (device, False)):
        engine = engine_on(place, enforce_eager=eager, **POOL, **options)
        build = engine._runner._inputs.build

        def built(step: ScheduledStep, *rest: Any, build: Any = build, **named: Any) -> Any:
            seen.append((step.query_lens.tolist(), step.sample_rows.tolist()))
            return build(step, *rest, **named)

        engine._runner._inputs.build = built  # type: ignore[method-assign]
        found.append(answers(engine, prompts, params))
        assert ([1, 1, 1], [0, 1, 1]) in seen
        seen.clear()
    assert found[1] == found[0]
    assert found[2] == found[0]
    assert [len(one) for one in found[0]] == [1, 2, 1]


def test_seeded_answers_are_those_of_the_cpu(device) -> None:
    params = [
        SamplingParams(
            temperature=0.4 + 0.2 * i, top_k=(0, 20)[i % 2], top_p=(1.0, 0.9)[i % 3 > 1], seed=i,
            max_tokens=20,
        )
        for i in range(10)
    ]  # fmt: skip
    right = answers(engine_on("cpu", **POOL), made_prompts(), params)
    assert answers(engine_on(device, **POOL), made_prompts(), params) == right


def test_options_that_change_logits_are_those_of_the_cpu(device) -> None:
    options = [
        {"min_p": 0.2},
        {"repetition_penalty": 1.3, "temperature": 0.0},
        {"frequency_penalty": 0.7, "presence_penalty": 0.4},
        {"logit_bias": {7: 9.0, 8: -100.0}, "top_k": 30},
        {"logits_processors": [lambda prompt, output, logits: logits.roll(len(output))]},
    ]
    params = [
        SamplingParams(**{"temperature": 0.8, "seed": i, "max_tokens": 20, **options[i % 5]})
        for i in range(10)
    ]
    right = answers(engine_on("cpu", **POOL), made_prompts(), params)
    assert answers(engine_on(device, **POOL), made_prompts(), params) == right


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(n=2, best_of=3, seed=4, max_tokens=8),
        SamplingParams(temperature=0, beam_width=3, n=3, max_tokens=8),
    ],
    ids=["best_of", "beams"],
)
def test_several_answers_are_those_of_the_cpu(device, params: SamplingParams) -> None:
    prompts = made_prompts()[3:7]
    right = answers(engine_on("cpu", **POOL), prompts, params)
    assert answers(engine_on(device, **POOL), prompts, params) == right


def test_the_pool_takes_what_utilization_leaves(device, caplog, monkeypatch) -> None:
    # Others on the card as if they held 2 GiB all the time, whatever really runs beside this test.
    total, others = torch.cuda.mem_get_info(device)[1], 2**31

    def memory(_: object) -> tuple[int, int]:
        return total - others - torch.cuda.memory_reserved(device), total

    monkeypatch.setattr(torch.cuda, "mem_get_info", memory)
    torch.cuda.empty_cache()
    utilization = (torch.cuda.memory_reserved(device) + others) / total + 0.03
    with caplog.at_level(logging.INFO):
        engine = engine_on(device, "bfloat16", gpu_memory_utilization=utilization)
    assert "Maximum concurrency for 512 tokens per request: " in caplog.text
    answers(engine, made_prompts(), GREEDY)
    used = others + torch.cuda.memory_reserved(device)
    assert utilization - 0.01 <= used / total <= utilization


def test_no_room_for_a_pool_is_refused_in_words(device) -> None:
    with pytest.raises(ValueError, match="gpu_memory_utilization is 1e-06, which leaves 0 bytes"):
        engine_on(device, gpu_memory_utilization=1e-6)


def test_a_pool_that_is_sized_needs_no_profile(device) -> None:
    engine = engine_on(device, kv_cache_memory_bytes=2**24)
    assert engine.statistics().num_blocks == 2**24 // (3 * 2 * 2 * 64 * 4 * 16)


def test_the_device_is_the_gpu_where_there_is_one(device) -> None:
    assert resolve_device("auto") == resolve_device("cuda") == device
    count = torch.cuda.device_count()
    with pytest.raises(ValueError, match=f"device is 'cuda:{count}', but torch .* finds {count}"):
        resolve_device(f"cuda:{count}")


def test_random_weights_are_the_same_each_time(device) -> None:
    def logits() -> torch.Tensor:
        model = random_model(CONFIG, dtype=torch.bfloat16, device=device)
        return model.compute_logits(torch.ones(1, 256, dtype=torch.bfloat16, device=device))

    first = logits()
    assert first.std() > 0
    assert torch.equal(first, logits())
