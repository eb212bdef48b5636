"""Service: what the routes of one server share."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass, field

from fastapi import Request

from pagedkv.engine import AsyncEngine
from pagedkv.server.errors import Refusal
from pagedkv.server.limits import Limits
from pagedkv.server.room import Room
from pagedkv.server.tokenising import Tokenising


@dataclass(frozen=True, slots=True)
class Service:
    """model: the name that clients know it by. separates_tenants: prompts that come with different
    API keys share no cached blocks.
    """

    engine: AsyncEngine
    model: str
    limits: Limits
    room: Room
    tokenising: Tokenising
    created: int
    separates_tenants: bool = False
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
        key = request.headers.get("authorization", "")
        own = hashlib.blake2b(f"{len(key)} {key}{salt or ''}".encode(), key=self._secret)
        return own.hexdigest()


def service_of(request: Request) -> Service:
    service = request.app.state.service
    assert isinstance(service, Service)
    return service
