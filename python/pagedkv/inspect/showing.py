"""serve_page: one page on the loopback address, for this machine's browsers, until interrupted."""

from __future__ import annotations

from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from pagedkv.inspect.page import Page

_ADDRESS = "127.0.0.1"


def serve_page(page: Page, port: int, when_ready: Callable[[str], None]) -> None:
    """Returns when it is interrupted. It answers to loopback names only, so that no other site's
    name leads a browser here.

    Args:
        port: 0 takes a free one.
        when_ready: is told the address.

    Raises:
        OSError: the port is taken, or may not be.
    """
    body = page.html.encode()

    class Handler(BaseHTTPRequestHandler):
        timeout = 10

        def do_GET(self) -> None:
            name = self.headers.get("host", "").rpartition(":")[0]
            if name not in (_ADDRESS, "localhost"):
                self.send_error(400, "this server answers to loopback names only")
            elif self.path != "/":
                self.send_error(404)
            else:
                self.send_response(200)
                self.send_header("content-type", "text/html; charset=utf-8")
                self.send_header("content-length", str(len(body)))
                self.send_header("content-security-policy", page.policy)
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    try:
        server = ThreadingHTTPServer((_ADDRESS, port), Handler)
    except OSError as error:
        raise OSError(f"cannot listen on {_ADDRESS}:{port}: {error.strerror or error}") from None
    with server:
        when_ready(f"http://{_ADDRESS}:{server.server_address[1]}/")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return
