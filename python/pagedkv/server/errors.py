"""Errors as OpenAI's clients read them: {"error": {message, type, param, code}}. What is told is
about the request; what went wrong inside goes to the log.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from pagedkv.engine import EngineDead

logger = logging.getLogger(__name__)

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    500: "server_error",
    503: "server_error",
    504: "timeout_error",
}
_MAX_CHARS = 500
_MAX_SHOWN_CHARS = 60
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


class Refusal(Exception):
    """A request that is answered by an error. param: the field that is wrong."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers
        self.body = error_body(status, message, param=param, code=code)


def error_body(
    status: int, message: str, *, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    kind = _KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": printable(message), "type": kind, "param": param, "code": code}}


def printable(text: str) -> str:
    """Text that may hold what a client sent, fit for a log or a message: short, in one line."""
    text = text[: _MAX_CHARS + 1]  # what is cut off need not be looked at
    text = _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)
    return text if len(text) <= _MAX_CHARS else text[: _MAX_CHARS - 3] + "..."


def error_response(
    status: int, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
) -> Response:
    return Response(
        json.dumps(body), status, headers=dict(headers or {}), media_type="application/json"
    )


def refused(error: Exception, *fields: str) -> Refusal:
    """What the engine found wrong with a request, as an error of the client's. fields: of the
    request; the one that the message begins with, after the request's name, is its param.
    """
    text = re.sub(r"^(a fork of )?request '[^']*':? ?", "", str(error))
    first = re.match(r"\w+", text)
    param = first[0] if first is not None and first[0] in fields else None
    if param is None and text.startswith(("the prompt ", "token id ")):
        param = "prompt" if "prompt" in fields else "messages"
        text = f"{param}: {text}"
    return Refusal(400, text, param=param)


def install(app: FastAPI) -> None:
    """Let every error of the app leave it in this form."""

    @app.exception_handler(Refusal)
    async def on_refusal(request: Request, error: Refusal) -> Response:
        return error_response(error.status, error.body, error.headers)

    @app.exception_handler(RequestValidationError)
    async def on_invalid(request: Request, error: RequestValidationError) -> Response:
        message, param = _first_problem(error)
        return error_response(400, error_body(400, message, param=param))

    @app.exception_handler(HTTPException)
    async def on_http(request: Request, error: HTTPException) -> Response:
        message = str(error.detail)
        if error.status_code in (404, 405):
            message = f"this server has no {request.method} {request.scope['path']}"
        body = error_body(error.status_code, message)
        return error_response(error.status_code, body, error.headers)

    @app.exception_handler(EngineDead)
    async def on_dead(request: Request, error: EngineDead) -> Response:
        return error_response(503, error_body(503, str(error)))

    @app.exception_handler(Exception)
    async def on_bug(request: Request, error: Exception) -> Response:
        logger.error("an error of the server's own", exc_info=error)
        body = error_body(500, "an error of the server's own; see its log")
        # The error goes on to uvicorn, which closes the connection: a client that is not told would
        # send its next request into that.
        return error_response(500, body, {"connection": "close"})


def _first_problem(error: RequestValidationError) -> tuple[str, str | None]:
    """(message, field) of the first thing that is wrong with a body."""
    first = error.errors()[0]
    place = [str(part) for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid":
        why = first.get("ctx", {}).get("error", "")
        return f"the body is not valid JSON: {why}", None
    if not place and first["type"] == "model_attributes_type":
        return "the body must be a JSON object of content-type application/json", None
    if not place:  # of several fields; the message begins with one that the body has
        message = str(first["msg"]).removeprefix("Value error, ")
        word = message.partition(" ")[0]
        return message, word if isinstance(error.body, dict) and word in error.body else None
    # Of a union pydantic names its arms too; the field is the first part.
    name, path = place[0], printable(".".join(place))
    if first["type"] == "extra_forbidden":
        return f"{path} is not supported by this server", printable(name)
    return f"{path}: {first['msg']}{_got(first)}", printable(name)


def _got(problem: Mapping[str, Any]) -> str:
    """The value that is wrong, where it is one that is soon said."""
    value = problem["input"]
    if problem["type"] == "missing":  # the input is what it misses from
        return ""
    if isinstance(value, str) and len(value) > _MAX_SHOWN_CHARS:
        value = value[:_MAX_SHOWN_CHARS] + "..."
    if isinstance(value, (list, dict)):
        return f", got {'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    return f", got {json.dumps(value)[: 2 * _MAX_SHOWN_CHARS]}"
