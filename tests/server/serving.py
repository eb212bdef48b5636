"""A real server in this process, on the engine tests' fake model: real sockets, and the engine in
reach, whose books are checked when it stops.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parent.parent / "engine"))

from fake_model import FakeModel, make_engine
from harness import fake_of

from pagedkv.engine import AsyncEngine, Engine
from pagedkv.server import Server, create_app, listen
from pagedkv.server.service import Service

WAIT_S = 30.0  # for what must come soon; a test that waits so long has failed


@dataclass
class Served:
    url: str
    engine: Engine
    server: Server
    service: Service
    client: httpx.Client

    @property
    def fake(self) -> FakeModel:
        return fake_of(self.engine)

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def post(self, path: str, **fields: Any) -> httpx.Response:
        return self.client.post(path, json=fields)

    def ok(self, path: str, **fields: Any) -> dict[str, Any]:
        response = self.post(path, **fields)
        assert response.status_code == 200, response.text
        body: dict[str, Any] = response.json()
        return body

    def complete(self, prompt: Any, **fields: Any) -> dict[str, Any]:
        return self.ok("/v1/completions", prompt=prompt, **{"temperature": 0, **fields})

    def events(self, path: str, **fields: Any) -> list[dict[str, Any]]:
        """The events of a stream but the last, which is [DONE]."""
        with self.client.stream("POST", path, json={"stream": True, **fields}) as response:
            lines = [line for line in response.iter_lines() if line]
            assert response.status_code == 200, lines
        assert all(line.startswith("data: ") for line in lines)
        assert lines.pop() == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines]

    def wait(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline, "it never came to be"
            time.sleep(0.002)

    def wait_idle(self) -> None:
        """Until nobody is served; then no block is held and nothing is remembered."""
        self.wait(lambda: not self.engine.has_work and self.service.room.num_taken == 0)
        # The engine's thread may be in the middle of the abort after which it has no work.
        self.wait(lambda: self.engine._outputs.num_watched == 0)
        self.wait(lambda: self.service.engine.num_unfinished == 0)
        self.wait(self._holds_no_block)

    def _holds_no_block(self) -> bool:
        found = self.engine.statistics()
        return found.num_free + found.num_cached_idle == found.num_blocks


@contextmanager
def serving(
    folder: Path, *, app_options: dict[str, Any] | None = None, **options: Any
) -> Iterator[Served]:
    """app_options: of create_app. options: of the engine."""
    engine = make_engine(folder, **options)
    app = create_app(AsyncEngine(engine), **{"model": "fake", **(app_options or {})})
    server = Server(app)
    bound = listen("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    url = f"http://127.0.0.1:{bound.getsockname()[1]}"
    with httpx.Client(base_url=url, timeout=WAIT_S) as client:
        served = Served(url, engine, server, app.state.service, client)
        served.wait(lambda: server.started)
        try:
            yield served
            if not server.should_exit and served.service.engine.failure is None:
                served.wait_idle()
        finally:
            served.fake.before_step = lambda input_ids: None
            server.should_exit = True
            thread.join(WAIT_S)
            assert not thread.is_alive()
    engine.check_invariants()


def whole_text(events: list[dict[str, Any]], index: int) -> str:
    """The text of a choice, from its chunks."""
    pieces = []
    for event in events:
        for choice in event["choices"]:
            if choice["index"] == index:
                pieces.append(choice.get("text") or choice.get("delta", {}).get("content") or "")
    return "".join(pieces)


def ending(events: list[dict[str, Any]], index: int) -> tuple[str, Any]:
    """(finish_reason, stop_reason) of a choice, told once."""
    (found,) = [
        (choice["finish_reason"], choice["stop_reason"])
        for event in events
        for choice in event["choices"]
        if choice["index"] == index and choice["finish_reason"] is not None
    ]
    return found
