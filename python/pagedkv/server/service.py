"""Service: what the routes of one server share."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request

from pagedkv.engine import AsyncEngine
from pagedkv.server.conversations import Conversations, Origin
from pagedkv.server.errors import Refusal
from pagedkv.server.limits import Limits
from pagedkv.server.room import Room
from pagedkv.server.tokenising import Tokenising


@dataclass(frozen=True, slots=True)
class Service:
    """model: the name that clients know it by. separates_tenants: prompts that come with different
    API keys share no cached blocks. stopping: set when the server is told to stop; what would never
    end by itself ends then.
    """

    engine: AsyncEngine
    model: str
    limits: Limits
    room: Room
    tokenising: Tokenising
    created: int
    conversations: Conversations
    separates_tenants: bool = False
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    _secret: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.model:
            raise Refusal(
                404,
                f"the model {name!r} does not exist here; this server has {self.model!r}",
                param="model",
                code="model_not_found",
            )

    def cache_salt(self, request: Request, salt: str | None) -> str | None:
        """The salt of a request's prompt: the client's, and that of its API key where these are
        kept apart. Nobody can guess it, so nobody learns from timing what others have asked.
        """
        if not self.separates_tenants:
            return salt
        own = hashlib.blake2b(f"{self.tenant(request)} {salt or ''}".encode(), key=self._secret)
        return own.hexdigest()

    def tenant(self, request: Request) -> str:
        """Whose a request is: that of its API key where these are kept apart."""
        if not self.separates_tenants:
            return ""
        key = request.headers["authorization"].partition(" ")[2].strip()
        return hashlib.blake2b(key.encode(), key=self._secret).hexdigest()

    def origin(
        self,
        request: Request,
        *,
        salt: str | None,
        keep_s: float | None = None,
        messages: Sequence[dict[str, Any]] | None = None,
    ) -> Origin:
        """Of a response to this request. salt: of its blocks. Raises Refusal for a keep_s that is
        too long.
        """
        if keep_s is not None and keep_s > self.limits.max_keep_s:
            raise Refusal(
                400,
                f"keep_seconds is {keep_s:g}; at most {self.limits.max_keep_s:g} are allowed",
                param="keep_seconds",
            )
        told = None if messages is None else tuple(messages)
        return Origin(self.tenant(request), told, keep_s, salt)


def service_of(request: Request) -> Service:
    service = request.app.state.service
    assert isinstance(service, Service)
    return service
