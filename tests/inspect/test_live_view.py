"""The live view's routes: guarded as others, nothing is done while nobody watches, and watching
ends with the client, the server or the engine.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from frame_reader import FrameReader
from serving import WAIT_S
from test_disconnects import Gate
from watched import Watched, watched

from pagedkv.inspect import live
from pagedkv.inspect.live import MAX_VIEWERS, LiveView, Viewer, interval_s
from pagedkv.server import Access

PROMPT: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def shown(tokenizer_folder: Path) -> Iterator[Watched]:
    with watched(tokenizer_folder, num_gpu_blocks_override=60, block_size=4) as one:
        yield one


class Client:
    """Reads the stream; what it knows is in reader."""

    def __init__(self, shown: Watched, stack: ExitStack, **headers: str) -> None:
        self._client = stack.enter_context(httpx.Client(timeout=WAIT_S))
        request = self._client.stream("GET", shown.url + "/stream", headers=headers)
        self.response = stack.enter_context(request)
        assert self.response.status_code == 200, self.response.read()
        self._lines = (line for line in self.response.iter_lines() if line)
        self.start = json.loads(next(self._lines))
        self.reader = FrameReader(self.start["num_blocks"])
        self.frames: list[dict[str, Any]] = []

    def next(self) -> dict[str, Any]:
        self.frames.append(json.loads(next(self._lines)))
        self.reader.apply(self.frames[-1])
        return self.frames[-1]

    def read_to_step(self, number: int) -> None:
        while self.last_step < number:
            self.next()

    @property
    def last_step(self) -> int:
        return max((row[0] for frame in self.frames for row in frame.get("steps", [])), default=0)

    def has_ended(self) -> bool:
        return next(self._lines, None) is None


def test_frames_follow_a_run_and_equal_the_manager(shown: Watched) -> None:
    with ExitStack() as stack:
        client = Client(shown, stack)
        assert client.start["kind"] == "start"
        assert (client.start["model"], client.start["block_size"]) == ("fake", 4)
        assert client.next()["full"] is True
        shown.served.complete("x" * 30, n=3, **(PROMPT | {"temperature": 1, "seed": 1}))
        num_steps = shown.served.fake.num_steps
        client.read_to_step(num_steps)
        rows = [row for frame in client.frames for row in frame.get("steps", [])]
        assert [row[0] for row in rows] == list(range(1, num_steps + 1))
        assert sum(row[3] for row in rows) == 30
        assert all(frame["cpu_us"] > 0 for frame in client.frames[2:])
        snapshot, queues, _ = shown.looks[-1]
        client.reader.check(snapshot, queues, {})
        assert client.reader.statistics["num_copies"] == 2


def test_nothing_is_done_while_nobody_watches(
    shown: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_: Any) -> Any:
        raise AssertionError("called although nobody watches")

    with monkeypatch.context() as patch:
        patch.setattr("pagedkv.engine.engine.RunView", forbidden)
        patch.setattr(live, "FrameEncoder", forbidden)
        shown.served.complete("Hello", **PROMPT)
        assert shown.served.client.get("/inspect").status_code == 200
        assert shown.num_watchers == 0
    with ExitStack() as stack:
        clients = [Client(shown, stack), Client(shown, stack)]
        for client in clients:
            assert client.next()["full"] is True
        assert shown.num_watchers == 1  # both see the same looks
    shown.served.wait(lambda: shown.num_watchers == 0)
    num_looks = len(shown.looks)
    shown.served.complete("Hello again", **PROMPT)
    assert len(shown.looks) == num_looks
    with ExitStack() as stack:  # and once more
        client = Client(shown, stack)
        assert client.next()["full"] is True
        assert shown.num_watchers == 1


def test_what_no_step_tells_of_is_seen_too(shown: Watched) -> None:
    with ExitStack() as stack:
        client = Client(shown, stack)
        client.next()
        shown.served.complete("Hello", **PROMPT)
        client.read_to_step(shown.served.fake.num_steps)
        shown.served.ok("/reset_prefix_cache")
        assert client.next()["statistics"]["num_cached_idle"] == 0


def test_an_engine_without_news_is_not_looked_at(
    shown: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "QUIET_INTERVAL_S", 1e6)
    until, num_rounds = LiveView._until, 0

    async def counted(view: LiveView, due_s: float) -> None:
        nonlocal num_rounds
        num_rounds += 1
        await until(view, due_s)

    monkeypatch.setattr(LiveView, "_until", counted)
    with ExitStack() as stack:
        client = Client(shown, stack)
        client.next()
        num_looks, before = len(shown.looks), num_rounds
        shown.served.wait(lambda: num_rounds >= before + 5)
        assert len(shown.looks) == num_looks == 1
        shown.served.complete("Hello", **PROMPT)
        client.read_to_step(shown.served.fake.num_steps)


def test_a_look_waits_until_the_last_one_is_paid_for() -> None:
    assert interval_s(0.0) == live.MIN_INTERVAL_S
    for cpu_s in (0.001, 0.01, 1.0):
        assert cpu_s / interval_s(cpu_s) <= live.MAX_PART < 0.01


def test_a_viewer_that_reads_slowly_gets_a_whole_frame_instead_of_a_queue() -> None:
    async def run() -> None:
        viewer = Viewer()
        viewer.is_behind = False
        for number in range(live._MAX_FRAMES):
            viewer.put(b"%d\n" % number)
        assert not viewer.is_behind
        viewer.put(b"too much\n")
        assert viewer.is_behind
        viewer.put(b"whole\n")
        viewer.end()
        assert [line async for line in viewer.lines()] == [b"whole\n"]

    asyncio.run(run())


def test_a_viewer_hears_that_the_server_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "HEARTBEAT_S", 0.001)

    async def run() -> None:
        lines = Viewer().lines()
        assert await anext(lines) == b"\n"

    asyncio.run(run())


def test_only_so_many_watch_at_a_time(shown: Watched) -> None:
    with ExitStack() as stack:
        clients = [Client(shown, stack) for _ in range(MAX_VIEWERS)]
        response = shown.served.client.get("/inspect/stream")
        assert response.status_code == 503
        assert "8 watch already" in response.json()["error"]["message"]
        assert all(client.next()["full"] for client in clients)
    shown.served.wait(lambda: shown.num_watchers == 0)
    with ExitStack() as stack:
        Client(shown, stack).next()


def test_a_server_that_stops_does_not_wait_for_viewers(shown: Watched) -> None:
    with ExitStack() as stack:
        client = Client(shown, stack)
        client.next()
        gate = Gate(shown.served)
        shown.served.server.should_exit = True
        assert client.has_ended()
        gate.open()


def test_watching_ends_when_the_engine_fails(tokenizer_folder: Path) -> None:
    with watched(tokenizer_folder) as shown, ExitStack() as stack:
        client = Client(shown, stack)
        client.next()

        def broken() -> Any:
            raise SystemError("broken")

        shown.served.engine.step = broken  # type: ignore[method-assign]
        assert shown.served.post("/v1/completions", prompt="Hello").status_code == 503
        assert client.has_ended()


def test_the_view_is_guarded_as_other_routes_are(tokenizer_folder: Path) -> None:
    with watched(tokenizer_folder, app_options={"access": Access(("the-key",))}) as shown:
        get = shown.served.client.get
        asked = get("/inspect")
        assert asked.status_code == 401
        assert asked.headers["www-authenticate"] == "Bearer"
        assert 'id="key"' in asked.text
        assert get("/inspect/stream").json()["error"]["type"] == "authentication_error"
        assert get("/inspect/stream?key=the-key").status_code == 401
        assert shown.served.post("/inspect").json()["error"]["type"] == "authentication_error"
        key = {"authorization": "Bearer the-key"}
        assert get("/inspect", headers=key).text == asked.text
        for path in ("/inspect", "/inspect/stream"):
            assert get(path, headers={**key, "host": "evil.example"}).status_code == 400
        with ExitStack() as stack:
            assert Client(shown, stack, **key).next()["full"] is True


def test_the_page_allows_itself_and_nothing_else(shown: Watched) -> None:
    response = shown.served.client.get("/inspect")
    policy = response.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; ")
    assert policy.endswith("frame-ancestors 'none'")
    for tag in ("script", "style"):
        (text,) = re.findall(f"<{tag}>(.*?)</{tag}>", response.text, flags=re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert not re.findall(r"https?://|//[a-z]+\.[a-z]", response.text)
    assert response.headers["cache-control"] == "no-store"
    assert "/inspect" not in shown.served.client.get("/openapi.json").json()["paths"]
