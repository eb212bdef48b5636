"""`pagedkv replay` and `pagedkv explain`: what is in a recording of generate --record, and what
other settings would have made of it. Neither loads a model or torch.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from pagedkv.cli.progress import progress

Recorded = Annotated[Path, typer.Argument(help="Written by --record.", metavar="FILE")]

_OTHER = "Other settings"


def replay(
    file: Recorded,
    block_size: Annotated[
        int | None, typer.Option(help="Tokens in a block.", rich_help_panel=_OTHER)
    ] = None,
    num_blocks: Annotated[
        int | None,
        typer.Option(
            "--num-gpu-blocks-override",
            help="Blocks in the pool; without it, a pool of as many bytes.",
            rich_help_panel=_OTHER,
        ),
    ] = None,
    enable_prefix_caching: Annotated[
        bool | None,
        typer.Option(
            "--enable-prefix-caching/--no-enable-prefix-caching",
            help="Find full blocks of earlier prompts and answers again.",
            rich_help_panel=_OTHER,
        ),
    ] = None,
    watermark: Annotated[
        float | None,
        typer.Option(help="Fraction kept free at admission.", rich_help_panel=_OTHER),
    ] = None,
    swap_space: Annotated[
        float | None,
        typer.Option(help="GiB for the blocks of preempted requests.", rich_help_panel=_OTHER),
    ] = None,
    enable_kv_offloading: Annotated[
        bool | None,
        typer.Option(
            "--enable-kv-offloading/--no-enable-kv-offloading",
            help="Evicted blocks move to swap_space.",
            rich_help_panel=_OTHER,
        ),
    ] = None,
    preemption_mode: Annotated[
        str | None, typer.Option(help="auto, swap or recompute.", rich_help_panel=_OTHER)
    ] = None,
    scheduling_policy: Annotated[
        str | None, typer.Option(help="fcfs or priority.", rich_help_panel=_OTHER)
    ] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(help="Most sequences that run at once.", rich_help_panel=_OTHER)
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(help="Most tokens in a step.", rich_help_panel=_OTHER)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Drive a recorded run again, without a model: the same requests through the same scheduler and
    block manager, under its own settings and under those given. Says what would have changed.

    Example: pagedkv replay run.jsonl --block-size 32 --num-gpu-blocks-override 40
    """
    from pagedkv.replay import (
        changed_settings,
        compare,
        json_report,
        load,
        settings_of,
        text_report,
    )

    options = {
        "block_size": block_size,
        "num_gpu_blocks_override": num_blocks,
        "enable_prefix_caching": enable_prefix_caching,
        "watermark": watermark,
        "swap_space": swap_space,
        "enable_kv_offloading": enable_kv_offloading,
        "preemption_mode": preemption_mode,
        "scheduling_policy": scheduling_policy,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
    }
    given = {name: value for name, value in options.items() if value is not None}
    recording = load(file)
    before = settings_of(recording)
    after = changed_settings(before, **given)
    num_runs = 3 if before.differences(after) else 2
    with progress("steps", num_runs * len(recording.steps)) as count:
        comparison = compare(recording, after, on_step=count)
    print(json.dumps(json_report(comparison)) if as_json else text_report(comparison))


def explain(
    file: Recorded,
    request: Annotated[
        str | None, typer.Argument(help="Its id; without one, all.", metavar="[REQUEST]")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object per request, with the numbers.")
    ] = False,
) -> None:
    """Say why each request of a recorded run waited, ran or was preempted.

    Example: pagedkv explain run.jsonl 0
    """
    from pagedkv.replay import explain as explain_recording
    from pagedkv.replay import load
    from pagedkv.replay.lines import plain

    try:
        found = explain_recording(load(file), request)
    except KeyError as error:
        print(f"pagedkv: error: {error.args[0]}", file=sys.stderr)
        raise typer.Exit(1) from None
    for one in found:
        if as_json:
            print(json.dumps({"request_id": one.request_id, "decisions": plain(one.decisions)}))
        else:
            print(f"== request {one.request_id}\n{one.text}")
