"""POST /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from pagedkv.server.off_loop import OffLoopRoute
from pagedkv.server.protocol import DetokenizeBody, TokenizeBody
from pagedkv.server.service import service_of

router = APIRouter(route_class=OffLoopRoute)


@router.post("/tokenize")
async def tokenize(body: TokenizeBody, request: Request) -> dict[str, Any]:
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
    return {"count": len(ids), "max_model_len": service.engine.max_model_len, "tokens": ids}


@router.post("/detokenize")
async def detokenize(body: DetokenizeBody, request: Request) -> dict[str, Any]:
    """The text of token ids."""
    service = service_of(request)
    service.check_model(body.model)
    with service.room.taken(1):
        text = await service.tokenising.decode(body.tokens, skip_special_tokens=False)
    return {"prompt": text}
