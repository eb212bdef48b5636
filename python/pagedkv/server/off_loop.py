"""OffLoopRoute: a route whose JSON body is parsed on another thread."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.responses import Response

# Parsing a smaller body takes less than handing it over.
_SMALL_BYTES = 2**16
# No object of the API has as many members (logit_bias may have 1,024). Checked here, since each
# member that a body should not have becomes an error, and some 100,000 take seconds to list.
_MAX_MEMBERS = 2048


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
        text = body.decode()
    except UnicodeDecodeError as error:
        raise json.JSONDecodeError("the body is not UTF-8", "", error.start) from None
    try:
        return json.loads(text, object_pairs_hook=_object)
    except RecursionError:
        raise json.JSONDecodeError("the body is nested too deeply", "", 0) from None
    except json.JSONDecodeError:
        raise
    except ValueError as error:  # a number of thousands of digits
        raise json.JSONDecodeError(str(error), "", 0) from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > _MAX_MEMBERS:
        raise ValueError(f"an object has {len(pairs)} members; at most {_MAX_MEMBERS} are read")
    return dict(pairs)
