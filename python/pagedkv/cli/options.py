"""Options that several commands share, and what is made of them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from pagedkv.engine import Engine

Model = Annotated[
    str,
    typer.Argument(
        help="smollm2, a directory of safetensors, a .gguf file, or owner/name on the hub.",
        metavar="MODEL",
    ),
]
MaxTokens = Annotated[
    int | None,
    typer.Option(help="Most tokens to generate; fewer where the context ends before."),
]
Temperature = Annotated[float, typer.Option(help="0 takes the likeliest token each time.")]
TopK = Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0 keeps all.")]
TopP = Annotated[float, typer.Option(help="Keep the likeliest tokens that reach this probability.")]
Seed = Annotated[int | None, typer.Option(help="Makes the draws repeatable.")]
Stop = Annotated[list[str] | None, typer.Option(help="Text that ends an answer; repeatable.")]

_ENGINE = "Engine"
Dtype = Annotated[
    str, typer.Option(help="auto, float32, bfloat16 or float16.", rich_help_panel=_ENGINE)
]
Device = Annotated[
    str,
    typer.Option(
        help="cpu, cuda or cuda:N; auto takes a GPU where there is one.", rich_help_panel=_ENGINE
    ),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(help="Most tokens of prompt and answer together.", rich_help_panel=_ENGINE),
]
BlockSize = Annotated[int, typer.Option(help="Tokens in a block.", rich_help_panel=_ENGINE)]
NumBlocks = Annotated[
    int | None,
    typer.Option("--num-gpu-blocks-override", help="Blocks in the pool.", rich_help_panel=_ENGINE),
]
CacheBytes = Annotated[
    int | None,
    typer.Option(
        "--kv-cache-memory-bytes", help="Size of the pool in bytes.", rich_help_panel=_ENGINE
    ),
]
GpuMemoryUtilization = Annotated[
    float,
    typer.Option(
        help="Part of the GPU's memory to use, where no other option sizes the pool.",
        rich_help_panel=_ENGINE,
    ),
]
KvCacheDtype = Annotated[
    str,
    typer.Option(
        "--kv-cache-dtype",
        help="auto, fp8, fp8_e4m3 or fp8_e5m2: 8 bits hold twice as many tokens as 16.",
        rich_help_panel=_ENGINE,
    ),
]
SwapSpace = Annotated[
    float,
    typer.Option(
        help="GiB of CPU memory for the blocks of preempted requests.", rich_help_panel=_ENGINE
    ),
]
EnableKvOffloading = Annotated[
    bool,
    typer.Option(
        "--enable-kv-offloading",
        help="What the prefix cache evicts moves to swap_space too.",
        rich_help_panel=_ENGINE,
    ),
]
PreemptionMode = Annotated[
    str, typer.Option(help="auto, swap or recompute.", rich_help_panel=_ENGINE)
]
EnforceEager = Annotated[
    bool, typer.Option("--enforce-eager", help="No CUDA graphs.", rich_help_panel=_ENGINE)
]
MaxCudagraphCaptureSize = Annotated[
    int,
    typer.Option(
        help="Most tokens of a step with prompts that is a CUDA graph; 0: none is.",
        rich_help_panel=_ENGINE,
    ),
]


_RECORDING = "Recording"
Record = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Write arrivals and decisions to a new file, for pagedkv replay, explain and inspect.",
        rich_help_panel=_RECORDING,
    ),
]
RecordTokens = Annotated[
    bool,
    typer.Option(
        "--record-tokens",
        help="Write token ids as they are, not keyed pseudonyms.",
        rich_help_panel=_RECORDING,
    ),
]


def load_engine(
    model: str, *, record: Path | None = None, record_tokens: bool = False, **options: Any
) -> Engine:
    """An engine with the options that were given; those that are None keep their defaults. record:
    a file to write all that it does to. What is wrong with that is told before the model loads.
    """
    from pagedkv.config import EngineConfig
    from pagedkv.engine import Engine
    from pagedkv.replay import Recorder

    if record_tokens and record is None:
        raise typer.BadParameter("--record-tokens needs --record FILE")
    if record is not None and record.exists():
        raise FileExistsError(f"{record} exists already: --record makes a new file")
    given = {name: value for name, value in options.items() if value is not None}
    engine = Engine.from_config(EngineConfig.from_options(model, **given))
    if record is not None:
        engine.observe(Recorder(record, keep_token_ids=record_tokens))
    return engine
