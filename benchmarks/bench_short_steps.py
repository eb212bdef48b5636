"""Short steps with prompts on one GPU, as CUDA graphs and kernel by kernel: the time to the first
token of one prompt alone, and a step of 64 decodes and a prompt of 128 tokens, steps following each
other. Beside them steps of decodes alone.

Two engines of one process, same shape and random weights, take turns; medians. A prompt of n tokens
is padded to the next size that is captured, so the last of each size shows what padding costs.

--captures: instead, what a graph costs that is captured when a step first asks for it, in time and
in memory of the card. --decodes: instead, steps of decodes alone: as graphs and with enforce_eager,
and padded to the next size that is captured, beside a graph of exactly their rows.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch

import rows
from bench_throughput import SHAPES
from pagedkv import SamplingParams
from pagedkv.config import EngineConfig
from pagedkv.engine import Engine
from pagedkv.engine.input_builder import PaddedSize
from pagedkv.engine.step_graphs import GraphKey, decode_size
from pagedkv.records import empty_step

PROMPT_LENS = (16, 20, 100, 128, 129, 200, 256)
NUM_TIMES = 15
NUM_BESIDE, BESIDE_LEN = 64, 128
DECODES = (1, 32, 256)
PADDED_DECODES = (3, 9, 33, 65, 129, 249)  # as far below the next size as rows can be
OPTIONS: dict[str, object] = {
    "load_format": "dummy",
    "max_model_len": 4096,
    "num_gpu_blocks_override": 4000,
    "enable_prefix_caching": False,
}


def engine_of(shape: str, **options: object) -> Engine:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPES[shape]))
        return Engine.from_config(EngineConfig.from_options(folder, **OPTIONS | options))


class Prompts:
    """Requests of random ids, each with a name of its own."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._source = random.Random(0)
        self._number = 0

    def add(self, length: int, max_tokens: int) -> str:
        self._number += 1
        prompt = [self._source.randrange(10_000) for _ in range(length)]
        params = SamplingParams(temperature=0.6, max_tokens=max_tokens, ignore_eos=True)
        self._engine.add_request(str(self._number), prompt, params)
        return str(self._number)


def finish(engine: Engine) -> None:
    while engine.has_work:
        engine.step()
    torch.cuda.synchronize()


def first_token_us(engine: Engine, prompts: Prompts, length: int) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    prompts.add(length, 1)
    finish(engine)
    return (time.perf_counter() - begin) * 1e6


def step_us(engine: Engine, prompts: Prompts, num_decodes: int, prompt_len: int) -> float:
    """Of 30 steps, each with decodes and, where prompt_len is not 0, a prompt."""
    num_steps = 30
    for _ in range(num_decodes):
        prompts.add(100, num_steps + 20)
    begin = 0.0
    for number in range(num_steps + 12):
        if number == 12:
            begin = time.perf_counter()
        if prompt_len and number > 4:
            prompts.add(prompt_len, 1)
        engine.step()
    us = (time.perf_counter() - begin) * 1e6 / num_steps
    finish(engine)
    return us


def measure(shape: str, sizes: tuple[int, ...]) -> list[rows.Row]:
    """sizes: max_cudagraph_capture_size of each engine; the last is the baseline."""
    engines = [engine_of(shape, max_cudagraph_capture_size=size) for size in sizes]
    prompts = [Prompts(engine) for engine in engines]
    parts: dict[str, Callable[[Engine, Prompts], float]] = {
        f"first token of {length}": lambda engine, made, n=length: first_token_us(engine, made, n)
        for length in PROMPT_LENS
    }
    beside = f"step, {NUM_BESIDE} decodes and {BESIDE_LEN} tokens of a prompt"
    parts[beside] = lambda engine, made: step_us(engine, made, NUM_BESIDE, BESIDE_LEN)
    parts[f"step, {NUM_BESIDE} decodes"] = lambda engine, made: step_us(engine, made, NUM_BESIDE, 0)
    found: list[rows.Row] = []
    for name, part in parts.items():
        num_warm, num_times = (3, NUM_TIMES) if name.startswith("first") else (1, 1)
        times: list[list[float]] = [[] for _ in engines]
        for number in range(num_warm + num_times):
            for i, engine in enumerate(engines):
                us = part(engine, prompts[i])
                if number >= num_warm:
                    times[i].append(us)
        medians = [statistics.median(one) for one in times]
        for size, us in zip(sizes, medians, strict=True):
            how = f"captured up to {size} tokens" if size else "kernel by kernel"
            found.append(rows.Row(name, f"{shape}, {how}", us, baseline=medians[-1] / us))
    del engines, prompts
    gc.collect()
    torch.cuda.empty_cache()
    return found


