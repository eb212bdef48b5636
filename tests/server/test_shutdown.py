"""A server that is told to stop: answers that end in time end as ever, others are cut off as
streams are, and nobody is left waiting.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import WAIT_S, Served, ending, serving, whole_text
from test_disconnects import Gate

from pagedkv.server import Limits


class Reader(threading.Thread):
    """A client that reads a stream on its own thread."""

    def __init__(self, served: Served, **fields: Any) -> None:
        super().__init__()
        self._served = served
        self._fields = {"prompt": "Hello", "temperature": 0, "ignore_eos": True, **fields}
        self.events: list[dict[str, Any]] = []
        self.start()

    def run(self) -> None:
        self.events = self._served.events("/v1/completions", **self._fields)

    def end(self) -> list[dict[str, Any]]:
        self.join(WAIT_S)
        assert not self.is_alive()
        return self.events


def test_an_answer_that_ends_in_time_ends_as_ever(tokenizer_folder: Path) -> None:
    with serving(tokenizer_folder, app_options={"limits": Limits(drain_s=WAIT_S)}) as served:
        whole = served.complete("Hello", max_tokens=20, ignore_eos=True)["choices"][0]["text"]
        gate = Gate(served)
        reader = Reader(served, max_tokens=20)
        gate.let(3)
        served.server.should_exit = True
        served.wait(lambda: not served.server.servers[0].is_serving())
        with pytest.raises(httpx.TransportError), httpx.Client() as other:
            other.get(f"{served.url}/health")
        gate.open()
        events = reader.end()
        assert whole_text(events, 0) == whole
        assert ending(events, 0) == ("length", None)


def test_an_answer_that_does_not_end_in_time_ends_with_abort(tokenizer_folder: Path) -> None:
    with serving(tokenizer_folder, app_options={"limits": Limits(drain_s=0)}) as served:
        gate = Gate(served)
        reader = Reader(served, max_tokens=200, n=2, stream_options={"include_usage": True})
        gate.let(3)
        served.server.should_exit = True
        served.wait(lambda: not served.server.servers[0].is_serving())
        served.wait(lambda: not served.service.engine._commands.empty())  # abort_all
        gate.open()
        events = reader.end()
        assert ending(events, 0) == ending(events, 1) == ("abort", None)
        assert events[-1]["usage"]["completion_tokens"] > 0


def test_health_is_red_when_the_engine_has_failed_or_stalls(tokenizer_folder: Path) -> None:
    with serving(tokenizer_folder, app_options={"limits": Limits(stall_s=0.01)}) as served:
        assert served.client.get("/health").status_code == 200
        gate = Gate(served)
        reader = Reader(served, max_tokens=5)
        gate.let(1)
        served.wait(lambda: served.client.get("/health").status_code == 503)
        assert served.client.get("/health").json()["error"]["code"] == "engine_stalled"
        gate.open()
        reader.end()
        served.wait(lambda: served.client.get("/health").status_code == 200)

        def broken() -> Any:
            raise LookupError("a bug")

        served.engine.step = broken  # type: ignore[method-assign]
        for stream in (True, False):
            response = served.post("/v1/completions", prompt="x", stream=stream)
            assert "the engine has failed" in response.text
        assert served.post("/v1/completions", prompt="x").status_code == 503
        assert served.client.get("/health").status_code == 503
        del served.engine.step  # type: ignore[method-assign]
        served.engine.abort(next(iter(served.engine._scheduler._entries)))
