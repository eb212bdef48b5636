"""create_app: the ASGI application around one engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

from fastapi import APIRouter, FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from pagedkv import __version__
from pagedkv.engine import AsyncEngine
from pagedkv.server import chat, completions, errors, fork, metrics, status, tokens
from pagedkv.server.conversations import Conversations
from pagedkv.server.guards import Access, Guard
from pagedkv.server.limits import Limits
from pagedkv.server.metrics import log_for_ever
from pagedkv.server.room import Room
from pagedkv.server.service import Service
from pagedkv.server.tokenising import Tokenising


def create_app(
    engine: AsyncEngine,
    *,
    model: str,
    limits: Limits | None = None,
    access: Access | None = None,
    cors_origins: Sequence[str] = (),
    log_interval_s: float = 10.0,
    routers: Sequence[APIRouter] = (),
    key_pages: Mapping[str, Callable[[int], Response]] | None = None,
) -> FastAPI:
    """An application that starts and stops the engine with itself.

    Args:
        model: the name that clients know it by.
        access: who may come in. None: whoever comes by a loopback name, without a key. Where
            there are several keys, prompts of different keys share no cached blocks.
        cors_origins: sites whose pages may call this server from a browser; none unless asked for.
        log_interval_s: between two lines of the log about the engine.
        routers: further routes; they find the Service in app.state.service.
        key_pages: path -> what a browser that comes there without a key gets, made of the status:
            a page that can ask for the key.
    """
    limits, access = limits or Limits(), access or Access()
    if engine.tokenizer is None:
        raise ValueError("a server needs a tokenizer: load_format dummy has none")
    service = Service(
        engine=engine,
        model=model,
        limits=limits,
        room=Room(engine.max_num_seqs + limits.max_queue),
        tokenising=Tokenising(engine.tokenizer, engine.max_model_len),
        created=int(time.time()),
        conversations=Conversations(engine, limits.max_kept),
        separates_tenants=len(access.api_keys) > 1,
    )

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        engine.start()
        logging = asyncio.ensure_future(log_for_ever(lambda: engine.snapshot, log_interval_s))
        yield
        logging.cancel()
        await engine.stop()
        service.tokenising.close()

    app = FastAPI(title="pagedkv", version=__version__, lifespan=lifespan)
    app.state.service = service
    errors.install(app)
    own = (completions, chat, fork, tokens, status, metrics)
    for router in (*(one.router for one in own), *routers):
        app.include_router(router)
    app.add_middleware(Guard, access=access, limits=limits, key_pages=key_pages or {})
    if cors_origins:  # outermost: a browser asks before it sends the key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type"],
        )
    return app
