"""`pagedkv top`: a running server's memory and queues, live in a terminal."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from pagedkv.cli.live.connection import Connection
    from pagedkv.cli.live.run_state import RunState
    from pagedkv.cli.live.screen import Moment

_LINES = 40  # of a screen that goes into a pipe


def top(
    url: Annotated[
        str, typer.Argument(help="Of the server.", metavar="[URL]")
    ] = "http://127.0.0.1:8000",
    interval: Annotated[
        float, typer.Option(help="Seconds between two screens.", min=0.1, max=60.0)
    ] = 1.0,
    once: Annotated[
        bool, typer.Option("--once", help="Show one screen and leave; so it is in a pipe.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object each interval, or one with --once.")
    ] = False,
    api_key: Annotated[
        str | None,
        typer.Option(
            help="The server's key. Better given as PAGEDKV_API_KEY, which no list of processes "
            "shows."
        ),
    ] = None,
) -> None:
    """Watch a server's pool of blocks, its queues with the reasons of those that wait, hit rate,
    rates and steps. Ctrl-C leaves. In a browser the same is at /inspect.

    Example: pagedkv top http://localhost:8000 --interval 0.5
    """
    from rich.console import Console
    from rich.live import Live

    from pagedkv.cli.live.connection import Connection, base_url
    from pagedkv.cli.live.run_state import RunState
    from pagedkv.cli.live.screen import as_dict, screen

    try:
        base = base_url(url)
    except ValueError as refusal:
        raise typer.BadParameter(str(refusal)) from None
    console = Console(highlight=False)
    with Connection(base, api_key=api_key or os.environ.get("PAGEDKV_API_KEY")) as server:
        run = RunState(server.start)
        watch = _Watch(server, run)
        watch.begin(interval)
        if as_json:
            while True:
                print(json.dumps(as_dict(run, watch.moment())), flush=True)
                if once:
                    return
                watch.go_on(interval)
        if once or not console.is_terminal:
            height = max(_LINES, console.height)
            console.print(screen(run, watch.moment(), base, console.width, height))
            return
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                size = console.size
                made = screen(run, watch.moment(), base, size.width, size.height)
                live.update(made, refresh=True)
                watch.go_on(interval)


class _Watch:
    """Applies frames as they come, for an interval at a time."""

    def __init__(self, server: Connection, run: RunState) -> None:
        self._server = server
        self._run = run
        self._first_s = self._last_s = time.monotonic()

    def moment(self) -> Moment:
        from pagedkv.cli.live.latencies import latencies
        from pagedkv.cli.live.screen import Moment

        found = latencies(self._server.metrics())
        now_s = time.monotonic()
        return Moment(now_s - self._first_s, now_s - self._last_s, found)

    def begin(self, interval_s: float) -> None:
        """Until the first frame has come, and one interval more, so that there are rates."""
        while self._run.time_s is None:
            self._take(interval_s)
        self._first_s = self._last_s
        self.go_on(interval_s)

    def go_on(self, interval_s: float) -> None:
        end_s = time.monotonic() + interval_s
        while (left_s := end_s - time.monotonic()) > 0:
            self._take(left_s)

    def _take(self, timeout_s: float) -> None:
        frames = self._server.frames(timeout_s)
        for frame in frames:
            self._run.apply(frame)
        if frames:
            self._last_s = time.monotonic()
