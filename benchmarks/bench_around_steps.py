"""What a GPU waits for around its steps: before the first one, behind the last one and between two.
Mixes of bench_throughput.py, Llama-3.1-8B's options, without a GPU: the engine is the real one, up
to the copy that a step sends; its model computes nothing, and tokens are made up.

Time is this process's CPU time, so other processes count little. The GPU beside it is modelled: a
step begins when it is launched and the one before it has ended, and takes what STEP_MS says. The
least of the runs counts, for each part.
"""

from __future__ import annotations

import gc
import sys
import time
import unittest.mock
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import rows
from bench_throughput import MIXES, OPTIONS, OPTIONS_OF, Requests
from pagedkv import LLM, SamplingParams
from pagedkv.engine.loaded_model import LoadedModel
from pagedkv.engine.model_runner import Launched
from pagedkv.kv_cache import CacheShape
from pagedkv.records import ScheduledStep

SHAPE = "Llama-3.1-8B"
VOCAB = 128256
NUM_BLOCKS = 27000
# By tokens: products of the layers (2026-11-30-throughput-attempts.md), from 2,048 on at the clock
# of long prompts. A row more costs about 12 us of attention, and a step 0.5 ms of all else.
STEP_MS = {1: 3.7, 64: 4.1, 128: 4.3, 256: 5.7, 512: 9.5, 1024: 18.3, 2048: 40.0, 16384: 360.0}
ROW_MS, REST_MS = 0.012, 0.5
LIMIT_US = 1000.0  # between all steps of a mix


def step_s(step: ScheduledStep) -> float:
    products = np.interp(step.num_tokens, list(STEP_MS), list(STEP_MS.values()))
    return float(products + ROW_MS * step.slots.size + REST_MS) * 1e-3


class Clock:
    """CPU seconds of this process, without what stands for a GPU's work, with what is waited."""

    def __init__(self) -> None:
        self._ahead_s = 0.0

    def __call__(self) -> float:
        return time.process_time() + self._ahead_s

    def back_to(self, moment_s: float) -> None:
        self._ahead_s -= self() - moment_s

    def wait_until(self, moment_s: float) -> None:
        self._ahead_s += max(0.0, moment_s - self())


@dataclass
class Gpu:
    """idle_s: before each of the steps so far; free_s: when the last one ends."""

    clock: Clock
    idle_s: list[float]
    free_s: float = 0.0

    def run(self, step: ScheduledStep) -> float:
        """When it ends."""
        begin_s = max(self.clock(), self.free_s)
        self.idle_s.append(begin_s - self.free_s)
        self.free_s = begin_s + step_s(step)
        return self.free_s


@dataclass
class Done:
    """Stands for the event behind a step."""

    clock: Clock
    end_s: float

    def synchronize(self) -> None:
        self.clock.wait_until(self.end_s)


def without_model() -> tuple[LLM, Gpu]:
    """An engine whose steps end when the modelled GPU says."""
    options: dict[str, Any] = {**OPTIONS, **OPTIONS_OF[SHAPE], "async_scheduling": True}
    del options["load_format"]
    loaded = LoadedModel(
        model=None,  # type: ignore[arg-type]
        tokenizer=None,
        eos_token_ids=frozenset([VOCAB - 1]),
        cache_shape=CacheShape(1, 1, 1, torch.float32),
        vocab_size=VOCAB,
        sampled_vocab_size=VOCAB,
        max_model_len=options["max_model_len"],
    )
    with unittest.mock.patch("pagedkv.engine.engine.load", return_value=loaded):
        llm = LLM("none", num_gpu_blocks_override=NUM_BLOCKS, swap_space=0, **options)
    clock = Clock()
    gpu = Gpu(clock, [])
    runner = llm.engine._runner

    def compute(step: ScheduledStep, token_ids: NDArray[np.int32], graphs: object) -> Launched:
        runner._wanted(step)
        tensors = runner._inputs.build(step, token_ids, runner._params)
        now_s = clock()
        end_s = gpu.run(step)
        runner._inputs.advance(tensors)
        clock.back_to(now_s)
        made = torch.from_numpy(step.seq_ids[step.sample_rows] % VOCAB)
        done: Any = Done(clock, end_s)
        return Launched(made, None, None, done, None)

    runner._compute = compute  # type: ignore[assignment, method-assign]
    return llm, gpu


def run(llm: LLM, gpu: Gpu, requests: Requests) -> list[float]:
    """Seconds in which the GPU waits before the first step, behind the last, between others, and
    all that the requests take.
    """
    prompts, lens = requests
    params = [SamplingParams(temperature=0.6, max_tokens=n, ignore_eos=True) for n in lens]
    llm.reset_prefix_cache()
    gc.collect()
    gpu.idle_s.clear()
    begin_s = gpu.free_s = gpu.clock()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    end_s = gpu.clock()
    assert [len(one.outputs[0].token_ids) for one in outputs] == lens
    first, *others = gpu.idle_s
    return [first, end_s - gpu.free_s, sum(others), end_s - begin_s]


def main() -> int:
    arguments = rows.parser(__doc__.splitlines()[0])
    arguments.add_argument("--mix", choices=MIXES, action="append")
    arguments.add_argument("--runs", type=int, default=7)
    options = arguments.parse_args()
    torch.set_num_threads(1)
    llm, gpu = without_model()
    made = []
    for mix in options.mix or ["prefix2048", "prefill64x4000", "bs32"]:
        prompts, lens = MIXES[mix].requests()
        run(llm, gpu, (prompts, [min(n, 8) for n in lens]))  # warm-up
        runs = [run(llm, gpu, (prompts, lens)) for _ in range(options.runs)]
        parts = ("before the first step", "behind the last step", "between steps", "in all")
        for part, seconds in zip(parts, zip(*runs, strict=True), strict=True):
            us = min(seconds) * 1e6
            made.append(
                rows.Row(
                    name=mix,
                    shape=f"{part}, {len(gpu.idle_s)} steps",
                    us=us,
                    limit=f"<= {LIMIT_US:g} us" if part == parts[2] else "",
                    holds=part != parts[2] or us <= LIMIT_US,
                )
            )
    return rows.report("around-steps", made, save=options.save)


if __name__ == "__main__":
    sys.exit(main())