def in_turn_us(ways: list[Callable[[], object]]) -> list[float]:
    """Of a step of each. Their order turns round each time, since contexts grow."""
    num_steps, num_first, num_times = 20, 4, 4
    took = [0.0] * len(ways)
    for number in range(num_times):
        for i in sorted(range(len(ways)), reverse=number % 2 == 1):
            for _ in range(num_first):
                ways[i]()
            begin = time.perf_counter()
            for _ in range(num_steps):
                ways[i]()
            took[i] += time.perf_counter() - begin
    return [one * 1e6 / (num_steps * num_times) for one in took]


@contextlib.contextmanager
def decodes(engine: Engine, prompts: Prompts, num_rows: int) -> Iterator[None]:
    """So many are all that the engine's steps have."""
    names = [prompts.add(100, 400) for _ in range(num_rows)]
    while engine.num_waiting:
        engine.step()
    yield
    for name in names:
        engine.abort(name)
    finish(engine)


def measure_decodes(shape: str) -> list[rows.Row]:
    engine, eager = (
        engine_of(shape, enforce_eager=is_eager, num_gpu_blocks_override=6000)
        for is_eager in (False, True)
    )
    prompts, eager_prompts = Prompts(engine), Prompts(eager)
    graphs = engine._runner._graphs
    assert graphs is not None
    common = graphs.sizes.decodes
    found: list[rows.Row] = []

    def padded_to(sizes: list[int]) -> None:
        graphs.sizes.decodes = sizes
        engine.step()

    def note(num_rows: int, hows: tuple[str, str], took: list[float]) -> None:
        for how, us in zip(hows, took, strict=True):
            name = f"{num_rows} decodes"
            found.append(rows.Row(name, f"{shape}, {how}", us, baseline=took[1] / us))
            print(found[-1], flush=True)

    for num_rows in DECODES:
        with decodes(engine, prompts, num_rows), decodes(eager, eager_prompts, num_rows):
            took = in_turn_us([engine.step, eager.step])
        note(num_rows, ("a graph", "enforce_eager"), took)
    for num_rows in PADDED_DECODES:
        exact = sorted({*common, num_rows})
        with decodes(engine, prompts, num_rows):
            took = in_turn_us([partial(padded_to, common), partial(padded_to, exact)])
        size = next(one for one in common if one > num_rows)
        note(num_rows, (f"padded to {size}", "a graph of as many"), took)
    return found


def capture_us(engine: Engine, size: PaddedSize, *, chooses: bool) -> float:
    """Of a graph as a step of this size would ask for it."""
    runner = engine._runner
    graphs = runner._graphs
    assert graphs is not None
    ids = np.empty((engine.max_num_seqs, 0), dtype=np.int32)
    with torch.inference_mode(), torch.cuda.stream(runner._stream):
        tensors = runner._inputs.build(empty_step(), ids, runner._params, padded=size)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        graph, _ = graphs.graph_for(tensors, chooses=chooses)
        us = (time.perf_counter() - begin) * 1e6
        graph.replay()
    torch.cuda.synchronize()
    return us


def measure_captures(shape: str) -> list[rows.Row]:
    """Every graph that is not captured at start but those of shared prefixes."""
    engine = engine_of(shape)
    graphs = engine._runner._graphs
    assert graphs is not None
    sizes, at_start = graphs.sizes, set(graphs._graphs)
    decodes = [decode_size(size) for size in sizes.decodes]
    prompts = [PaddedSize(tokens, most, tokens) for tokens in sizes.tokens for most in sizes.rows]
    kinds = {
        "decodes, to their logits": (decodes, False),
        "with prompts, to their tokens": (prompts, True),
        "with prompts, to their logits": (prompts, False),
    }
    found = []
    for name, (wanted, chooses) in kinds.items():
        free, reserved = torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved()
        wanted = [size for size in wanted if GraphKey(size, chooses, 0) not in at_start]
        times = [capture_us(engine, size, chooses=chooses) for size in wanted]
        taken = (free - torch.cuda.mem_get_info()[0]) / 2**20
        grown = (torch.cuda.memory_reserved() - reserved) / 2**20
        rate = (
            f"slowest {max(times) / 1e3:.1f} ms; {len(times)} take {taken:.0f} MiB, "
            f"{grown:.0f} of it tensors"
        )
        found.append(rows.Row(name, shape, statistics.median(times), rate))
    return found


def main() -> int:
    parser = rows.parser(__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, action="append")
    parser.add_argument("--captures", action="store_true", help="what it costs to capture graphs")
    parser.add_argument("--decodes", action="store_true", help="decodes and padding")
    options: argparse.Namespace = parser.parse_args()
    kinds: list[tuple[str, Callable[[str], list[rows.Row]]]] = []
    if options.captures:
        kinds.append(("graph-captures", measure_captures))
    if options.decodes:
        kinds.append(("decode-steps", measure_decodes))
    num_missed = 0
    for name, part in kinds or [("short-steps", lambda shape: measure(shape, (256, 0)))]:
        made = []
        for shape in options.shape or SHAPES:
            made += part(shape)
            gc.collect()
            torch.cuda.empty_cache()
        num_missed += rows.report(name, made, save=options.save)
    return num_missed


if __name__ == "__main__":
    sys.exit(main())
