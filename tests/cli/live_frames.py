"""Lines of a live view, as a server sends them, and servers that answer with what a test says."""

from __future__ import annotations

import base64
import json
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

START: dict[str, Any] = {
    "kind": "start",
    "version": 1,
    "pagedkv": "0.1.0",
    "model": "fake",
    "block_size": 16,
    "num_blocks": 100,
    "num_cpu_blocks": 0,
    "max_num_seqs": 8,
    "shows_text": False,
}
STATISTICS: dict[str, float] = {
    "num_blocks": 100,
    "num_free": 50,
    "num_cached_idle": 25,
    "num_referenced": 20,
    "num_shared": 4,
    "num_in_transit": 2,
    "num_draining": 3,
    "block_occupancy": 0.25,
    "token_occupancy": 0.2,
    "num_tokens": 320,
    "num_cpu_blocks": 0,
    "prefix_cache_queries": 400,
    "prefix_cache_hits": 100,
    "num_evictions": 7,
    "num_copies": 1,
    "num_swapped_out": 6,
    "num_swapped_in": 5,
}


def packed(*rows: tuple[int, int, int]) -> str:
    return base64.b64encode(b"".join(struct.pack("<3i", *row) for row in rows)).decode()


def frame(time_s: float = 1.0, **parts: Any) -> dict[str, Any]:
    queues = {"running": 0, "waiting": 0, "swapped": 0}
    return {"kind": "frame", "time_s": time_s, "queues": queues, **parts}


def step(number: int, end_s: float, prefill: int, decode: int, *events: int) -> list[float]:
    """events: preempted, copies, swapped out, swapped in, evicted."""
    return [number, end_s - 0.01, end_s, prefill, decode, 1, *events, *[0] * (5 - len(events))]


def request(lane: int, state: str, **parts: Any) -> dict[str, Any]:
    named = {"lane": lane, "id": f"r{lane}", "seq": lane, "rank": lane, "state": state}
    return {**named, "prompt_len": 10, "max_tokens": 20, "user": None, "why": None, **parts}


def lines(*frames: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in frames)


@contextmanager
def answering(
    stream: bytes,
    *,
    status: int = 200,
    metrics: bytes = b"",
    headers: dict[str, str] | None = None,
    stays_open: threading.Event | None = None,
) -> Iterator[tuple[str, list[dict[str, str]]]]:
    """(address, headers of the requests that came). stays_open: set, it ends the stream."""
    seen: list[dict[str, str]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append({"path": self.path, **{k.lower(): v for k, v in self.headers.items()}})
            is_stream = self.path == "/inspect/stream"
            self.send_response(status if is_stream else 200)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(stream if is_stream else metrics)
            if is_stream and stays_open is not None:
                stays_open.wait(30)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", seen
    finally:
        if stays_open is not None:
            stays_open.set()
        server.shutdown()
        thread.join()
        server.server_close()
