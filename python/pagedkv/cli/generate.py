"""`pagedkv generate`: answers to prompts, streamed to standard output."""

from __future__ import annotations

import json
import sys
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated

import typer

from pagedkv.cli import options, text_input
from pagedkv.cli.progress import progress

if TYPE_CHECKING:
    from pagedkv.engine import CacheView, Engine
    from pagedkv.records import RequestOutput, StepResult


def generate(
    model: options.Model,
    prompt: Annotated[
        list[str] | None,
        typer.Option("--prompt", "-p", help="Repeatable. Without one: standard input."),
    ] = None,
    max_tokens: options.MaxTokens = 128,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    seed: options.Seed = None,
    stop: options.Stop = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on past the model's end token.")
    ] = False,
    chat: Annotated[
        bool, typer.Option("--chat", help="Put each prompt into the chat template.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object per prompt, when all are done.")
    ] = False,
    draw: Annotated[
        bool, typer.Option("--draw", help="Draw the paged cache at this run's fullest moment.")
    ] = False,
    explain: Annotated[
        bool,
        typer.Option("--explain", help="Say why each prompt waited, ran or was preempted."),
    ] = False,
    record: options.Record = None,
    record_tokens: options.RecordTokens = False,
    swap_space: options.SwapSpace = 0.0,
    enable_kv_offloading: options.EnableKvOffloading = False,
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
    """Answer prompts, all in one batch; the text comes as it is made.

    Example: pagedkv generate smollm2 --max-tokens 32 -p "The capital of France is"
    """
    from pagedkv.sampling_params import SamplingParams

    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        max_tokens=max_tokens,
        stop=text_input.checked_arguments("--stop", stop or ()),
        ignore_eos=ignore_eos,
    )
    prompts = text_input.checked_arguments("--prompt", prompt) if prompt else [_read_stdin()]
    engine = options.load_engine(
        model,
        record=record,
        record_tokens=record_tokens,
        device=device,
        dtype=dtype,
        max_model_len=max_model_len,
        block_size=block_size,
        num_gpu_blocks_override=num_blocks,
        kv_cache_memory_bytes=cache_bytes,
        gpu_memory_utilization=gpu_memory_utilization,
        kv_cache_dtype=kv_cache_dtype,
        swap_space=swap_space,
        enable_kv_offloading=enable_kv_offloading,
        preemption_mode=preemption_mode,
    )
    names = [str(number) for number in range(len(prompts))]
    requests = [
        engine.make_request(name, _in_template(engine, text) if chat else text, params)
        for name, text in zip(names, prompts, strict=True)
    ]
    for request in requests:
        engine.add(request, stream=True)

    printer = _InOrder(dict(zip(names, prompts, strict=True)), silent=as_json)
    fullest = engine.cache_view()
    begin = time.perf_counter()
    with progress("answers", len(prompts)) if as_json else nullcontext(lambda: None) as count:
        while engine.has_work:
            result = engine.step()
            printer.take(result)
            for _ in result.finished:
                count()
            if draw:
                fullest = _fuller(fullest, engine.cache_view())
    if as_json:
        for name, text in zip(names, prompts, strict=True):
            print(json.dumps(_as_dict(text, printer.outputs[name]), ensure_ascii=False))
    _report(printer, time.perf_counter() - begin)
    if explain:
        for name, text in zip(names, prompts, strict=True):
            _explain(engine, name, text)
    if draw:
        from rich.console import Console

        from pagedkv.inspect import draw_cache

        console = Console(highlight=False, soft_wrap=True)
        console.print(draw_cache(fullest.snapshot, fullest.names))
    if any(output.error for output in printer.outputs.values()):
        raise typer.Exit(1)


class _InOrder:
    """Prints the answers one after the other: the first unfinished one as it comes, later ones
    when it is their turn."""

    def __init__(self, prompts: dict[str, str], *, silent: bool) -> None:
        self.outputs: dict[str, RequestOutput] = {}
        self.num_tokens = 0
        self._prompts = prompts
        self._unprinted = dict.fromkeys(prompts, "")
        self._queue = [] if silent else list(prompts)
        self._has_header = False

    def take(self, result: StepResult) -> None:
        for delta in result.deltas:
            self._unprinted[delta.request_id] += delta.text
            self.num_tokens += len(delta.token_ids)
        for output in result.finished:
            self.outputs[output.request_id] = output
        while self._queue:
            name = self._queue[0]
            self._print(name)
            if name not in self.outputs:
                break
            print()
            self._queue.pop(0)
            self._has_header = False

    def _print(self, name: str) -> None:
        if len(self._prompts) > 1 and not self._has_header:
            print(f"== {self._prompts[name]}")
            self._has_header = True
        print(self._unprinted[name], end="", flush=True)
        self._unprinted[name] = ""


def _read_stdin() -> str:
    if sys.stdin.isatty():
        raise typer.BadParameter("give at least one prompt: -p TEXT, or text on standard input")
    return text_input.read_all()


def _in_template(engine: Engine, text: str) -> list[int]:
    assert engine.tokenizer is not None  # a loaded checkpoint always has one
    return engine.tokenizer.encode_chat([{"role": "user", "content": text}])


def _fuller(one: CacheView, other: CacheView) -> CacheView:
    """The view with more blocks in use; the later one of equals."""
    used = other.snapshot.statistics.num_referenced
    return other if used >= one.snapshot.statistics.num_referenced else one


def _as_dict(prompt: str, output: RequestOutput) -> dict[str, object]:
    answer = output.outputs[0]
    return {
        "prompt": prompt,
        "text": answer.text,
        "token_ids": answer.token_ids,
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
        "error": output.error,
        "num_prompt_tokens": output.prompt_len,
        "num_cached_tokens": output.num_cached_tokens,
        "num_preemptions": output.num_preemptions,
    }


def _explain(engine: Engine, name: str, prompt: str) -> None:
    """The scheduler's reasons, in plain words, on standard error."""
    for one in engine.explain(name):
        print(f"== why: {prompt}\n{one.text}", file=sys.stderr)


def _report(printer: _InOrder, seconds: float) -> None:
    """One line about the run, and each failed request's reason, on standard error."""
    from pagedkv.records import counted

    print(
        f"[{counted(len(printer.outputs), 'answer')}, {counted(printer.num_tokens, 'token')} in "
        f"{seconds:.2f} s, {printer.num_tokens / seconds:.1f} tokens/s]",
        file=sys.stderr,
    )
    for output in printer.outputs.values():
        if output.error:
            print(f"pagedkv: error: prompt {output.request_id}: {output.error}", file=sys.stderr)
