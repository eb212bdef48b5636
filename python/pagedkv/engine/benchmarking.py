"""How many tokens per second an engine makes of requests that are all there at once, and where the
time of its steps goes. For measurements only.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from pagedkv.engine.engine import Engine
from pagedkv.engine.step_times import StepSplit
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


@dataclass(frozen=True, slots=True)
class GpuSplit:
    """Seconds of num_steps steps together. busy_s: some kernel or copy runs; gap_s: none does.
    kernels: (name, seconds, number of calls), the longest first.
    """

    num_steps: int
    busy_s: float
    gap_s: float
    kernels: tuple[tuple[str, float, int], ...]


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
) -> Throughput:
    """Answer all prompts with output_len tokens each, end tokens ignored; the prefix cache is
    emptied before.

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
    return Throughput(
        num_requests=len(prompts),
        num_prompt_tokens=sum(map(len, prompts)),
        num_answer_tokens=num_answer,
        num_preemptions=num_preemptions,
        seconds=clock() - begin_s,
        split=engine.step_split.since(before),
    )


def watch_gpu(engine: Engine, prompts: Sequence[list[int]], num_steps: int) -> GpuSplit:
    """What a GPU does in num_steps decode steps, after the prompts and a few steps more. Kernels
    and copies are seen by CUPTI; looking costs some time itself.
    """
    params = SamplingParams(temperature=0.6, max_tokens=num_steps + 64, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        engine.add_request(f"watched {i}", prompt, params)
    while engine.num_waiting:
        engine.step()
    for _ in range(8):
        engine.step()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True
    ) as watched:
        for _ in range(num_steps):
            engine.step()
        torch.cuda.synchronize()
    for i in range(len(prompts)):
        engine.abort(f"watched {i}")
    intervals, by_name = [], dict[str, list[float]]()
    for event in watched.events() or ():
        if event.device_type.name == "CUDA":
            intervals.append((event.time_range.start, event.time_range.end))
            by_name.setdefault(event.name, []).append(event.time_range.elapsed_us())
    busy_us, gap_us = busy_and_gaps(intervals)
    kernels = sorted(
        ((name, sum(times) / 1e6, len(times)) for name, times in by_name.items()),
        key=lambda one: -one[1],
    )
    return GpuSplit(num_steps, busy_us / 1e6, gap_us / 1e6, tuple(kernels))


def busy_and_gaps(intervals: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """How long at least one of the intervals lasts, and how long, between the first's begin and the
    last's end, none does.

    Example: busy_and_gaps([(0, 2), (1, 3), (5, 6)]) -> (4, 2)
    """
    busy = gaps = 0.0
    end: float | None = None
    for begin, stop in sorted(intervals):
        if end is not None and begin > end:
            gaps += begin - end
        start = begin if end is None else max(begin, end)
        busy += max(0.0, stop - start)
        end = stop if end is None else max(end, stop)
    return busy, gaps
