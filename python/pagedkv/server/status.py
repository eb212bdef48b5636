"""What a server says of itself: /health, /version, /v1/models; and /reset_prefix_cache."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from pagedkv import __version__
from pagedkv.server.errors import Refusal
from pagedkv.server.service import Service, service_of

router = APIRouter()


@router.get("/health")
async def health(request: Request) -> dict[str, str]:
    """200 while the engine answers; 503 when it has failed, or a step does not end."""
    service = service_of(request)
    engine = service.engine
    if engine.failure is not None:
        raise Refusal(503, str(engine.failure), code="engine_dead")
    if engine.stalled_s > service.limits.stall_s:
        raise Refusal(
            503,
            f"a step has been running for {engine.stalled_s:.0f} seconds",
            code="engine_stalled",
        )
    return {"status": "ok"}


@router.get("/version")
async def version() -> dict[str, str]:
    """pagedkv's version."""
    return {"version": __version__}


@router.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    """The one model that is served."""
    return {"object": "list", "data": [_card(service_of(request))]}


@router.get("/v1/models/{model:path}")
async def model(model: str, request: Request) -> dict[str, Any]:
    """The model, by its name."""
    service = service_of(request)
    service.check_model(model)
    return _card(service)


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(request: Request) -> dict[str, int]:
    """Forget every cached prefix; requests that run go on. Tells how many blocks were findable."""
    return {"num_blocks": await service_of(request).engine.call(lambda e: e.reset_prefix_cache())}


def _card(service: Service) -> dict[str, Any]:
    return {
        "id": service.model,
        "object": "model",
        "created": service.created,
        "owned_by": "pagedkv",
        "max_model_len": service.engine.max_model_len,
    }
