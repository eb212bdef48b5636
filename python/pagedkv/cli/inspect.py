"""`pagedkv inspect FILE`: a recorded run as the page of the live view, with a slider through its
steps. Loads no model and no torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pagedkv.cli.progress import progress


def inspect(
    file: Annotated[Path, typer.Argument(help="Written by --record.", metavar="FILE")],
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", help="Write the page to this file, whole in itself, and end."
        ),
    ] = None,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Of the loopback address; 0 takes a free one.")
    ] = 0,
) -> None:
    """Show a recorded run in the browser: the pool, block tables and queues behind each step.

    Example: pagedkv inspect run.jsonl -o run.html

    A server shows the same of what runs now, at /inspect.
    """
    from pagedkv.inspect.page import recorded_page
    from pagedkv.inspect.recorded import recorded_lines
    from pagedkv.inspect.showing import serve_page
    from pagedkv.replay import load, looks

    if output is not None and output.exists():
        raise FileExistsError(f"{output} exists already")
    recording = load(file)
    with progress("steps", len(recording.steps)) as count:
        lines = recorded_lines(
            recording.facts,
            block_size=recording.cache.block_size,
            max_num_seqs=recording.scheduler.max_num_seqs,
            looks=looks(recording, count),
        )
        page = recorded_page(lines)
    if output is not None:
        output.write_text(page.html, encoding="utf-8")
        print(f"{len(recording.steps)} steps are in {output}")
        return
    serve_page(page, port, lambda url: print(f"{file} is shown at {url} until Ctrl-C", flush=True))
