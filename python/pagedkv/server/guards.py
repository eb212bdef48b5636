"""What stands before every route: host, key, size and time of a request. Deny by default.

One pure ASGI middleware, outside of everything else: it looks at the path that will be routed, and
lets nothing but /health through without a key.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagedkv.server.errors import error_body, error_response
from pagedkv.server.limits import Limits

# Whoever may not know the key: load balancers.
OPEN_PATHS = frozenset(["/health"])
LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "::1")

# Of the body of a request that is refused: so much beyond the limit is read, for so long.
_DRAIN_BYTES = 2**16
_DRAIN_S = 1.0

_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[0-9a-zA-Z._-]+)(:\d{1,5})?")


@dataclass(frozen=True, slots=True)
class Access:
    """Who may come in. api_keys: any of them; none: no key is needed. allowed_hosts: names that the
    Host header may have, so that no other site's name leads a browser here; "*" for all.
    """

    api_keys: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = LOOPBACK_HOSTS

    def __post_init__(self) -> None:
        for key in self.api_keys:
            if not key or not key.isascii() or not key.isprintable() or " " in key:
                raise ValueError("an API key is printable ASCII without spaces, and not empty")


class Guard:
    """See the module. key_pages: path -> the body of a 401 there, for a browser (create_app)."""

    def __init__(
        self,
        app: ASGIApp,
        access: Access,
        limits: Limits,
        key_pages: Mapping[str, Callable[[int], Response]],
    ) -> None:
        self._app = app
        self._limits = limits
        self._key_pages = key_pages
        self._digests = [_digest(key.encode()) for key in access.api_keys]
        self._num_held_bytes = 0  # of the bodies of all requests that are being answered
        self._hosts = {host.lower().strip("[]") for host in access.allowed_hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            raise RuntimeError(f"this server has no {scope['type']}")
        refusal = self._refusal(scope)
        if refusal is not None:
            status, message = refusal
            response = error_response(status, error_body(status, message))
            if status == 401:
                if scope["method"] == "GET" and scope["path"] in self._key_pages:
                    response = self._key_pages[scope["path"]](status)
                response.headers["www-authenticate"] = "Bearer"
            response.headers["connection"] = "close"
            await _drain(receive, self._limits.max_body_bytes + _DRAIN_BYTES)
            await response(scope, receive, send)
            return
        await self._limited(scope, receive, send)

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        headers: Sequence[tuple[bytes, bytes]] = scope["headers"]
        num_bytes = sum(len(name) + len(value) for name, value in headers)
        if num_bytes > self._limits.max_header_bytes:
            most = self._limits.max_header_bytes
            return 431, f"the headers have {num_bytes} bytes; at most {most} are read"
        hosts = [value for name, value in headers if name == b"host"]
        if not self._knows_host(hosts):
            given = b", ".join(hosts).decode("latin-1")
            return 400, f"this server does not answer to the Host {given!r}; see --allowed-host"
        if self._digests and scope["path"] not in OPEN_PATHS and not self._has_key(headers):
            return 401, "an API key is needed: Authorization: Bearer KEY"
        if any(name == b"content-encoding" and value != b"identity" for name, value in headers):
            return 400, "compressed bodies are not read"
        for value in (value for name, value in headers if name == b"content-length"):
            if value.isdigit() and int(value[:20]) > self._limits.max_body_bytes:
                return 413, self._too_large
        return None

    def _knows_host(self, hosts: Sequence[bytes]) -> bool:
        if "*" in self._hosts:
            return True
        if len(hosts) != 1:
            return False
        match = _HOST.fullmatch(hosts[0].decode("latin-1"))
        return match is not None and match[1].lower().strip("[]") in self._hosts

    def _has_key(self, headers: Sequence[tuple[bytes, bytes]]) -> bool:
        given = [value for name, value in headers if name == b"authorization"]
        scheme, _, key = (given[0] if len(given) == 1 else b"").partition(b" ")
        digest = _digest(key.strip())
        # All are compared, and whole digests: the time tells nothing about any key.
        matches = [hmac.compare_digest(digest, one) for one in self._digests]
        return scheme.lower() == b"bearer" and any(matches)

    @property
    def _too_large(self) -> str:
        return f"the body is larger than {self._limits.max_body_bytes} bytes"

    @property
    def _too_much(self) -> str:
        most = self._limits.max_held_bytes
        return f"requests with bodies of {most} bytes are being answered; try again later"

    async def _limited(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the app on a body that is bounded in size and in time; beyond, whoever reads it in
        the app gets an HTTPException.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._limits.body_timeout_s
        num_bytes, has_body = 0, False

        async def bounded() -> Message:
            nonlocal num_bytes, has_body
            if has_body:  # what comes now is the client's leaving
                return await receive()
            try:
                left_s = max(deadline_s - loop.time(), 0.001)
                message = await asyncio.wait_for(receive(), left_s)
            except asyncio.TimeoutError:
                raise _broken_off(408, "the body did not arrive in time") from None
            part = len(message.get("body", b""))
            num_bytes += part
            self._num_held_bytes += part
            if num_bytes > self._limits.max_body_bytes:
                await _drain(receive, _DRAIN_BYTES)
                raise _broken_off(413, self._too_large)
            if self._num_held_bytes > self._limits.max_held_bytes:
                await _drain(receive, _DRAIN_BYTES)
                raise HTTPException(
                    429, self._too_much, headers={"connection": "close", "retry-after": "1"}
                )
            has_body = not message.get("more_body", False)
            return message

        try:
            await self._app(scope, bounded, send)
        finally:
            self._num_held_bytes -= num_bytes


async def _drain(receive: Receive, num_bytes: int) -> None:
    """Let a body that is on its way arrive, as far as it is not large: a connection that is closed
    before takes the answer with it.
    """
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + _DRAIN_S
    while num_bytes > 0:
        try:
            message = await asyncio.wait_for(receive(), max(deadline_s - loop.time(), 0.001))
        except asyncio.TimeoutError:
            return
        num_bytes -= len(message.get("body", b""))
        if not message.get("more_body", False):
            return


def _broken_off(status: int, message: str) -> HTTPException:
    return HTTPException(status, message, headers={"connection": "close"})


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
