"""Requests that share a prefix, in an engine on a GPU: who starts on what a running step computes,
and decodes that attend to the prefix once."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from small_llama import answers, engine_on

from pagedkv.block_manager import PrefixGrouper
from pagedkv.records import ScheduledStep
from pagedkv.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=24)
POOL = {"num_gpu_blocks_override": 200}


def test_prompts_that_start_on_the_prefix_of_a_running_step_have_the_cpus_answers(device) -> None:
    source = random.Random(4)
    prefix = [source.randrange(1500) for _ in range(96)]
    prompts = [[*prefix, 7 * i, i] for i in range(8)]
    options = {**POOL, "max_num_batched_tokens": 98, "max_num_seqs": 9}
    engine = engine_on(device, **options)
    plan = engine._scheduler.schedule_ahead
    num_cached: list[int] = []

    def planned() -> ScheduledStep | None:
        step = plan()
        if step is not None:
            num_cached.extend(one.num_cached_tokens for one in step.admitted)
        return step

    engine._scheduler.schedule_ahead = planned  # type: ignore[method-assign]
    right = answers(engine_on("cpu", enable_prefix_caching=False, **options), prompts, GREEDY)
    assert answers(engine, prompts, GREEDY) == right
    assert num_cached[0] == 96  # beside the first prompt's only step


def test_decodes_that_share_a_prefix_attend_to_it_once_and_have_the_same_logits(device) -> None:
    source = random.Random(8)
    shared = [source.randrange(1500) for _ in range(200)]
    prompts = [[*shared, i] for i in range(40)]
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    found: dict[bool, torch.Tensor] = {}
    for grouped in (False, True):
        engine = engine_on(device, "bfloat16", enforce_eager=True, **POOL)
        inputs, model = engine._runner._inputs, engine._runner._model
        inputs._grouper = PrefixGrouper(16) if grouped else None  # costs nothing, so that it pays
        forward, compute = model.forward, model.compute_logits
        steps, logits = [], []

        def watched(*step: Any, forward=forward, steps=steps) -> torch.Tensor:
            metadata = step[-1]
            groups = metadata.prefix_groups
            size = len(metadata.seq_lens) if metadata.max_query_len == 1 else 0
            steps.append((size, None if groups is None else groups.tolist()))
            return forward(*step)

        def kept(hidden: torch.Tensor, compute=compute, logits=logits) -> torch.Tensor:
            logits.append(compute(hidden).float())
            return compute(hidden)

        model.forward, model.compute_logits = watched, kept
        answers(engine, prompts, params)
        decode = next(i for i, (size, _) in enumerate(steps) if size == 40)
        found[grouped] = logits[decode]
        groups = steps[decode][1]
        assert (groups is not None) == grouped
        if grouped:
            assert groups[0] == [0, 40, 12]
            assert not any(map(any, groups[1:]))
    alike = torch.nn.functional.cosine_similarity(found[False], found[True])
    assert alike.min() > 0.999


def test_a_graph_with_a_shared_prefix_is_captured_when_a_step_has_one(device) -> None:
    source = random.Random(8)
    shared = [source.randrange(1500) for _ in range(200)]
    prompts = [[*shared, i] for i in range(9)]
    right = answers(engine_on("cpu", **POOL), prompts, GREEDY)
    engine = engine_on(device, **POOL)
    engine._runner._inputs._grouper = PrefixGrouper(16)
    assert answers(engine, prompts, GREEDY) == right
    assert any(num_groups == 1 for _, _, num_groups in engine._runner._graphs._graphs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_decodes_that_share_a_prefix_have_the_same_logits_beside_a_chunk(device, dtype) -> None:
    source = random.Random(8)
    shared = [source.randrange(1500) for _ in range(200)]
    beside = [source.randrange(1500) for _ in range(300)]
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    found: dict[bool, torch.Tensor] = {}
    for grouped in (False, True):
        engine = engine_on(device, dtype, enforce_eager=True, **POOL)
        inputs, model = engine._runner._inputs, engine._runner._model
        inputs._grouper = None
        answers(engine, [[*shared, 1]], params)  # finds its place in the prefix cache
        for i in range(8):
            engine.add_request(str(i), [*shared, i], params)
        while engine.num_waiting or engine.num_running < 8:
            engine.step()
        engine.step()
        inputs._grouper = PrefixGrouper(16) if grouped else None  # not before: tokens may differ
        forward, compute = model.forward, model.compute_logits
        steps, logits = [], []

        def watched(*step: Any, forward=forward, steps=steps) -> torch.Tensor:
            groups = step[-1].prefix_groups
            steps.append((step[-1].max_query_len, None if groups is None else groups.tolist()))
            return forward(*step)

        def kept(hidden: torch.Tensor, compute=compute, logits=logits) -> torch.Tensor:
            logits.append(compute(hidden).float())
            return compute(hidden)

        model.forward, model.compute_logits = watched, kept
        engine.add_request("beside", beside, params)
        while engine.has_work:
            engine.step()
        mixed = next(i for i, (length, _) in enumerate(steps) if length == 300)
        assert (steps[mixed][1] is not None) == grouped
        if grouped:
            assert steps[mixed][1][0] == [0, 8, 12]
        found[grouped] = logits[mixed]
    alike = torch.nn.functional.cosine_similarity(found[False], found[True])
    assert len(alike) == 9
    assert alike.min() > 0.999
