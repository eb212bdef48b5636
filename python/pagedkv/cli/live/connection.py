"""Lines of a server's live view, and its /metrics, over HTTP. What can go wrong is told in words: a
server that is not there, another program, a key that lacks.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import queue
import socket
import threading
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

STREAM_PATH = "/inspect/stream"
METRICS_PATH = "/metrics"
VERSION = 1  # of the frames
# A server sends a line every 5 seconds, if only an empty one.
_SILENCE_S = 15.0
_CONNECT_S = 5.0
_MAX_LINE_BYTES = 2**28
_MAX_METRICS_BYTES = 2**24

Frame = dict[str, Any]


def base_url(text: str) -> str:
    """An address as people write it, with a scheme and without a / at its end.

    Raises:
        ValueError: no host, or another scheme than http or https.

    >>> base_url("localhost:8000/")
    'http://localhost:8000'
    """
    whole = text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(whole)
        port_is_one = parts.port is None or parts.port > 0
    except ValueError:
        port_is_one, parts = False, urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.hostname or not port_is_one:
        raise ValueError(f"URL is {text!r}; it must be like http://localhost:8000")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"


class Connection:
    """One server. Frames are read by a thread of its own, so that the screen never waits. A key is
    sent to this server and no other: neither proxies nor redirections are followed.

    Example::

        with Connection("http://localhost:8000", api_key=None) as server:
            start = server.start
            frames = server.frames(timeout_s=1.0)
    """

    def __init__(self, base: str, *, api_key: str | None, silence_s: float = _SILENCE_S) -> None:
        """Raises RuntimeError: there is no server, it lets nobody in, or it is another program."""
        self.base = base
        self._headers = {"Accept": "*/*"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._lines: queue.Queue[Frame | Exception] = queue.Queue()
        self._response, self._socket = self._open(STREAM_PATH, silence_s)
        try:
            self.start = self._checked_start()
        except BaseException:
            self._response.close()
            self._socket.close()
            raise
        self._thread = threading.Thread(target=self._read, name="frames", daemon=True)
        self._thread.start()

    def __enter__(self) -> Connection:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """The server knows at once that nobody watches any more."""
        with contextlib.suppress(OSError):  # it has gone already
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the reader
        self._thread.join()
        self._response.close()
        self._socket.close()

    def frames(self, timeout_s: float) -> list[Frame]:
        """What has come; if nothing has, the first that comes within timeout_s.

        Raises:
            RuntimeError: the stream has ended.
        """
        found: list[Frame] = []
        try:
            one = self._lines.get(timeout=timeout_s)
            while True:
                if isinstance(one, Exception):
                    if found:
                        self._lines.put(one)
                        break
                    raise RuntimeError(f"{self.base}: {one}")
                found.append(one)
                one = self._lines.get_nowait()
        except queue.Empty:
            pass
        return found

    def metrics(self) -> str:
        """The text of /metrics; empty where it does not come."""
        try:
            response, reader = self._open(METRICS_PATH, _CONNECT_S)
            with reader, response:
                return response.read(_MAX_METRICS_BYTES).decode("utf-8", "replace")
        except (RuntimeError, OSError, http.client.HTTPException):
            return ""

    def _open(self, path: str, timeout_s: float) -> tuple[http.client.HTTPResponse, socket.socket]:
        parts = urlsplit(self.base)
        kind = (
            http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        )
        connection = kind(parts.hostname or "", parts.port, timeout=timeout_s)
        try:
            connection.request("GET", parts.path + path, headers=self._headers)
            reader = connection.sock
            response = connection.getresponse()
        except http.client.HTTPException as error:
            connection.close()
            raise RuntimeError(self._not_one(f"it speaks no HTTP ({error!r:.99})")) from None
        except OSError as error:
            connection.close()
            told: object = error.strerror or error
            if isinstance(error, TimeoutError):
                told = f"no answer within {timeout_s:.0f} seconds"
            raise RuntimeError(
                f"cannot reach {self.base}: {told}. Is `pagedkv serve` running there?"
            ) from None
        if response.status != 200:
            with reader, response:
                raise RuntimeError(self._refusal(path, response))
        return response, reader

    def _refusal(self, path: str, response: http.client.HTTPResponse) -> str:
        """Of a status that is not 200, in words."""
        try:
            message = json.loads(response.read(2**16))["error"]["message"]
        except (ValueError, TypeError, KeyError, OSError, http.client.HTTPException):
            message = None
        if response.status == 401:
            return f"{self.base} needs an API key: --api-key KEY, or PAGEDKV_API_KEY"
        if message is None or response.status == 404:
            return self._not_one(f"GET {path} is answered with {response.status}")
        return f"{self.base}: {response.status}: {message}"

    def _not_one(self, why: str) -> str:
        return f"{self.base} is not a pagedkv server with a live view: {why}"

    def _checked_start(self) -> Frame:
        try:
            first = self._next()
        except (ValueError, OSError, http.client.HTTPException):
            first = None
        if first is None or first.get("kind") != "start":
            raise RuntimeError(self._not_one(f"GET {STREAM_PATH} does not begin as it should"))
        if first.get("version") != VERSION:
            raise RuntimeError(
                f"{self.base} speaks version {first.get('version')!r:.99} of the live view; this "
                f"command speaks {VERSION}"
            )
        return first

    def _read(self) -> None:
        try:
            while (frame := self._next()) is not None:
                self._lines.put(frame)
            self._lines.put(RuntimeError("the server has ended the live view"))
        except (OSError, ValueError, http.client.HTTPException) as error:
            self._lines.put(RuntimeError(f"the connection is lost: {error or repr(error)}"))

    def _next(self) -> Frame | None:
        """The next line that is not empty; None at the end. Raises ValueError: it is no frame."""
        while line := self._response.readline(_MAX_LINE_BYTES):
            if line.strip():
                frame = json.loads(line)
                if not isinstance(frame, dict):
                    raise ValueError(f"a line holds a {type(frame).__name__}, not an object")
                return frame
        return None
