"""GET /inspect, the page, and GET /inspect/stream, what it shows. The cli hands them to the server,
whose guards stand before them as before every route.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, HTTPException, Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from pagedkv.inspect.live import LiveView, TooManyViewersError, Viewer
from pagedkv.inspect.page import live_page

PAGE_PATH = "/inspect"


class Inspector:
    """router: for create_app. page: what a browser gets at PAGE_PATH beside a status; it holds
    nothing of the engine's, so that it may ask whoever comes without a key for one.
    """

    def __init__(self, *, shows_text: bool = False) -> None:
        self._shows_text = shows_text
        self._page = live_page()
        self._view: LiveView | None = None
        self.router = APIRouter(include_in_schema=False)
        self.router.get(PAGE_PATH)(self._get_page)
        self.router.get(PAGE_PATH + "/stream")(self._get_stream)

    def page(self, status: int = 200) -> Response:
        headers = {
            "content-security-policy": self._page.policy,
            "cache-control": "no-store",
            "referrer-policy": "no-referrer",
            "x-content-type-options": "nosniff",
        }
        return HTMLResponse(self._page.html, status, headers)

    async def _get_page(self) -> Response:
        """The live view."""
        return self.page()

    async def _get_stream(self, request: Request) -> Response:
        """Lines of JSON, as long as the client stays."""
        service: Any = request.app.state.service
        if self._view is None:
            self._view = LiveView(
                service.engine, service.model, service.stopping, shows_text=self._shows_text
            )
        view = self._view
        try:
            viewer = view.join()
        except TooManyViewersError as error:
            raise HTTPException(503, str(error)) from None
        return _Lines(viewer, lambda: view.leave(viewer))


class _Lines(StreamingResponse):
    """What a viewer gets; on_end is called whatever happens."""

    def __init__(self, viewer: Viewer, on_end: Callable[[], None]) -> None:
        super().__init__(
            viewer.lines(),
            media_type="application/x-ndjson",
            headers={"cache-control": "no-store", "x-content-type-options": "nosniff"},
        )
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_end()
