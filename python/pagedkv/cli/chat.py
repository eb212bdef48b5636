"""`pagedkv chat`: a conversation on the terminal, or one message per line from a pipe."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from pagedkv.cli import options, text_input

if TYPE_CHECKING:
    from pagedkv.engine import Engine
    from pagedkv.sampling_params import SamplingParams

_COMMANDS = "/clear forgets the conversation, /exit or end of input leaves"


def chat(
    model: options.Model,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    max_tokens: options.MaxTokens = 512,
    temperature: options.Temperature = 0.7,
    top_k: options.TopK = 0,
    top_p: options.TopP = 0.95,
    seed: options.Seed = None,
    stop: options.Stop = None,
    record: options.Record = None,
    record_tokens: options.RecordTokens = False,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    max_model_len: options.MaxModelLen = None,
    block_size: options.BlockSize = 16,
    num_blocks: options.NumBlocks = None,
    cache_bytes: options.CacheBytes = None,
    gpu_memory_utilization: options.GpuMemoryUtilization = 0.9,
    kv_cache_dtype: options.KvCacheDtype = "auto",
) -> None:
    """Talk with a model; earlier turns come from the prefix cache.

    Example: pagedkv chat smollm2 --system "Answer briefly."
    """
    from pagedkv.sampling_params import SamplingParams

    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        max_tokens=max_tokens,
        stop=text_input.checked_arguments("--stop", stop or ()),
    )
    first = text_input.checked_arguments("--system", [] if system is None else [system])
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
    )
    conversation = Conversation(engine, params, first)
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        print(_COMMANDS, file=sys.stderr)
    has_failed = False
    while True:
        try:
            line = _read_line(is_terminal)
        except text_input.NotTextError as refusal:
            print(f"pagedkv: error: {refusal}", file=sys.stderr)
            has_failed = True
            continue
        if line is None or line == "/exit":
            break
        if line == "/clear":
            conversation.clear()
        elif line:
            has_failed |= not conversation.say(line)
    if has_failed:
        raise typer.Exit(1)


class Conversation:
    """The messages so far. A turn that fails or is interrupted leaves them as they were."""

    def __init__(self, engine: Engine, params: SamplingParams, system: list[str]) -> None:
        self._engine = engine
        self._params = params
        self._first = [{"role": "system", "content": one} for one in system]
        self._messages = list(self._first)
        self._num_turns = 0

    def clear(self) -> None:
        self._messages = list(self._first)

    def say(self, text: str) -> bool:
        """Answer one message on standard output. False if that failed (told on standard error)."""
        assert self._engine.tokenizer is not None  # a loaded checkpoint always has one
        messages = [*self._messages, {"role": "user", "content": text}]
        self._num_turns += 1
        name = f"turn-{self._num_turns}"
        try:
            prompt = self._engine.tokenizer.encode_chat(messages)
            request = self._engine.make_request(name, prompt, self._params)
        except ValueError as refusal:
            print(f"pagedkv: error: {refusal} (/clear starts afresh)", file=sys.stderr)
            return False
        self._engine.add(request, stream=True)
        error: str | None = None
        answer = ""
        try:
            while self._engine.has_work:
                result = self._engine.step()
                for delta in result.deltas:
                    print(delta.text, end="", flush=True)
                for output in result.finished:
                    error, answer = output.error, output.outputs[0].text
        except KeyboardInterrupt:
            error = "interrupted"
        finally:
            self._engine.abort(name)
        print()
        if error:
            print(f"pagedkv: error: {error}", file=sys.stderr)
            return False
        self._messages = [*messages, {"role": "assistant", "content": answer}]
        return True


def _read_line(is_terminal: bool) -> str | None:
    """The next line without white space around it, or None at the end of input."""
    if is_terminal:
        print("> ", end="", file=sys.stderr, flush=True)
    return text_input.read_line()
