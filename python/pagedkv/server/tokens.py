"""POST /tokenize and /detokenize."""

from __future__ import annotations

import json
from collections.abc import Sequence

from fastapi import APIRouter, Request
from starlette.responses import Response

from pagedkv.server.off_loop import OffLoopRoute
from pagedkv.server.protocol import DetokenizeBody, TokenizeBody
from pagedkv.server.service import service_of

_PART_LEN = 2**14

router = APIRouter(route_class=OffLoopRoute)


@router.post("/tokenize")
async def tokenize(body: TokenizeBody, request: Request) -> Response:
    """Token ids of a text, or of a conversation's prompt."""
    service = service_of(request)
    service.check_model(body.model)
    with service.room.taken(1):
        if body.prompt is not None:
            ids = await service.tokenising.encode(
                body.prompt, add_special_tokens=body.add_special_tokens, param="prompt"
            )
        else:
            assert body.messages is not None
            ids = await service.tokenising.encode_chat(
                [one.plain() for one in body.messages],
                add_generation_prompt=body.add_generation_prompt,
            )
        data = await service.tokenising.run(_written, ids, service.engine.max_model_len)
    return Response(data, media_type="application/json")


@router.post("/detokenize")
async def detokenize(body: DetokenizeBody, request: Request) -> Response:
    """The text of token ids."""
    service = service_of(request)
    service.check_model(body.model)
    with service.room.taken(1):
        text = await service.tokenising.decode(body.tokens, skip_special_tokens=False)
        data = await service.tokenising.run(lambda: json.dumps({"prompt": text}))
    return Response(data, media_type="application/json")


def _written(ids: Sequence[int], max_model_len: int) -> str:
    """Part by part: a whole list would be written in one go, and hold up all other threads."""
    parts = [
        json.dumps(ids[begin : begin + _PART_LEN], separators=(",", ":"))[1:-1]
        for begin in range(0, len(ids), _PART_LEN)
    ]
    told = f'"count":{len(ids)},"max_model_len":{max_model_len}'
    return f'{{{told},"tokens":[{",".join(parts)}]}}'
