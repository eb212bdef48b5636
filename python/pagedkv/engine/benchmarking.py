"""How many tokens per second an engine makes of requests that are all there at once, and where the
time of its steps goes. For measurements only.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pagedkv.engine.engine import Engine
from pagedkv.engine.gpu_timeline import GpuSplit, record, split_of
from pagedkv.engine.step_times import StepSplit
from pagedkv.records import RequestOutput
from pagedkv.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Throughput:
    """Of one run. split: of its steps."""

    num_requests: int
    num_prompt_tokens: int
    num_answer_tokens: int
    num_preemptions: int
    seconds: float
    split: StepSplit


def random_prompts(count: int, length: int, vocab_size: int, *, seed: int = 0) -> list[list[int]]:
    """The same each time."""
    source = random.Random(seed)
    return [[source.randrange(vocab_size) for _ in range(length)] for _ in range(count)]


def run_offline(
    engine: Engine,
    prompts: Sequence[list[int]],
    output_len: int,
    *,
    temperature: float = 0.0,
    clock: Callable[[], float] = time.perf_counter,
    on_end: Callable[[RequestOutput], None] = lambda output: None,
) -> Throughput:
    """Answer all prompts with output_len tokens each, end tokens ignored; the prefix cache is
    emptied before. on_end is called with each answer.

    Raises:
        RuntimeError: a request failed; it says why.
    """
    engine.reset_prefix_cache()
    params = SamplingParams(temperature=temperature, max_tokens=output_len, ignore_eos=True)
    before, begin_s = engine.step_split, clock()
    for i, prompt in enumerate(prompts):
        engine.add_request(f"bench {i}", prompt, params)
    num_answer = num_preemptions = 0
    while engine.has_work:
        for output in engine.step().finished:
            if output.error is not None:
                raise RuntimeError(f"a request failed: {output.error}")
            num_answer += sum(len(one.token_ids) for one in output.outputs)
            num_preemptions += output.num_preemptions
            on_end(output)
    return Throughput(
        num_requests=len(prompts),
        num_prompt_tokens=sum(map(len, prompts)),
        num_answer_tokens=num_answer,
        num_preemptions=num_preemptions,
        seconds=clock() - begin_s,
        split=engine.step_split.since(before),
    )


def watch_gpu(
    engine: Engine,
    prompts: Sequence[list[int]],
    num_steps: int,
    *,
    output_lens: Sequence[int] | None = None,
) -> GpuSplit:
    """What a GPU does in num_steps steps: decodes, after the prompts and a few steps more; or,
    where the pool is too small for all, the steps from the first swap or the first end on.

    Args:
        output_lens: tokens of each answer; None: more than so many steps need.
    """
    lens = output_lens or [num_steps + 64] * len(prompts)
    for i, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0.6, max_tokens=lens[i], ignore_eos=True)
        engine.add_request(f"watched {i}", prompt, params)
    before, size = engine.statistics(), engine.cache_view().snapshot.block_size
    at_ends = sum(-(-(len(prompt) + n) // size) for prompt, n in zip(prompts, lens, strict=True))
    if at_ends > before.num_blocks:
        is_first = False
        while not is_first:
            has_ended = bool(engine.step().finished)
            is_first = has_ended or engine.statistics().num_swapped_out > before.num_swapped_out
    else:
        while engine.num_waiting:
            engine.step()
        for _ in range(8):
            engine.step()

    def run() -> None:
        for _ in range(num_steps):
            engine.step()

    activities = record(run)
    for i in range(len(prompts)):
        engine.abort(f"watched {i}")
    while engine.has_work:
        engine.step()
    return split_of(activities, num_steps)
