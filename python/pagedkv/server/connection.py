"""One connection, as uvicorn and h11 run it, with bounds on how long its next request may take to
come, into how many parts it may fall, and how much of it is worked on without a pause.
"""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

# A request's line and headers that are larger than this end the connection while they come.
MAX_HEAD_BYTES = 2**16
# Lines of a head: h11 takes some 10 us for each.
_MAX_LINES = 256
# Parts of a body: each takes some 30 us, however small it is. 4 MiB may come in parts of 256 bytes.
_MAX_PARTS = 2**14
# Read at a time: 8 KiB in chunks of one byte hold everybody up for 40 ms, asyncio's 256 KiB would
# for a second.
_READ_BYTES = 2**13


class Arrivals:
    """Connections whose next request has not come completely, that which waits the longest first;
    of one server. At most max_connections at a time: beyond, the first of these goes.
    """

    def __init__(self, max_connections: int) -> None:
        self.max_connections = max_connections
        self.waiting: dict[Connection, None] = {}


class _BoundedConnection(h11.Connection):
    """Refuses a head of too many lines, and a body of too many parts."""

    num_lines = 0
    num_parts = 0

    def receive_data(self, data: bytes) -> None:
        if self.their_state is h11.IDLE:  # and not that of a request behind this one
            self.num_lines += data.partition(b"\r\n\r\n")[0].count(b"\n")
        super().receive_data(data)

    def next_event(self) -> Any:
        if self.num_lines > _MAX_LINES:
            raise h11.RemoteProtocolError(f"the head has more than {_MAX_LINES} lines")
        event = super().next_event()
        if type(event) is h11.Request:
            self.num_lines = self.num_parts = 0
        elif type(event) is h11.Data:
            self.num_parts += 1
            if self.num_parts > _MAX_PARTS:
                raise h11.RemoteProtocolError(f"the body comes in more than {_MAX_PARTS} parts")
        return event


class Connection(H11Protocol):
    """HTTP/1.1 that does not wait for ever for the head of a request. A class for each server has
    its own arrivals and head_timeout_s.
    """

    arrivals: Arrivals
    head_timeout_s: float

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = _BoundedConnection(h11.SERVER, MAX_HEAD_BYTES)

    def connection_made(self, transport: Any) -> None:
        if hasattr(transport, "max_size"):  # asyncio's own; others read less at a time
            transport.max_size = _READ_BYTES
        super().connection_made(transport)
        self._head_timer = self.loop.call_later(self.head_timeout_s, self._give_up)
        waiting = self.arrivals.waiting
        waiting[self] = None
        if len(self.connections) > self.arrivals.max_connections:
            next(iter(waiting))._give_up()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_timer.cancel()
        self.arrivals.waiting.pop(self, None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._note_arrival()
        if self.conn.their_state is not h11.IDLE:
            self._head_timer.cancel()
        elif self._head_timer.cancelled():  # the next request on the same connection has begun
            self._head_timer = self.loop.call_later(self.head_timeout_s, self._give_up)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._note_arrival()

    def _note_arrival(self) -> None:
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self.arrivals.waiting.pop(self, None)
        elif not self.transport.is_closing():
            self.arrivals.waiting.setdefault(self)

    def _give_up(self) -> None:
        self.arrivals.waiting.pop(self, None)
        self.transport.close()


def new_connection_class(max_connections: int, head_timeout_s: float) -> type[asyncio.Protocol]:
    """For one server."""
    members = {"arrivals": Arrivals(max_connections), "head_timeout_s": head_timeout_s}
    return type("ServerConnection", (Connection,), members)
