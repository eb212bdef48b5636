"""`pagedkv bench serve`: load on any OpenAI-compatible server, and its latencies."""

from __future__ import annotations

import asyncio
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pagedkv.cli.progress import progress

if TYPE_CHECKING:
    from pagedkv.cli.load import LoadPrompt, LoadSummary, Outcome, Target

_LOAD = "Load"
_PROMPTS = "Prompts"
_RESULTS = "Results"


def bench_serve(
    base_url: Annotated[
        str, typer.Option(help="Of the server; /v1 behind it or not.")
    ] = "http://127.0.0.1:8000",
    backend: Annotated[
        str,
        typer.Option(help="openai: /v1/completions; openai-chat: /v1/chat/completions."),
    ] = "openai",
    model: Annotated[
        str | None, typer.Option(help="Its name there; without one, the first of /v1/models.")
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar=["PAGEDKV_API_KEY", "OPENAI_API_KEY"],
            show_envvar=True,
            help="Sent as a bearer token.",
        ),
    ] = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Requests.", rich_help_panel=_LOAD)] = 100,
    request_rate: Annotated[
        float,
        typer.Option(
            help="Arrivals per second, at random times (Poisson); inf: all at once.",
            rich_help_panel=_LOAD,
        ),
    ] = math.inf,
    burstiness: Annotated[
        float,
        typer.Option(help="Below 1: arrivals in bursts; above: regular.", rich_help_panel=_LOAD),
    ] = 1.0,
    max_concurrency: Annotated[
        int | None,
        typer.Option(min=1, help="Requests at once; others wait.", rich_help_panel=_LOAD),
    ] = None,
    num_warmups: Annotated[
        int,
        typer.Option(
            min=0, help="Requests before, one by one, not counted.", rich_help_panel=_LOAD
        ),
    ] = 1,
    timeout: Annotated[
        float, typer.Option(min=0.001, help="Seconds for a whole answer.", rich_help_panel=_LOAD)
    ] = 600.0,
    seed: Annotated[
        int, typer.Option(help="Of arrivals and random prompts.", rich_help_panel=_LOAD)
    ] = 0,
    random_input_len: Annotated[
        int, typer.Option(min=1, help="Tokens of a random prompt.", rich_help_panel=_PROMPTS)
    ] = 128,
    random_output_len: Annotated[
        int, typer.Option(min=1, help="Most tokens of an answer.", rich_help_panel=_PROMPTS)
    ] = 64,
    random_range_ratio: Annotated[
        float,
        typer.Option(
            help="Lengths vary by this part of them, up and down.", rich_help_panel=_PROMPTS
        ),
    ] = 0.0,
    random_prefix_len: Annotated[
        int,
        typer.Option(
            min=0, help="Tokens before, the same in all prompts.", rich_help_panel=_PROMPTS
        ),
    ] = 0,
    random_vocab_size: Annotated[
        int, typer.Option(min=1, help="Random token ids are below it.", rich_help_panel=_PROMPTS)
    ] = 10_000,
    dataset_path: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help='Lines of JSON instead: {"prompt": ...} or {"messages": ...}, and '
            '"output_tokens" if wished.',
            rich_help_panel=_PROMPTS,
        ),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="0: greedy.", rich_help_panel=_PROMPTS)
    ] = 0.0,
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos",
            help="Answers of full length, where the server knows this extension.",
            rich_help_panel=_PROMPTS,
        ),
    ] = False,
    goodput: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME:MS",
            help="Count requests that keep to ttft, tpot or e2el of so many ms from their arrival; "
            "repeatable.",
            rich_help_panel=_RESULTS,
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Distributions and the run's course: a .svg, .png or .pdf file.",
            rich_help_panel=_RESULTS,
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object.", rich_help_panel=_RESULTS)
    ] = False,
) -> None:
    """Send requests to an OpenAI-compatible server as users do, at times that do not depend on its
    answers, and measure the latency that each would have seen. Exit code 1 if any failed.

    Example: pagedkv bench serve --base-url http://127.0.0.1:8000 --request-rate 4 --plot load.svg
    """
    try:
        from pagedkv.cli.load import (
            Goals,
            Target,
            arrival_times,
            random_prompts,
            read_prompts,
            summarise,
        )
    except ModuleNotFoundError as error:
        raise RuntimeError(
            f"pagedkv bench serve needs {error.name}, of the extra bench: "
            "pip install 'pagedkv[bench]'"
        ) from None

    if plot is not None:
        from pagedkv.plan.picture import check_target

        try:
            check_target(plot)
        except ValueError as refusal:
            raise typer.BadParameter(f"--plot: {refusal}") from None
    if backend not in ("openai", "openai-chat"):
        raise typer.BadParameter(f"--backend is openai or openai-chat, got {backend}")
    goals = Goals.parse(goodput or ())
    is_chat = backend == "openai-chat"
    if dataset_path is not None:
        prompts = read_prompts(
            dataset_path, num_prompts, output_len=random_output_len, is_chat=is_chat
        )
    else:
        prompts = random_prompts(
            num_prompts,
            input_len=random_input_len,
            output_len=random_output_len,
            range_ratio=random_range_ratio,
            prefix_len=random_prefix_len,
            vocab_size=random_vocab_size,
            is_chat=is_chat,
            seed=seed,
        )
    arrivals_s = arrival_times(num_prompts, request_rate, burstiness=burstiness, seed=seed)
    target = Target(base_url, model or "", api_key, temperature, ignore_eos)
    outcomes = asyncio.run(
        _measure(target, prompts, arrivals_s, num_warmups, max_concurrency, timeout)
    )
    summary = summarise(outcomes, goals)
    if as_json:
        print(json.dumps({"base_url": base_url, "seed": seed, **summary.as_dict()}))
    else:
        print(_text(summary))
    if plot is not None:
        from pagedkv.cli.load.plots import load_figure

        load_figure(f"Load on {base_url}", outcomes, summary).savefig(plot)
    if summary.failed:
        _tell_failures(outcomes)
        raise typer.Exit(1)


