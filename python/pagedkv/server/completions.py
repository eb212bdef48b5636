"""POST /v1/completions: prompts as text or token ids."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from pagedkv.engine import Stream
from pagedkv.records import CompletionOutput, OutputDelta, RequestOutput, TokenLogprobs
from pagedkv.server.errors import Refusal
from pagedkv.server.generation import begin
from pagedkv.server.logprobs import completion_logprobs, prompt_logprobs, token_text
from pagedkv.server.off_loop import OffLoopRoute
from pagedkv.server.protocol import CompletionBody
from pagedkv.server.sampling import sampling_params
from pagedkv.server.service import Service, service_of
from pagedkv.server.submitting import submit
from pagedkv.server.usage import usage
from pagedkv.server.writing import Writer, respond

router = APIRouter(route_class=OffLoopRoute)

DEFAULT_MAX_TOKENS = 16


@dataclass(frozen=True, slots=True)
class _Prompt:
    token_ids: list[int]
    text: str | None  # None where nobody asks for it


@router.post("/v1/completions")
async def completions(body: CompletionBody, request: Request) -> Response:
    """Go on with a text, or with several."""
    service = service_of(request)
    service.check_model(body.model)
    given = _listed(body.prompt)
    response_id = f"cmpl-{uuid.uuid4().hex}"
    prompts: list[_Prompt] = []

    if body.keep_seconds is not None and len(given) > 1:
        raise Refusal(400, "keep_seconds is for one prompt", param="keep_seconds")
    salt = service.cache_salt(request, body.cache_salt)
    origin = service.origin(request, salt=salt, keep_s=body.keep_seconds)

    async def queued() -> Stream:
        prompts.extend(await asyncio.gather(*(_encoded(service, body, one) for one in given)))
        return await _submit(service, body, salt, response_id, prompts)

    generation = await begin(service, len(given), queued, response_id, origin)
    writer = CompletionWriter(service, response_id, generation.request_ids, body, prompts)
    return await respond(request, body, generation, writer)


async def _submit(
    service: Service,
    body: CompletionBody,
    salt: str | None,
    response_id: str,
    prompts: Sequence[_Prompt],
) -> Stream:
    if body.max_tokens == 0 and not body.echo:
        raise Refusal(
            400, "max_tokens is 0: only with echo, for the prompt alone", param="max_tokens"
        )
    if body.stream and (
        body.prompt_logprobs is not None or (body.echo and body.logprobs is not None)
    ):
        raise Refusal(
            400,
            "log-probabilities of the prompt cannot be streamed: prompt_logprobs, or echo with "
            "logprobs, needs stream: false",
            param="stream",
        )
    asked = [body.prompt_logprobs, body.logprobs if body.echo else None]
    params = sampling_params(
        body,
        # The engine generates one at least; of max_tokens 0 it is not told.
        max_tokens=max(DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens, 1),
        logprobs=body.logprobs,
        prompt_logprobs=max((one for one in asked if one is not None), default=None),
    )
    pairs = [(one.token_ids, one.text) for one in prompts]
    return await submit(service, body, pairs, params, response_id=response_id, cache_salt=salt)


def _listed(prompt: str | list[Any]) -> list[str | list[int]]:
    """The prompts of a request: one, as text or token ids, is a list of one."""
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return [prompt]
    return prompt


async def _encoded(service: Service, body: CompletionBody, prompt: str | list[int]) -> _Prompt:
    if isinstance(prompt, str):
        ids = await service.tokenising.encode(
            prompt, add_special_tokens=body.add_special_tokens, param="prompt"
        )
        return _Prompt(ids, prompt)
    text = None
    if body.echo:
        text = await service.tokenising.decode(prompt, skip_special_tokens=body.skip_special_tokens)
    return _Prompt(prompt, text)


def plain_writer(
    service: Service, response_id: str, request_ids: Sequence[str], n: int
) -> CompletionWriter:
    """Of answers without their prompts and without log-probabilities."""
    body = CompletionBody(prompt=[0], n=n)
    prompts = [_Prompt([], None)] * len(request_ids)
    return CompletionWriter(service, response_id, request_ids, body, prompts)


class CompletionWriter(Writer):
    """Choices with a text; with echo, the prompt before it."""

    whole_object = chunk_object = "text_completion"

    def __init__(
        self,
        service: Service,
        response_id: str,
        request_ids: Sequence[str],
        body: CompletionBody,
        prompts: Sequence[_Prompt],
    ) -> None:
        super().__init__(service, response_id, request_ids, body.n or 1)
        self._body = body
        self._prompts = prompts
        self._tells_answer = body.max_tokens != 0
        self._offsets = dict.fromkeys(range(len(prompts) * self.n), 0)

    def choice(self, output: RequestOutput, answer: CompletionOutput) -> dict[str, Any]:
        prompt_text = output.prompt or ""
        token_ids, text, told = answer.token_ids, answer.text, answer.logprobs
        if not self._tells_answer:
            token_ids, text, told = [], "", told and []
        choice: dict[str, Any] = {"text": text, "logprobs": None}
        tokenizer, num_top = self.service.tokenising.tokenizer, self._body.logprobs
        if self._body.echo:
            choice["text"] = prompt_text + text
        if num_top is not None:
            assert told is not None
            shown = list(token_ids)
            places: list[TokenLogprobs | None] = [*told]
            if self._body.echo:
                shown = output.prompt_token_ids + shown
                places = [*(output.prompt_logprobs or []), *places]
            choice["logprobs"] = completion_logprobs(tokenizer, shown, places, num_top)
        if self._body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(tokenizer, output.prompt_logprobs)
        return choice

    def part(self, index: int, text: str, delta: OutputDelta | None) -> dict[str, Any]:
        num_top = self._body.logprobs
        if delta is None or num_top is None or not self._tells_answer:
            return {"text": text, "logprobs": None}
        tokenizer = self.service.tokenising.tokenizer
        told, begin = delta.logprobs or [], self._offsets[index]
        self._offsets[index] += sum(len(token_text(tokenizer, one)) for one in delta.token_ids)
        return {
            "text": text,
            "logprobs": completion_logprobs(tokenizer, delta.token_ids, told, num_top, begin),
        }

    def shown(self, index: int, text: str) -> str:
        return text if self._tells_answer else ""

    def openings(self) -> Iterator[tuple[int, dict[str, Any]]]:
        if self._body.echo:
            for index in range(len(self._prompts) * self.n):
                text = self._prompts[index // self.n].text or ""
                self._offsets[index] = len(text)
                yield index, {"text": text, "logprobs": None}

    def usage(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        dropped = 0 if self._tells_answer else sum(len(one.outputs) for one in outputs)
        return usage(outputs, num_dropped=dropped)
