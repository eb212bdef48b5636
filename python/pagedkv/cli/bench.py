"""`pagedkv bench`: tokens per second of requests that are all there at once. Beside it,
`pagedkv bench serve` of bench_serve.py.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from pagedkv.cli import options
from pagedkv.cli.bench_serve import bench_serve
from pagedkv.cli.progress import progress

if TYPE_CHECKING:
    from pagedkv.engine.benchmarking import Throughput
    from pagedkv.engine.gpu_timeline import GpuSplit

_NUM_KERNELS = 16  # shown


class _ThroughputUnlessNamed(TyperGroup):
    """`pagedkv bench MODEL` is `pagedkv bench throughput MODEL`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] != "--help" and args[0] not in self.commands:
            args = ["throughput", *args]
        return super().parse_args(ctx, args)


bench = typer.Typer(
    name="bench",
    cls=_ThroughputUnlessNamed,
    help="Measure a model here (throughput, also without its name), or a server (serve).",
    epilog="Example: pagedkv bench smollm2 --num-prompts 8; pagedkv bench serve --request-rate 4",
    no_args_is_help=True,
)
bench.command("serve")(bench_serve)


def throughput(
    model: options.Model,
    num_prompts: Annotated[int, typer.Option(help="Requests.", min=1)] = 16,
    input_len: Annotated[int, typer.Option(help="Tokens of each prompt.", min=1)] = 128,
    output_len: Annotated[int, typer.Option(help="Tokens of each answer.", min=1)] = 64,
    temperature: options.Temperature = 0.0,
    seed: Annotated[int, typer.Option(help="Of the prompts' random tokens.")] = 0,
    load_format: Annotated[
        str, typer.Option(help="auto, or dummy: random weights of a config.json's shape.")
    ] = "auto",
    profile: Annotated[
        int,
        typer.Option(
            metavar="STEPS",
            min=0,
            help="Say where the time of steps goes: on a GPU what it does in so many steps.",
        ),
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    swap_space: options.SwapSpace = 0.0,
    preemption_mode: options.PreemptionMode = "auto",
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    max_model_len: options.MaxModelLen = None,
    block_size: options.BlockSize = 16,
    num_blocks: options.NumBlocks = None,
    cache_bytes: options.CacheBytes = None,
    gpu_memory_utilization: options.GpuMemoryUtilization = 0.9,
    kv_cache_dtype: options.KvCacheDtype = "auto",
) -> None:
    """Measure how many tokens per second a model makes here. All requests come at once, and end
    tokens are ignored; a first, shorter run is not counted.

    Example: pagedkv bench smollm2 --num-prompts 8 --profile 16
    """
    from pagedkv.engine.benchmarking import random_prompts, run_offline, watch_gpu

    engine = options.load_engine(
        model,
        load_format=load_format,
        device=device,
        dtype=dtype,
        max_model_len=max_model_len,
        block_size=block_size,
        num_gpu_blocks_override=num_blocks,
        kv_cache_memory_bytes=cache_bytes,
        gpu_memory_utilization=gpu_memory_utilization,
        kv_cache_dtype=kv_cache_dtype,
        swap_space=swap_space,
        preemption_mode=preemption_mode,
    )
    prompts = random_prompts(num_prompts, input_len, engine.vocab_size, seed=seed)
    run_offline(engine, prompts, min(output_len, 4), temperature=temperature)
    with progress("answers", num_prompts) as count:
        measured = run_offline(
            engine, prompts, output_len, temperature=temperature, on_end=lambda output: count()
        )
    watched = None
    if profile and engine.device.type == "cuda":
        watched = watch_gpu(engine, prompts, profile)
    if as_json:
        print(json.dumps(_as_dict(measured, watched)))
        return
    _print(measured)
    if profile:
        _print_split(measured)
    if watched is not None:
        print_gpu(watched)


bench.command("throughput")(throughput)


def _as_dict(measured: Throughput, watched: GpuSplit | None) -> dict[str, Any]:
    found = dataclasses.asdict(measured)
    found["output_tokens_per_s"] = measured.num_answer_tokens / measured.seconds
    found["gpu"] = None if watched is None else dataclasses.asdict(watched)
    return found


def _print(measured: Throughput) -> None:
    seconds, num_answer = measured.seconds, measured.num_answer_tokens
    num_all = num_answer + measured.num_prompt_tokens
    print(
        f"{measured.num_requests} requests, {measured.num_prompt_tokens} tokens of prompts and "
        f"{num_answer} of answers in {seconds:.3f} s, {measured.num_preemptions} preemptions\n"
        f"{num_answer / seconds:.1f} tok/s out, {num_all / seconds:.1f} tok/s in all, "
        f"{measured.num_requests / seconds:.2f} requests/s"
    )


def _print_split(measured: Throughput) -> None:
    split = measured.split
    each = 1e3 / split.num_steps
    rest = max(0.0, measured.seconds - split.total_s)
    print(
        f"{split.num_steps} steps of {measured.seconds * each:.3f} ms: "
        f"schedule {split.schedule_s * each:.3f}, launch {split.launch_s * each:.3f}, "
        f"wait {split.wait_s * each:.3f}, update {split.update_s * each:.3f}, "
        f"else {rest * each:.3f} ms"
    )


def print_gpu(watched: GpuSplit) -> None:
    """How long it was busy and not, what of its swaps was beside kernels, and its kernels."""
    each = 1e6 / watched.num_steps
    print(
        f"GPU, {watched.num_steps} steps: busy {watched.busy_s * each:.0f} us, "
        f"gaps {watched.gap_s * each:.0f} us a step"
    )
    for swap in watched.swaps:
        print(
            f"swaps {swap.way}: {swap.busy_s * each:.0f} us a step in {swap.num_copies} copies, "
            f"{100 * swap.beside_s / swap.busy_s:.0f} % of it beside kernels"
        )
    for name, seconds, count in watched.kernels[:_NUM_KERNELS]:
        print(f"{seconds * each:9.1f} us {count / watched.num_steps:6.1f} x {name[:90]}")
    sys.stdout.flush()
