"""Tokens per second of the engine on one GPU: real model shapes with random weights, and mixes of
requests that are stated here down to the seed, so that another engine can run the same ones.

End-of-sequence tokens are ignored, temperature is 0.6, the prefix cache is emptied between runs.
The median of the runs counts. Floor of a decode step: all weights and all K/V that it reads, once,
at the card's read rate. --transformers: its `generate` beside it in the same process, in static
batches of 32 requests, on bs32 or the mixes that are named.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import rows
import static_batching
from pagedkv import LLM, SamplingParams
from pagedkv.engine.benchmarking import watch_gpu
from pagedkv.engine.gpu_timeline import record, split_of

SHAPES: dict[str, dict[str, object]] = {
    "Llama-3.1-8B": {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "torch_dtype": "bfloat16",
    },
    "Qwen3-0.6B": {
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    },
}

# 8,448 rows are 33 tiles of 256 and 44 of 192: products of these shapes then take whole rounds of
# the 132 multiprocessors.
STEP_TOKENS = 8448
OPTIONS: dict[str, object] = {
    "load_format": "dummy",
    "max_model_len": 32768,
    "max_num_batched_tokens": STEP_TOKENS,
}

# Weights that take longer to read than a few hundred rows take to multiply: prompts in no hurry are
# multiplied beside decodes, up to as many rows as have a product with the gate inside.
OPTIONS_OF: dict[str, dict[str, object]] = {"Llama-3.1-8B": {"max_num_paced_tokens": 256}}

# A pool of 80,000 tokens for requests that have 276,000 at their ends. It is to be full soon, so
# more of a step's tokens are of prompts.
PRESSURE: dict[str, object] = {
    "num_gpu_blocks_override": 5000,
    "max_model_len": 4096,
    "max_num_paced_tokens": 384,
}
PRESSURE_AT_LEAST = 8500  # tok/s out, Llama-3.1-8B, the automatic choice

Requests = tuple[list[list[int]], list[int]]  # prompts, output lengths


@dataclass(frozen=True, slots=True)
class Mix:
    """Requests of one measurement. unit: what counts, ms for each output token of a single request,
    or output or prompt tokens in a second. at_least: for each shape.
    """

    requests: Callable[[], Requests]
    unit: str
    at_least: dict[str, float]


def _single(count: int) -> Requests:
    source = random.Random(1)
    prompts = [[source.randint(0, 10000) for _ in range(512)] for _ in range(count)]
    return prompts, [256] * count


def _mixed() -> Requests:
    source = random.Random(0)
    prompts = []
    for _ in range(256):
        length = source.randint(100, 1024)
        prompts.append([source.randint(0, 10000) for _ in range(length)])
    return prompts, [source.randint(100, 1024) for _ in range(256)]


def _prefix() -> Requests:
    source = random.Random(3)
    prefix = [source.randint(0, 10000) for _ in range(2048)]
    own = [[source.randint(0, 10000) for _ in range(64)] for _ in range(256)]
    return [prefix + one for one in own], [64] * 256


def _prefill() -> Requests:
    source = random.Random(2)
    return [[source.randint(0, 10000) for _ in range(4000)] for _ in range(64)], [1] * 64


MIXES = {
    "bs1": Mix(lambda: _single(1), "ms/token", {"Llama-3.1-8B": 4.0, "Qwen3-0.6B": 1.0}),
    "bs32": Mix(lambda: _single(32), "tok/s out", {"Llama-3.1-8B": 5000}),
    "mixed256": Mix(_mixed, "tok/s out", {"Llama-3.1-8B": 11000, "Qwen3-0.6B": 30000}),
    "prefix2048": Mix(_prefix, "tok/s out", {"Llama-3.1-8B": 16000}),
    "prefill64x4000": Mix(_prefill, "tok/s in", {"Llama-3.1-8B": 42000}),
}


def run(llm: LLM, requests: Requests) -> float:
    """Seconds that the requests take, all given at once."""
    prompts, lens = requests
    params = [SamplingParams(temperature=0.6, max_tokens=n, ignore_eos=True) for n in lens]
    llm.reset_prefix_cache()
    begin = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    assert [len(one.outputs[0].token_ids) for one in outputs] == lens, "a request was cut short"
    return seconds


def measure(llm: LLM, shape: str, name: str, num_runs: int, *, has_limit: bool = True) -> rows.Row:
    """has_limit: whether the options are those that the limits are set for."""
    mix = MIXES[name]
    prompts, lens = mix.requests()
    run(llm, (prompts, [min(n, 8) for n in lens]))  # warm-up
    seconds = statistics.median(run(llm, (prompts, lens)) for _ in range(num_runs))
    limit = mix.at_least.get(shape) if has_limit else None
    if mix.unit == "ms/token":
        value = seconds * 1e3 / sum(lens)
        holds = limit is None or value <= limit
    else:
        value = (sum(map(len, prompts)) if mix.unit == "tok/s in" else sum(lens)) / seconds
        holds = limit is None or value >= limit
    sign = "<=" if mix.unit == "ms/token" else ">="
    return rows.Row(
        name=shape,
        shape=name,
        us=seconds * 1e6,
        rate=f"{value:.4g} {mix.unit}",
        limit="" if limit is None else f"{sign} {limit:g}",
        holds=holds,
    )


def collect() -> None:
    """Give back what nobody holds any more."""
    gc.collect()
    torch.cuda.empty_cache()


STATIC_BATCH = 32


def beside_transformers(shape: str, folder: str, mixes: Sequence[str]) -> list[rows.Row]:
    """The mixes here, then in static batches of transformers, whose steps take long.
    Both sides draw at temperature 0.6, each after a warm-up; one run.
    """
    llm = LLM(folder, **{**OPTIONS, **OPTIONS_OF.get(shape, {})})
    took = []
    for name in mixes:
        prompts, lens = MIXES[name].requests()
        run(llm, (prompts, [min(n, 8) for n in lens]))
        took.append(run(llm, (prompts, lens)))
    del llm
    collect()
    model = static_batching.transformers_model(SHAPES[shape], "cuda")
    made = []
    for name, ours in zip(mixes, took, strict=True):
        prompts, lens = MIXES[name].requests()
        few = slice(STATIC_BATCH)
        warm_lens = [min(n, 4) for n in lens[few]]
        static_batching.generate_seconds(model, prompts[few], warm_lens, STATIC_BATCH)
        theirs = static_batching.generate_seconds(model, prompts, lens, STATIC_BATCH)
        is_in = MIXES[name].unit == "tok/s in"
        total, way = (sum(map(len, prompts)), "in") if is_in else (sum(lens), "out")
        made.append(
            rows.Row(
                name=shape,
                shape=f"{name}, beside transformers' generate",
                us=ours * 1e6,
                rate=f"{total / ours:.4g} tok/s {way} (transformers {total / theirs:.4g})",
                baseline=theirs / ours,
            )
        )
        print(made[-1], flush=True)
    return made


def under_pressure(
    folder: str, modes: Sequence[str], num_runs: int, num_watched: int, notes: list[str]
) -> list[rows.Row]:
    """mixed256 where victims have to give up their blocks: by what is cheaper, all swapped, all
    computed again. No request is lost, or run() fails. num_watched: steps from the first swap on
    in which it is looked at what of the swaps lies beside kernels; 0: it is not.
    """
    prompts, lens = MIXES["mixed256"].requests()
    made = []
    for mode in modes:
        swap_space = 0 if mode == "recompute" else 8
        options = {**OPTIONS, **OPTIONS_OF["Llama-3.1-8B"], **PRESSURE}
        llm = LLM(folder, **{**options, "preemption_mode": mode, "swap_space": swap_space})
        run(llm, (prompts, [min(n, 8) for n in lens]))  # warm-up
        before = llm.engine.step_split
        seconds = statistics.median(run(llm, (prompts, lens)) for _ in range(num_runs))
        split = llm.engine.step_split.since(before)
        rate = sum(lens) / seconds
        has_limit = mode == "auto"
        made.append(
            rows.Row(
                name="Llama-3.1-8B",
                shape=f"mixed256, 5,000 blocks, {mode}",
                us=seconds * 1e6,
                rate=f"{rate:.4g} tok/s out",
                limit=f">= {PRESSURE_AT_LEAST:g}" if has_limit else "",
                holds=not has_limit or rate >= PRESSURE_AT_LEAST,
            )
        )
        print(made[-1], flush=True)
        each = 1e3 / split.num_steps
        notes.append(
            f"{mode}: {split.num_steps / num_runs:.0f} steps of "
            f"{seconds * num_runs * each:.2f} ms: schedule {split.schedule_s * each:.2f}, launch "
            f"{split.launch_s * each:.2f}, wait {split.wait_s * each:.2f}, update "
            f"{split.update_s * each:.2f}"
        )
        if num_watched and swap_space:
            watched = watch_gpu(llm.engine, prompts, num_watched, output_lens=lens)
            for one in watched.swaps:
                notes.append(
                    f"{mode}, {num_watched} steps from the first swap on: swaps {one.way} "
                    f"{one.busy_s * 1e3:.1f} ms in {one.num_copies} copies, "
                    f"{100 * one.beside_s / one.busy_s:.0f} % of it beside kernels"
                )
            notes.append(
                f"{mode}: GPU busy {watched.busy_s * 1e3:.0f} ms, gaps {watched.gap_s * 1e3:.0f}"
            )
        del llm
        collect()
    return made


def profile(llm: LLM, name: str, num_steps: int, step_tokens: int) -> str:
    """Where the time of decode steps after the prompts of a mix goes, or of steps of prompts if it
    has nothing else: parts of the CPU's work, how long the GPU was busy and how long not, and its
    kernels. The whole is taken without a profiler, and so is what the GPU is not busy of it.
    """
    prompts, lens = MIXES[name].requests()
    has_decodes = max(lens) > 1
    engine = llm.engine
    if not has_decodes:
        llm.reset_prefix_cache()
    params = SamplingParams(temperature=0.6, max_tokens=1000 if has_decodes else 1, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        engine.add_request(f"profiled {i}", prompt, params)
    num_first = 8
    if has_decodes:
        while engine.num_waiting:
            engine.step()
    else:  # the steps that the prompts fill are all there are
        num_first = 2
        num_full = sum(map(len, prompts)) // step_tokens
        num_steps = min(num_steps, (num_full - num_first) // 2)

    def steps(count: int) -> None:
        for _ in range(count):
            engine.step()
        torch.cuda.synchronize()

    steps(num_first)
    before, begin = engine.step_split, time.perf_counter()
    steps(num_steps)
    took_us = (time.perf_counter() - begin) * 1e6 / num_steps
    cpu, each = engine.step_split.since(before), 1e6 / num_steps
    gpu = split_of(record(lambda: steps(num_steps)), num_steps)
    for i in range(len(prompts)):
        engine.abort(f"profiled {i}")
    busy_us = gpu.busy_s * each
    lines = [
        f"{name}: {took_us:.0f} us a step: the GPU busy {busy_us:.0f}, gaps {took_us - busy_us:.0f}"
        f"; the CPU schedules {cpu.schedule_s * each:.0f}, launches {cpu.launch_s * each:.0f}, "
        f"waits {cpu.wait_s * each:.0f}, keeps books {cpu.update_s * each:.0f}"
    ]
    for kernel, seconds, count in gpu.kernels[:24]:
        lines.append(f"{seconds * each:9.1f} us {count / num_steps:6.1f} x {kernel[:96]}")
    return "\n".join(lines)


def measure_all(
    folder: str, shape: str, mixes: Sequence[str], options: argparse.Namespace, notes: list[str]
) -> list[rows.Row]:
    """The mixes one after the other in one engine, which notes says how it came to be."""
    begin = time.perf_counter()
    chosen = {**OPTIONS_OF.get(shape, {}), **options.options}
    step_tokens = chosen.get("max_num_batched_tokens", STEP_TOKENS)
    llm = LLM(folder, **{**OPTIONS, **chosen})
    if chosen:
        notes.append(f"{shape}: options {json.dumps(chosen)}")
    num_blocks = llm.engine.statistics().num_blocks
    ready_s = time.perf_counter() - begin
    notes.append(f"{shape}: {ready_s:.1f} s from start to ready, with {num_blocks} blocks")
    made = []
    for name in mixes:
        made.append(measure(llm, shape, name, options.runs, has_limit=not options.options))
        print(made[-1], flush=True)
        if options.profile:
            notes.append(profile(llm, name, options.profile, step_tokens))
    del llm
    collect()
    return made


def main() -> int:
    arguments = rows.parser(__doc__.splitlines()[0])
    arguments.add_argument("--shape", choices=SHAPES, action="append")
    arguments.add_argument("--mix", choices=[*MIXES, "none"], action="append")
    arguments.add_argument("--runs", type=int, default=3)
    arguments.add_argument("--profile", type=int, default=0, help="steps to look into")
    arguments.add_argument(
        "--pressure",
        choices=["auto", "swap", "recompute"],
        nargs="*",
        help="and Llama in 5,000 blocks, with these ways to preempt or all",
    )
    arguments.add_argument(
        "--transformers",
        choices=[*MIXES],
        nargs="*",
        help="and its generate beside, on these mixes or bs32",
    )
    arguments.add_argument("--options", type=json.loads, default={}, help="of the engine, as JSON")
    options = arguments.parse_args()
    made: list[rows.Row] = []
    notes: list[str] = []
    mixes = [name for name in options.mix or MIXES if name != "none"]
    for shape in options.shape or SHAPES:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(SHAPES[shape]))
            if mixes:
                made += measure_all(folder, shape, mixes, options, notes)
            if options.transformers is not None:
                made += beside_transformers(shape, folder, options.transformers or ["bs32"])
    if options.pressure is not None:
        modes = options.pressure or ["auto", "swap", "recompute"]
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(SHAPES["Llama-3.1-8B"]))
            made += under_pressure(folder, modes, options.runs, options.profile, notes)
    return rows.report("throughput", made, save=options.save, notes=notes)


if __name__ == "__main__":
    sys.exit(main())
