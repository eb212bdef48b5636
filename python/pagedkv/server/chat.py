"""POST /v1/chat/completions: conversations, through the model's chat template."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from pagedkv.engine import Stream
from pagedkv.records import CompletionOutput, OutputDelta, RequestOutput
from pagedkv.server.errors import Refusal
from pagedkv.server.generation import begin
from pagedkv.server.logprobs import chat_logprobs, prompt_logprobs
from pagedkv.server.off_loop import OffLoopRoute
from pagedkv.server.protocol import ChatBody
from pagedkv.server.sampling import sampling_params
from pagedkv.server.service import Service, service_of
from pagedkv.server.submitting import submit
from pagedkv.server.writing import Writer, respond

router = APIRouter(route_class=OffLoopRoute)


@router.post("/v1/chat/completions")
async def chat_completions(body: ChatBody, request: Request) -> Response:
    """Answer a conversation."""
    service = service_of(request)
    service.check_model(body.model)
    response_id = f"chatcmpl-{uuid.uuid4().hex}"
    salt = service.cache_salt(request, body.cache_salt)
    messages = [one.plain() for one in body.messages]
    origin = service.origin(request, salt=salt, keep_s=body.keep_seconds, messages=messages)
    generation = await begin(
        service, 1, lambda: _submit(service, body, salt, response_id), response_id, origin
    )
    writer = ChatWriter(
        service, response_id, generation.request_ids, body.n or 1, body.num_logprobs
    )
    return await respond(request, body, generation, writer)


async def _submit(service: Service, body: ChatBody, salt: str | None, response_id: str) -> Stream:
    if body.stream and body.prompt_logprobs is not None:
        raise Refusal(400, "prompt_logprobs cannot be streamed", param="prompt_logprobs")
    if None not in (body.max_tokens, body.max_completion_tokens) and (
        body.max_tokens != body.max_completion_tokens
    ):
        raise Refusal(
            400,
            "max_tokens is the old name of max_completion_tokens: give one of them",
            param="max_tokens",
        )
    max_tokens = body.max_completion_tokens
    if max_tokens is None:
        max_tokens = body.max_tokens
    params = sampling_params(
        body,
        max_tokens=max_tokens,
        logprobs=body.num_logprobs,
        prompt_logprobs=body.prompt_logprobs,
    )
    token_ids = await service.tokenising.encode_chat(
        [one.plain() for one in body.messages], add_generation_prompt=body.add_generation_prompt
    )
    return await submit(
        service, body, [(token_ids, None)], params, response_id=response_id, cache_salt=salt
    )


class ChatWriter(Writer):
    """Choices with a message of the assistant's. num_top: tokens told beside each; None: no
    log-probabilities.
    """

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(
        self,
        service: Service,
        response_id: str,
        request_ids: Sequence[str],
        n: int,
        num_top: int | None,
    ) -> None:
        super().__init__(service, response_id, request_ids, n)
        self._num_choices = n * len(request_ids)
        self._num_top = num_top

    def choice(self, output: RequestOutput, answer: CompletionOutput) -> dict[str, Any]:
        logprobs = None
        if self._num_top is not None:
            tokenizer = self.service.tokenising.tokenizer
            logprobs = chat_logprobs(tokenizer, answer.logprobs or [], self._num_top)
        return {
            "message": {"role": "assistant", "content": answer.text},
            "logprobs": logprobs,
        }

    def part(self, index: int, text: str, delta: OutputDelta | None) -> dict[str, Any]:
        logprobs = None
        if self._num_top is not None and delta is not None:
            tokenizer = self.service.tokenising.tokenizer
            logprobs = chat_logprobs(tokenizer, delta.logprobs or [], self._num_top)
        return {"delta": {"content": text} if text else {}, "logprobs": logprobs}

    def openings(self) -> Iterator[tuple[int, dict[str, Any]]]:
        for index in range(self._num_choices):
            yield index, {"delta": {"role": "assistant", "content": ""}, "logprobs": None}

    def extras(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        told = outputs[0].prompt_logprobs
        if told is None:
            return {}
        return {"prompt_logprobs": prompt_logprobs(self.service.tokenising.tokenizer, told)}
