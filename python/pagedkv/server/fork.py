"""POST /v1/fork: go on from a response without sending it again, from its cached blocks.

Of one that runs, n copies go on from where it is, beside it: they share its blocks, take what the
body does not say from its request, and tell what they add. One that has ended goes on with more
text or messages behind it, as a new request, if it was kept (keep_seconds) and its time is not up:
its blocks are pinned until then, or until somebody needs them; without them it is computed again.
"""

from __future__ import annotations

import dataclasses
import uuid
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from pagedkv.engine import Stream
from pagedkv.records import CompletionOutput
from pagedkv.request import Request as EngineRequest
from pagedkv.sampling_params import SamplingParams
from pagedkv.server.chat import ChatWriter
from pagedkv.server.completions import DEFAULT_MAX_TOKENS, plain_writer
from pagedkv.server.conversations import Kept, Running
from pagedkv.server.errors import Refusal, refused
from pagedkv.server.generation import Generation, begin
from pagedkv.server.off_loop import OffLoopRoute
from pagedkv.server.protocol import ForkBody
from pagedkv.server.sampling import check_size, given_options, sampling_params
from pagedkv.server.service import Service, service_of
from pagedkv.server.submitting import submit
from pagedkv.server.writing import Writer, respond

router = APIRouter(route_class=OffLoopRoute)


@router.post("/v1/fork")
async def fork(body: ForkBody, request: Request) -> Response:
    """Go on from a response that runs, or that has ended and was kept."""
    service = service_of(request)
    tenant = service.tenant(request)
    kept = service.conversations.kept(body.id, tenant)
    if kept is not None:
        return await _go_on(service, body, request, kept)
    running = service.conversations.running(body.id, tenant)
    if running is None:
        raise Refusal(
            404,
            f"no response {body.id!r} runs or is kept; keep_seconds keeps one beyond its end",
            param="id",
            code="response_not_found",
        )
    return await _copy(service, body, request, running)


def _name(is_chat: bool) -> str:
    return f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}"


def _writer(
    service: Service, is_chat: bool, response_id: str, generation: Generation, n: int
) -> Writer:
    if is_chat:
        return ChatWriter(service, response_id, generation.request_ids, n, None)
    return plain_writer(service, response_id, generation.request_ids, n)


# -- of one that runs --------------------------------------------------------------------


async def _copy(service: Service, body: ForkBody, request: Request, running: Running) -> Response:
    for name in ("prompt", "messages", "keep_seconds", "best_of", "length_penalty"):
        if getattr(body, name) is not None:
            raise Refusal(
                400, f"{name} has no meaning for a fork of a response that runs", param=name
            )
    if body.choice >= len(running.request_ids):
        raise _no_choice(body)
    n, parent_id = body.n or 1, running.request_ids[body.choice]
    is_chat = running.origin.messages is not None
    response_id = _name(is_chat)

    if n > service.limits.max_answers:
        raise Refusal(400, f"n is {n}; at most {service.limits.max_answers} are allowed", param="n")

    def params_of(parent: EngineRequest, num_generated: int) -> SamplingParams:
        params = _changed(body, parent.sampling_params, num_generated)
        new = params
        if params.max_tokens is not None:
            num_new = max(params.max_tokens - num_generated, 1)
            new = dataclasses.replace(params, max_tokens=num_new, min_tokens=0)
        lens = [parent.prompt_len + num_generated] * n
        check_size(new, lens, service.limits, service.engine.max_model_len)
        return params

    async def queued() -> Stream:
        try:
            return await service.engine.fork(parent_id, n, params_of, stream=True)
        except (ValueError, TypeError) as error:
            raise refused(error, *ForkBody.model_fields) from None

    origin = dataclasses.replace(running.origin, keep_s=None)
    generation = await begin(service, n, queued, response_id, origin, only_new=True)
    return await respond(
        request, body, generation, _writer(service, is_chat, response_id, generation, 1)
    )


def _changed(body: ForkBody, params: SamplingParams, num_generated: int) -> SamplingParams:
    """The options of the request that runs, but for those that the body gives. What the engine has
    generated counts for its max_tokens.
    """
    given: dict[str, Any] = given_options(body)
    if body.max_tokens is not None:
        given["max_tokens"] = num_generated + body.max_tokens
    for name in ("min_tokens", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
        if name in body.model_fields_set:
            given[name] = getattr(body, name)
    return dataclasses.replace(params, n=1, best_of=None, logprobs=None, **given)


# -- of one that was kept ----------------------------------------------------------------


async def _go_on(service: Service, body: ForkBody, request: Request, kept: Kept) -> Response:
    answer = kept.answer(body.choice)
    if answer is None:
        raise _no_choice(body)
    is_chat = kept.origin.messages is not None
    if (body.prompt if is_chat else body.messages) is not None:
        wrong, right = ("prompt", "messages") if is_chat else ("messages", "prompt")
        raise Refusal(400, f"{wrong}: this response goes on with {right}", param=wrong)
    messages: list[dict[str, Any]] | None = None
    if kept.origin.messages is not None:
        if body.messages is None:
            raise Refusal(400, "messages: give at least one to go on with", param="messages")
        messages = [
            *kept.origin.messages,
            {"role": "assistant", "content": answer.text},
            *(one.plain() for one in body.messages),
        ]
    salt, response_id = kept.origin.cache_salt, _name(is_chat)
    origin = service.origin(request, salt=salt, keep_s=body.keep_seconds, messages=messages)
    default = None if is_chat else DEFAULT_MAX_TOKENS
    params = sampling_params(
        body, max_tokens=default if body.max_tokens is None else body.max_tokens
    )

    async def queued() -> Stream:
        if messages is not None:
            token_ids = await service.tokenising.encode_chat(messages, add_generation_prompt=True)
        else:
            token_ids = await _longer(service, kept, answer, body.prompt or "")
        return await submit(
            service, body, [(token_ids, None)], params, response_id=response_id, cache_salt=salt
        )

    generation = await begin(service, 1, queued, response_id, origin)
    writer = _writer(service, is_chat, response_id, generation, body.n or 1)
    return await respond(request, body, generation, writer)


async def _longer(service: Service, kept: Kept, answer: CompletionOutput, more: str) -> list[int]:
    """Prompt, answer and more text, as tokens: those that there were, as far as they are shown."""
    encode = service.tokenising.encode
    shown = answer.token_ids
    if isinstance(answer.stop_reason, str):  # which may have ended it within a token
        shown = await encode(answer.text, add_special_tokens=False, param="prompt")
    elif answer.finish_reason == "stop":  # by a token that is not part of the text
        shown = shown[:-1]
    added = await encode(more, add_special_tokens=False, param="prompt") if more else []
    return [*kept.output.prompt_token_ids, *shown, *added]


def _no_choice(body: ForkBody) -> Refusal:
    return Refusal(
        400, f"choice: the response {body.id!r} has none of index {body.choice}", param="choice"
    )
