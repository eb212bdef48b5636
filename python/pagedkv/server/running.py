"""serve: an application on a socket until it is told to stop, by uvicorn, one process."""

from __future__ import annotations

import asyncio
import gc
import resource
import socket
from collections.abc import Callable, Sequence

import uvicorn
from fastapi import FastAPI

from pagedkv.server.connection import new_connection_class
from pagedkv.server.guards import LOOPBACK_HOSTS
from pagedkv.server.service import Service

# Of the files that this process may open: for the model, logs, and connections being closed.
_OTHER_FILES = 64
# Connections taken on without a pause, and those that the system lets wait meanwhile.
_NUM_ACCEPTED = 64
_BACKLOG = 2048
# Beyond drain_s, for the last events of streams that were ended.
_LAST_EVENTS_S = 5


class Server(uvicorn.Server):
    """Told to stop, it takes no more connections and lets answers end; those that have not ended
    after drain_s are aborted, and their streams end as streams do. on_started: called when it
    answers.
    """

    def __init__(self, app: FastAPI, *, on_started: Callable[[], None] = lambda: None) -> None:
        service = app.state.service
        assert isinstance(service, Service)
        self._service = service
        self._on_started = on_started
        limits = service.limits
        max_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = max(min(limits.max_connections, max_files - _OTHER_FILES), 1)
        super().__init__(
            uvicorn.Config(
                app,
                http=new_connection_class(most, limits.body_timeout_s),
                ws="none",
                backlog=_NUM_ACCEPTED,
                timeout_graceful_shutdown=int(limits.drain_s) + _LAST_EVENTS_S,
                server_header=False,
                proxy_headers=False,
                log_config=None,
                access_log=False,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        # What is loaded by now stays: looked through again and again by the garbage collector, it
        # would hold up engine and loop for 100 ms each time.
        gc.collect()
        gc.freeze()
        await super().startup(sockets)
        if self.started:
            for bound in sockets or ():
                bound.listen(_BACKLOG)
            self._on_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.stopping.set()
        drain_s = self._service.limits.drain_s
        timer = asyncio.get_running_loop().call_later(drain_s, self._service.engine.abort_all)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()
            gc.unfreeze()


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
