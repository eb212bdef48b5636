"""A request's prompts as the engine takes them, whatever route they came by."""

from __future__ import annotations

from collections.abc import Sequence

from pagedkv.engine import Stream, Submission
from pagedkv.sampling_params import SamplingParams
from pagedkv.server.errors import refused
from pagedkv.server.protocol import KeptBody
from pagedkv.server.sampling import check_size
from pagedkv.server.service import Service


async def submit(
    service: Service,
    body: KeptBody,
    prompts: Sequence[tuple[list[int], str | None]],
    params: SamplingParams,
    *,
    response_id: str,
    cache_salt: str | None,
) -> Stream:
    """Queue the prompts of one response. Raises Refusal where they are too much, or the engine
    cannot ever run them.

    Args:
        prompts: token ids, and the text that outputs show, if anybody asks for it.
    """
    lens = [len(token_ids) for token_ids, _ in prompts]
    check_size(params, lens, service.limits, service.engine.max_model_len)
    names = [response_id]
    if len(prompts) > 1:
        names = [f"{response_id}.{i}" for i in range(len(prompts))]
    submissions = [
        Submission(
            name,
            token_ids,
            params,
            prompt_text=text,
            cache_salt=cache_salt,
            priority=body.priority,
            user=body.user,
            keeps_blocks=body.keep_seconds is not None,
        )
        for name, (token_ids, text) in zip(names, prompts, strict=True)
    ]
    try:
        return await service.engine.submit(submissions, stream=body.stream)
    except (ValueError, TypeError) as error:
        raise refused(error, *type(body).model_fields) from None