async def _measure(
    target: Target,
    prompts: list[LoadPrompt],
    arrivals_s: list[float],
    num_warmups: int,
    max_concurrency: int | None,
    timeout_s: float,
) -> list[Outcome]:
    from pagedkv.cli.load.running import first_model, new_client, run_load

    async with new_client(timeout_s) as client:
        if not target.model:
            target = replace(target, model=await first_model(client, target))
        warmups = [prompts[i % len(prompts)] for i in range(num_warmups)]
        # One at a time, so that nothing that a first request has to set up is measured.
        for prompt in warmups:
            (outcome,) = await run_load(client, target, [prompt], [0.0], timeout_s=timeout_s)
            if outcome.error is not None:
                raise RuntimeError(f"the first request failed: {outcome.error}: {outcome.detail}")
        with progress("requests", len(prompts)) as count:
            return await run_load(
                client,
                target,
                prompts,
                arrivals_s,
                max_concurrency=max_concurrency,
                timeout_s=timeout_s,
                on_end=lambda outcome: count(),
            )


def _text(summary: LoadSummary) -> str:
    from pagedkv.cli.load.summary import LATENCIES

    per_second = summary.per_second
    num_tokens = summary.total_input_tokens + summary.total_output_tokens
    lines = [
        f"{summary.completed} requests completed, {summary.failed} failed in "
        f"{summary.duration_s:.3f} s, at most {summary.peak_concurrency} at once",
        *(f"  {count} x {kind}" for kind, count in summary.errors.items()),
        f"{summary.total_input_tokens} tokens of prompts, {summary.total_output_tokens} of answers",
        f"{per_second(summary.completed):.2f} requests/s, "
        f"{per_second(summary.total_output_tokens):.1f} tok/s out, "
        f"{per_second(num_tokens):.1f} tok/s in all",
    ]
    if summary.num_good is not None:
        lines.append(
            f"{summary.num_good} within the goals: {per_second(summary.num_good):.2f} requests/s"
        )
    lines += ["", f"{'ms':26}" + "".join(f"{one:>11}" for one in _COLUMNS)]
    for name, words in LATENCIES.items():
        spread = summary.latencies[name]
        values = (spread.mean, spread.median, spread.p90, spread.p95, spread.p99, spread.max)
        lines.append(f"{words:26}" + "".join(f"{value * 1e3:11.2f}" for value in values))
    return "\n".join(lines)


_COLUMNS = ("mean", "p50", "p90", "p95", "p99", "max")


def _tell_failures(outcomes: list[Outcome]) -> None:
    """One example of each kind."""
    examples = {one.error: one.detail for one in reversed(outcomes) if one.error is not None}
    for kind, detail in examples.items():
        print(f"pagedkv: error: {kind}: {detail}", file=sys.stderr)
