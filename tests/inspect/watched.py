"""A real server with the live view, and the looks that it has taken at its engine."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from serving import Served, serving

from pagedkv.block_manager import Snapshot
from pagedkv.inspect.routes import PAGE_PATH, Inspector
from pagedkv.records import Activity, QueueLook, StepResult
from pagedkv.scheduler import RunView


@dataclass
class Watched:
    """looks: all that were taken; whoever watches has the last one, or soon will."""

    served: Served
    looks: list[tuple[Snapshot, QueueLook, Activity]]

    @property
    def url(self) -> str:
        return self.served.url + PAGE_PATH

    @property
    def num_watchers(self) -> int:
        """Views that the engine's steps tell of themselves."""
        return sum(isinstance(one, RunView) for one in self.served.engine._loop.watchers)


class Pacer:
    """Steps of an engine, let through one by one; between two of them it obeys commands as ever, so
    that it can be looked at.
    """

    def __init__(self, served: Served) -> None:
        self._served = served
        self._step = served.engine.step
        self._tickets = threading.Semaphore(0)
        self._num_done = 0
        self._is_open = False
        served.engine.step = self._paced  # type: ignore[method-assign]

    def _paced(self) -> StepResult:
        if not self._is_open and not self._tickets.acquire(timeout=0.005):
            return StepResult([], [])
        result = self._step()
        self._num_done += 1
        return result

    def let(self, num_steps: int) -> None:
        """Let steps pass, and wait until they have ended."""
        want = self._num_done + num_steps
        self._tickets.release(num_steps)
        self._served.wait(lambda: self._num_done >= want)

    def open(self) -> None:
        self._is_open = True


@contextmanager
def watched(
    folder: Path,
    *,
    shows_text: bool = False,
    app_options: dict[str, Any] | None = None,
    **options: Any,
) -> Iterator[Watched]:
    """options: of the engine."""
    inspector = Inspector(shows_text=shows_text)
    routes = {"routers": [inspector.router], "key_pages": {PAGE_PATH: inspector.page}}
    looks: list[tuple[Snapshot, QueueLook, Activity]] = []
    take = RunView.take

    def taken(view: RunView) -> tuple[Snapshot, QueueLook, Activity]:
        looks.append(take(view))
        return looks[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunView, "take", taken)
        with serving(folder, app_options={**routes, **(app_options or {})}, **options) as served:
            yield Watched(served, looks)
