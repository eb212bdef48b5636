"""`pagedkv draw`: the worked example of sharing and copy-on-write, drawn from a real block manager.
Imports no torch."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

_HELP = """Draw the paged KV cache: two requests that share a prompt's blocks, and the copy-on-write
when one writes.

Example: pagedkv draw --block-size 8

To see the cache of a run of your own: pagedkv generate MODEL --draw -p "..."
"""


def draw(
    num_blocks: Annotated[int, typer.Option(help="Blocks of the pool.", min=3)] = 8,
    block_size: Annotated[int, typer.Option(help="Tokens of a block.", min=2)] = 4,
) -> None:
    from pagedkv.inspect import copy_on_write_example, draw_cache, example_names

    console = Console(highlight=False, soft_wrap=True)
    for stage in copy_on_write_example(num_blocks, block_size):
        console.print(f"== {stage.title}\n")
        console.print(draw_cache(stage.snapshot, example_names()))


draw.__doc__ = _HELP
