"""`pagedkv plan`: what a model takes of a GPU and what fits beside it, before loading."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from pagedkv.cli import options

_GPU = "GPU"
_SCHEDULER = "Scheduler"


def plan(
    model: Annotated[
        str,
        typer.Argument(
            help="A config.json, a directory with one, a .gguf file, smollm2, or owner/name on the "
            "Hugging Face hub.",
            metavar="MODEL_OR_CONFIG",
        ),
    ],
    gpu: Annotated[
        str | None,
        typer.Option(help="h200, h100, a100-80, l40s, rtx-4090, ... or cpu.", rich_help_panel=_GPU),
    ] = None,
    memory: Annotated[
        float | None,
        typer.Option(
            metavar="GIB", help="Its memory, as CUDA reports it, in GiB.", rich_help_panel=_GPU
        ),
    ] = None,
    bandwidth: Annotated[
        float | None,
        typer.Option(metavar="TB/S", help="Of reads of its memory, in TB/s.", rich_help_panel=_GPU),
    ] = None,
    flops: Annotated[
        float | None,
        typer.Option(
            metavar="TFLOP/S", help="Of dense 16-bit products, in TFLOP/s.", rich_help_panel=_GPU
        ),
    ] = None,
    tensor_parallel_size: Annotated[
        int,
        typer.Option(
            min=1,
            help="Plan each of so many GPUs that share the model; the engine itself runs on one.",
            rich_help_panel=_GPU,
        ),
    ] = 1,
    length: Annotated[
        list[int] | None,
        typer.Option(help="Tokens of a request, prompt and answer together; repeatable."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw it too: a .svg, .png or .pdf file."),
    ] = None,
    dtype: options.Dtype = "auto",
    max_model_len: options.MaxModelLen = None,
    block_size: options.BlockSize = 16,
    num_blocks: options.NumBlocks = None,
    cache_bytes: options.CacheBytes = None,
    gpu_memory_utilization: options.GpuMemoryUtilization = 0.9,
    kv_cache_dtype: options.KvCacheDtype = "auto",
    swap_space: options.SwapSpace = 0.0,
    enforce_eager: options.EnforceEager = False,
    max_cudagraph_capture_size: options.MaxCudagraphCaptureSize = 256,
    max_num_seqs: Annotated[
        int | None, typer.Option(help="Most sequences at once.", rich_help_panel=_SCHEDULER)
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(help="Most tokens in a step.", rich_help_panel=_SCHEDULER)
    ] = None,
) -> None:
    """Say what a model takes of a GPU, how many requests fit in the rest, how long they may be, and
    how fast they can be at best: from config.json alone. The options are those of serve. Exits with
    1 if it does not fit.

    Example: pagedkv plan config.json --gpu h200 --length 1024 --length 8192 --plot plan.svg
    """
    from pagedkv.plan import find_gpu, make_plan
    from pagedkv.plan.picture import check_target, draw_plan
    from pagedkv.plan.report import json_report, text_report

    try:
        chosen = find_gpu(
            gpu,
            memory_bytes=None if memory is None else int(memory * 2**30),
            bandwidth=None if bandwidth is None else bandwidth * 1e12,
            flops=None if flops is None else flops * 1e12,
        )
    except ValueError as refusal:
        raise typer.BadParameter(str(refusal)) from None
    if plot is not None:
        check_target(plot)

    from pagedkv.config import EngineConfig
    from pagedkv.engine.loading import resolve_dtype
    from pagedkv.engine.memory_plan import predict
    from pagedkv.models import ModelConfig
    from pagedkv.weights import read_config

    given = {
        "dtype": dtype,
        "max_model_len": max_model_len,
        "block_size": block_size,
        "num_gpu_blocks_override": num_blocks,
        "kv_cache_memory_bytes": cache_bytes,
        "gpu_memory_utilization": gpu_memory_utilization,
        "kv_cache_dtype": kv_cache_dtype,
        "swap_space": swap_space,
        "enforce_eager": enforce_eager,
        "max_cudagraph_capture_size": max_cudagraph_capture_size,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
    }
    config = EngineConfig.from_options(
        model, **{name: value for name, value in given.items() if value is not None}
    )
    described = read_config(model)
    found = make_plan(
        config,
        ModelConfig.from_dict(described),
        resolve_dtype(config.dtype, described),
        chosen,
        predict,
        lengths=length or (),
        tensor_parallel_size=tensor_parallel_size,
    )
    print(json.dumps(json_report(found)) if as_json else text_report(found))
    if plot is not None:
        draw_plan(found, plot)
    if found.fit.reason is not None:
        raise typer.Exit(1)
