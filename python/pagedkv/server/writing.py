"""Writer: how answers leave the server, whole or in chunks, whatever the API. completions.py and
chat.py say what a choice looks like.
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pagedkv.engine import EngineDead
from pagedkv.records import CompletionOutput, OutputDelta, RequestOutput
from pagedkv.server.errors import Refusal, error_body
from pagedkv.server.event_stream import DONE, EventStream, event
from pagedkv.server.generation import ClientGone, Generation, check
from pagedkv.server.protocol import GenerationBody
from pagedkv.server.service import Service
from pagedkv.server.usage import usage

# A client that does not read gets this long beyond its request's time for the last event.
_LAST_EVENT_S = 5.0


class Writer(ABC):
    """The answers to one HTTP request. n: choices for each prompt; choice k of prompt i has the
    index i * n + k.
    """

    whole_object: str
    chunk_object: str

    def __init__(
        self, service: Service, response_id: str, request_ids: Sequence[str], n: int
    ) -> None:
        self.service = service
        self.n = n
        self._first_index = {name: i * n for i, name in enumerate(request_ids)}
        self._open = set(range(n * len(request_ids)))  # choices without a finish_reason yet
        self._outputs: list[RequestOutput] = []
        self._head = {
            "id": response_id,
            "created": int(time.time()),
            "model": service.model,
        }

    # -- what the APIs differ in -----------------------------------------------------------

    @abstractmethod
    def choice(self, output: RequestOutput, answer: CompletionOutput) -> dict[str, Any]:
        """What a whole answer adds to its choice: text or message, logprobs."""

    @abstractmethod
    def part(self, index: int, text: str, delta: OutputDelta | None) -> dict[str, Any]:
        """What a piece of an answer adds to its choice. delta None: nothing but its end."""

    def openings(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """(index, what its choice has) of chunks before all others."""
        return iter(())

    def extras(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """What stands beside the choices of a whole response."""
        return {}

    # -- whole -----------------------------------------------------------------------------

    def whole(self, outputs: Sequence[RequestOutput]) -> bytes:
        """The body of a response that does not stream."""
        choices = [
            {
                "index": self._first_index[output.request_id] + answer.index,
                **self.choice(output, answer),
                "finish_reason": answer.finish_reason,
                "stop_reason": answer.stop_reason,
            }
            for output in outputs
            for answer in output.outputs
        ]
        body = {
            **self._head,
            "object": self.whole_object,
            "choices": choices,
            "usage": self.usage(outputs),
            **self.extras(outputs),
        }
        return json.dumps(body, separators=(",", ":")).encode()

    def usage(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        return usage(outputs)

    # -- in chunks -------------------------------------------------------------------------

    async def events(self, generation: Generation, *, include_usage: bool) -> AsyncIterator[bytes]:
        """Server-sent events; an error is the last one before [DONE]."""
        last: dict[str, Any] = {"usage": None} if include_usage else {}
        try:
            for index, content in self.openings():
                yield self._chunk(index, content, None, None, last)
            async for item in generation.items():
                if isinstance(item, OutputDelta):
                    for data in self._told(item, last):
                        yield data
                    continue
                check(item)
                self._outputs.append(item)
                for data in self._ends(item, last):
                    yield data
            if include_usage:
                told = self.usage(self._outputs)
                yield event(
                    self._head | {"object": self.chunk_object, "choices": [], "usage": told}
                )
        except Refusal as error:
            yield event(error.body)
        except EngineDead as error:
            yield event(error_body(503, str(error)))
        yield DONE

    def shown(self, index: int, text: str) -> str:
        """The part of a piece of text that is told."""
        return text

    def _told(self, delta: OutputDelta, last: dict[str, Any]) -> Iterator[bytes]:
        index = self._first_index[delta.request_id] + delta.index
        reason = None if delta.finish_reason == "error" else delta.finish_reason
        text = self.shown(index, delta.text)
        if not text and reason is None and not delta.logprobs:
            return  # part of a character
        if reason is not None:
            self._open.discard(index)
        yield self._chunk(index, self.part(index, text, delta), reason, delta.stop_reason, last)

    def _ends(self, output: RequestOutput, last: dict[str, Any]) -> Iterator[bytes]:
        """Ends of choices that have not been told with a delta: an abort has none."""
        for answer in output.outputs:
            index = self._first_index[output.request_id] + answer.index
            if index in self._open:
                self._open.discard(index)
                content = self.part(index, "", None)
                yield self._chunk(index, content, answer.finish_reason, answer.stop_reason, last)

    def _chunk(
        self,
        index: int,
        content: dict[str, Any],
        reason: str | None,
        stop_reason: str | int | None,
        last: dict[str, Any],
    ) -> bytes:
        ending: dict[str, Any] = {"finish_reason": reason}
        if reason is not None:
            ending["stop_reason"] = stop_reason
        choice = {"index": index, **content, **ending}
        head = {**self._head, "object": self.chunk_object}
        return event({**head, "choices": [choice], **last})


async def respond(
    request: Request, body: GenerationBody, generation: Generation, writer: Writer
) -> Response:
    """The answers, whole or in chunks."""
    if body.stream:
        options = body.stream_options
        include_usage = options is not None and options.include_usage
        return EventStream(
            writer.events(generation, include_usage=include_usage),
            generation.end,
            generation.left_s + _LAST_EVENT_S,
        )
    try:
        outputs = await generation.outputs(request.receive)
    except ClientGone:
        return Response(status_code=499)  # to nobody
    # Log-probabilities of a long prompt are much to write.
    data = await writer.service.tokenising.run(writer.whole, outputs)
    return Response(data, media_type="application/json")
