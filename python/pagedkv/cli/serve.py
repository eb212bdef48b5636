"""`pagedkv serve`: the OpenAI-compatible server."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from pagedkv.cli import options

_SERVER = "Server"
_LIMITS = "Limits"
_SCHEDULER = "Scheduler"


def serve(
    model: options.Model,
    host: Annotated[
        str,
        typer.Option(
            help="Address to listen on. 0.0.0.0 is every one of this machine; then say by "
            "--allowed-host which name or address clients use.",
            rich_help_panel=_SERVER,
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="0 takes a free one.", rich_help_panel=_SERVER)
    ] = 8000,
    served_model_name: Annotated[
        str | None,
        typer.Option(
            help="What clients call the model; MODEL if left out.", rich_help_panel=_SERVER
        ),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help="Needed by every route but /health; repeatable, one per tenant: prompts of "
            "different keys share no cached blocks. Better given as PAGEDKV_API_KEY, which no list "
            "of processes shows.",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            help="A further name in the Host header to answer to; * for all; repeatable.",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    allowed_origin: Annotated[
        list[str] | None,
        typer.Option(
            help="A site whose pages may call this server (CORS); repeatable.",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    inspect_show_text: Annotated[
        bool,
        typer.Option(
            "--inspect-show-text",
            help="The live view at /inspect shows the texts of all prompts, to every key.",
            rich_help_panel=_SERVER,
        ),
    ] = False,
    max_body_bytes: Annotated[
        int, typer.Option(help="Largest body of a request.", rich_help_panel=_LIMITS)
    ] = 2**20,
    request_timeout: Annotated[
        float, typer.Option(help="Seconds for a whole answer.", rich_help_panel=_LIMITS)
    ] = 600.0,
    max_queue: Annotated[
        int,
        typer.Option(help="Prompts that may wait; more get status 429.", rich_help_panel=_LIMITS),
    ] = 1024,
    max_answers: Annotated[
        int,
        typer.Option(help="Sequences of one request: prompts times n.", rich_help_panel=_LIMITS),
    ] = 128,
    max_logprobs: Annotated[
        int, typer.Option(help="Tokens told beside each token.", rich_help_panel=_LIMITS)
    ] = 20,
    max_request_tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens that one request may generate in all its answers.", rich_help_panel=_LIMITS
        ),
    ] = None,
    drain: Annotated[
        float,
        typer.Option(help="Seconds for answers to end when stopped.", rich_help_panel=_LIMITS),
    ] = 30.0,
    max_num_seqs: Annotated[
        int | None, typer.Option(help="Most sequences at once.", rich_help_panel=_SCHEDULER)
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(help="Most tokens in a step.", rich_help_panel=_SCHEDULER)
    ] = None,
    scheduling_policy: Annotated[
        str, typer.Option(help="fcfs or priority.", rich_help_panel=_SCHEDULER)
    ] = "fcfs",
    preemption_mode: options.PreemptionMode = "auto",
    enable_prefix_caching: Annotated[
        bool,
        typer.Option(
            "--enable-prefix-caching/--no-enable-prefix-caching",
            help="Find full blocks of earlier prompts and answers again.",
            rich_help_panel=_SCHEDULER,
        ),
    ] = True,
    record: options.Record = None,
    record_tokens: options.RecordTokens = False,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    load_seed: Annotated[
        int | None, typer.Option("--seed", help="Makes draws without a seed repeatable.")
    ] = None,
    max_model_len: options.MaxModelLen = None,
    block_size: options.BlockSize = 16,
    num_blocks: options.NumBlocks = None,
    cache_bytes: options.CacheBytes = None,
    gpu_memory_utilization: options.GpuMemoryUtilization = 0.9,
    kv_cache_dtype: options.KvCacheDtype = "auto",
    swap_space: options.SwapSpace = 0.0,
    enable_kv_offloading: options.EnableKvOffloading = False,
    enforce_eager: options.EnforceEager = False,
    max_cudagraph_capture_size: options.MaxCudagraphCaptureSize = 256,
) -> None:
    """Serve a model over HTTP, as OpenAI's API does it.

    Example: pagedkv serve smollm2 --port 8000
    """
    try:
        from pagedkv.server import Access, Limits, Server, create_app, hosts_of, listen
    except ModuleNotFoundError as error:
        raise RuntimeError(
            f"pagedkv serve needs {error.name}, of the extra serve: pip install 'pagedkv[serve]'"
        ) from None
    import logging

    from pagedkv.engine import AsyncEngine
    from pagedkv.inspect.routes import PAGE_PATH, Inspector

    # What is wrong with any of these is told before the model loads.
    limits = Limits(
        max_body_bytes=max_body_bytes,
        request_timeout_s=request_timeout,
        max_queue=max_queue,
        max_answers=max_answers,
        max_logprobs=max_logprobs,
        max_request_tokens=max_request_tokens,
        drain_s=drain,
    )
    keys = api_key or [key for key in [os.environ.get("PAGEDKV_API_KEY")] if key]
    access = Access(tuple(keys), hosts_of(host, allowed_host or ()))
    bound = listen(host, port)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level="INFO")
    engine = options.load_engine(
        model,
        record=record,
        record_tokens=record_tokens,
        device=device,
        dtype=dtype,
        seed=load_seed,
        max_model_len=max_model_len,
        block_size=block_size,
        num_gpu_blocks_override=num_blocks,
        kv_cache_memory_bytes=cache_bytes,
        gpu_memory_utilization=gpu_memory_utilization,
        kv_cache_dtype=kv_cache_dtype,
        swap_space=swap_space,
        enable_kv_offloading=enable_kv_offloading,
        preemption_mode=preemption_mode,
        enable_prefix_caching=enable_prefix_caching,
        enforce_eager=enforce_eager,
        max_cudagraph_capture_size=max_cudagraph_capture_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        scheduling_policy=scheduling_policy,
    )
    inspector = Inspector(shows_text=inspect_show_text)
    app = create_app(
        AsyncEngine(engine),
        model=served_model_name or model,
        limits=limits,
        access=access,
        cors_origins=allowed_origin or (),
        routers=[inspector.router],
        key_pages={PAGE_PATH: inspector.page},
    )
    shown = f"[{host}]" if ":" in host else host
    line = f"pagedkv: serving {model} on http://{shown}:{bound.getsockname()[1]}"
    Server(app, on_started=lambda: print(line, flush=True)).run(sockets=[bound])
