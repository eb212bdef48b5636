"""The `pagedkv` command: its sub-commands, and how errors leave it.

Exit codes: 0 done, 1 the command failed (the reason is on standard error), 2 wrong usage, 130
interrupted. A new command is a module beside this one and a line below.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from pagedkv import __version__
from pagedkv.cli.bench import bench
from pagedkv.cli.chat import chat
from pagedkv.cli.draw import draw
from pagedkv.cli.fetch import fetch
from pagedkv.cli.generate import generate
from pagedkv.cli.inspect import inspect
from pagedkv.cli.plan import plan
from pagedkv.cli.replay import explain, replay
from pagedkv.cli.serve import serve
from pagedkv.cli.top import top

app = typer.Typer(
    name="pagedkv",
    help="Serve language models from a paged KV cache.",
    epilog='Example: pagedkv generate smollm2 -p "The capital of France is"\n\n'
    "Exit codes: 0 done, 1 failed (standard error says why), 2 wrong usage, 130 interrupted.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(generate)
app.command()(chat)
app.add_typer(bench)
app.command()(plan)
app.command()(fetch)
app.command()(draw)
app.command()(inspect)
app.command()(replay)
app.command()(explain)
app.command()(serve)
app.command()(top)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"pagedkv {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    pass


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line and exit. args: without the program's name; None: sys.argv's."""
    if sys.stdout is None:  # closed by the caller: an answer would go nowhere, unnoticed
        print("pagedkv: error: standard output is closed", file=sys.stderr)
        sys.exit(1)
    try:
        app(args=None if args is None else list(args))
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        sys.stdout = None  # the reader is gone; flushing at exit would fail once more
        sys.exit(1)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"pagedkv: error: {error}", file=sys.stderr)
        sys.exit(1)
