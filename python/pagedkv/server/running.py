"""serve: an application on a socket until it is told to stop, by uvicorn, one process."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from typing import Any

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from pagedkv.server.guards import LOOPBACK_HOSTS
from pagedkv.server.service import Service

# A request's line and headers that are larger than this end the connection while they come.
_MAX_HEAD_BYTES = 2**16
# Beyond drain_s, for the last events of streams that were ended.
_LAST_EVENTS_S = 5


class _TimedProtocol(H11Protocol):
    """HTTP/1.1 that does not wait for ever for the head of a request."""

    head_timeout_s = 30.0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._head_timer = self.loop.call_later(self.head_timeout_s, self._give_up)

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._head_timer.cancel()
        elif self._head_timer.cancelled():  # the next request on the same connection has begun
            self._head_timer = self.loop.call_later(self.head_timeout_s, self._give_up)

    def _give_up(self) -> None:
        self.transport.close()


class Server(uvicorn.Server):
    """Told to stop, it takes no more connections and lets answers end; those that have not ended
    after drain_s are aborted, and their streams end as streams do.
    """

    def __init__(self, app: FastAPI) -> None:
        service = app.state.service
        assert isinstance(service, Service)
        self._service = service

        class Protocol(_TimedProtocol):
            head_timeout_s = service.limits.body_timeout_s

        super().__init__(
            uvicorn.Config(
                app,
                http=Protocol,
                ws="none",
                h11_max_incomplete_event_size=_MAX_HEAD_BYTES,
                timeout_graceful_shutdown=int(service.limits.drain_s) + _LAST_EVENTS_S,
                server_header=False,
                proxy_headers=False,
                log_config=None,
                access_log=False,
            )
        )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.stopping.set()
        drain_s = self._service.limits.drain_s
        timer = asyncio.get_running_loop().call_later(drain_s, self._service.engine.abort_all)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()


def listen(host: str, port: int) -> socket.socket:
    """A bound socket; port 0 takes a free one. Raises OSError naming the address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio switches Nagle's algorithm off only for sockets that say they are TCP's; with it, each
    # event of a stream would wait for the acknowledgement of the one before: 40 ms.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    return bound


def hosts_of(host: str, extra: Sequence[str]) -> tuple[str, ...]:
    """Names that a server bound to host answers to: this machine's own, host, and extra ones."""
    own = () if host in ("0.0.0.0", "::") else (host,)
    return (*LOOPBACK_HOSTS, *own, *extra)
