"""One request to an OpenAI-compatible server, streamed, and when its pieces came."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from pagedkv.cli.load.prompts import LoadPrompt

_MAX_DETAIL_CHARS = 300


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go, and what they have in common.

    Args:
        base_url: scheme, host and port, and what stands before /v1.
        api_key: sent as a bearer token; None: none is.
        temperature: None: the server's default.
        ignore_eos: answers go on past the model's end token; an extension that not all know.
    """

    base_url: str
    model: str = ""
    api_key: str | None = field(default=None, repr=False)
    temperature: float | None = 0.0
    ignore_eos: bool = False

    def url(self, path: str) -> str:
        return self.base_url.rstrip("/").removesuffix("/v1") + path

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.api_key is None else {"authorization": f"Bearer {self.api_key}"}

    def request(self, prompt: LoadPrompt) -> tuple[str, dict[str, Any]]:
        """(path, body)."""
        body: dict[str, Any] = {
            "model": self.model,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.temperature is not None:
            body["temperature"] = self.temperature
        if self.ignore_eos:
            body["ignore_eos"] = True
        if prompt.is_chat:
            asked = {"messages": prompt.content, "max_completion_tokens": prompt.output_len}
            return "/v1/chat/completions", body | asked
        return "/v1/completions", body | {"prompt": prompt.content, "max_tokens": prompt.output_len}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one request. Times in seconds on the event loop's clock.

    Args:
        scheduled_s: when it was to be sent.
        sent_s: when it was sent: later, where max_concurrency held it back or this program was
            late.
        piece_s: when each piece of its answer came: events with text, or with a finish reason
            where no text came.
        end_s: when the answer had ended, or the error came.
        num_prompt_tokens, num_output_tokens: as the server tells; pieces are counted where it does
            not, and prompts not at all.
        error: what kind of error it was; None: all is well. detail: in the server's words.
    """

    scheduled_s: float
    sent_s: float
    piece_s: tuple[float, ...]
    end_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    error: str | None = None
    detail: str = ""


class _Failed(Exception):
    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(kind)
        self.kind = kind
        self.detail = detail[:_MAX_DETAIL_CHARS]


class _Answer:
    """The pieces so far."""

    def __init__(self) -> None:
        self.piece_s: list[float] = []
        self.usage: dict[str, Any] = {}
        self.is_done = False

    def take(self, data: bytes, now_s: float) -> None:
        """An event's data."""
        if data == b"[DONE]":
            self.is_done = True
            return
        try:
            event = json.loads(data)
        except ValueError:
            event = None
        if not isinstance(event, dict):
            raise _Failed("not an event of the API", data.decode(errors="replace"))
        if event.get("error"):
            raise _Failed("error in the stream", _message(event))
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices") or ():
            text = choice.get("text") or (choice.get("delta") or {}).get("content")
            if text or (choice.get("finish_reason") and not self.piece_s):
                self.piece_s.append(now_s)
                break

    def check(self) -> None:
        """Raises _Failed unless it is complete."""
        if not self.is_done:
            raise _Failed("stream broken off")
        if not self.piece_s:
            raise _Failed("empty answer")


async def send(
    client: httpx.AsyncClient,
    target: Target,
    prompt: LoadPrompt,
    *,
    scheduled_s: float,
    timeout_s: float,
) -> Outcome:
    """Send a request now and read its answer. Errors are part of the outcome."""
    clock = asyncio.get_running_loop().time
    answer, sent_s = _Answer(), clock()
    kind, detail = None, ""
    try:
        await asyncio.wait_for(_read(client, target, prompt, answer), timeout_s)
        answer.check()
    except _Failed as failure:
        kind, detail = failure.kind, failure.detail
    except (asyncio.TimeoutError, httpx.TimeoutException):
        kind, detail = "timeout", f"not complete after {timeout_s:g} s"
    except httpx.ConnectError as error:
        kind, detail = "cannot connect", str(error)
    except httpx.HTTPError as error:
        kind, detail = "connection lost", str(error)
    return Outcome(
        scheduled_s,
        sent_s,
        tuple(answer.piece_s),
        clock(),
        answer.usage.get("prompt_tokens") or 0,
        answer.usage.get("completion_tokens") or len(answer.piece_s),
        kind,
        detail,
    )


async def _read(
    client: httpx.AsyncClient, target: Target, prompt: LoadPrompt, answer: _Answer
) -> None:
    clock = asyncio.get_running_loop().time
    path, body = target.request(prompt)
    async with client.stream(
        "POST", target.url(path), json=body, headers=target.headers
    ) as response:
        if response.status_code != 200:
            raise _Failed(f"HTTP {response.status_code}", _told(await response.aread()))
        async for line in _lines(response):
            if line.startswith(b"data:"):
                answer.take(line[5:].strip(), clock())


async def _lines(response: httpx.Response) -> AsyncIterator[bytes]:
    """Lines of an event stream: they end where ASCII's do, not where Unicode's may."""
    rest = b""
    async for data in response.aiter_bytes():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line
    yield rest


def _told(body: bytes) -> str:
    """An error's message."""
    try:
        given = json.loads(body)
    except ValueError:
        given = None
    return _message(given) if isinstance(given, dict) else body.decode(errors="replace")


def _message(given: dict[str, Any]) -> str:
    error = given.get("error")
    return str(error.get("message") if isinstance(error, dict) else error or given)
