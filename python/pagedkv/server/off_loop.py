"""OffLoopRoute: a route whose JSON body is parsed on another thread."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.responses import Response

# Parsing a smaller body takes less than handing it over.
_SMALL_BYTES = 2**16
# What a body may consist of. Nothing else runs while it is parsed, and each list or object costs a
# microsecond or more; each member that an object should not have becomes an error. No object of the
# API has as many members (logit_bias may have 1,024).
_MAX_CONTAINERS = 2**15
_MAX_MEMBERS = 2048
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)


class OffLoopRequest(Request):
    """Its JSON may be large."""

    async def json(self) -> Any:
        """Raises json.JSONDecodeError for whatever is no JSON text in UTF-8."""
        body = await self.body()
        if len(body) <= _SMALL_BYTES:
            return _parsed(body)
        return await asyncio.get_running_loop().run_in_executor(None, _parsed, body)


class OffLoopRoute(APIRoute):
    """Takes part in FastAPI's own reading and checking of bodies."""

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
        handle = super().get_route_handler()

        async def handler(request: Request) -> Response:
            return await handle(OffLoopRequest(request.scope, request.receive))

        return handler


def _parsed(body: bytes) -> Any:
    try:
        if _num_containers(body) > _MAX_CONTAINERS:
            raise ValueError(f"more than {_MAX_CONTAINERS} lists and objects")
        value = from_json(body, cache_strings="none")
        _check_members(value)
    except ValueError as error:
        raise json.JSONDecodeError(str(error), "", 0) from None
    return value


def _num_containers(body: bytes) -> int:
    """Lists and objects; brackets in texts are left out only where they would be too many."""
    count = body.count(b"[") + body.count(b"{")
    if count > _MAX_CONTAINERS:
        rest = _STRING.sub(b"", body)
        count = rest.count(b"[") + rest.count(b"{")
    return count


def _check_members(value: Any) -> None:
    """REQUIRES as few containers, and as deep, as the parser lets through."""
    if isinstance(value, dict):
        if len(value) > _MAX_MEMBERS:
            raise ValueError(f"an object has {len(value)} members; at most {_MAX_MEMBERS} are read")
        value = list(value.values())
    if isinstance(value, list):
        for one in value:
            if type(one) is dict or type(one) is list:
                _check_members(one)
