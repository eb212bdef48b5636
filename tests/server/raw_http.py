"""Requests as bytes on a socket, for what no client library would do."""

from __future__ import annotations

import json
import socket
from typing import Any

from serving import WAIT_S


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), WAIT_S)


def head(path: str, *headers: str, method: str = "POST") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "host: localhost", *headers]
    return "".join(f"{line}\r\n" for line in [*lines, ""]).encode()


def request(path: str, fields: dict[str, Any]) -> bytes:
    body = json.dumps(fields).encode()
    return head(path, "content-type: application/json", f"content-length: {len(body)}") + body


def read_all(connection: socket.socket) -> bytes:
    """All that comes until the server closes the connection."""
    data = b""
    try:
        while part := connection.recv(2**16):
            data += part
    except ConnectionResetError:
        pass
    return data


def status_of(data: bytes) -> int:
    return int(data.split(b" ", 2)[1])


def read_answer(connection: socket.socket) -> tuple[int, bytes]:
    """(status, body) of the next whole answer with a content-length, and nothing behind it."""
    with connection.makefile("rb", buffering=0) as file:
        status = int(file.readline().split(b" ")[1])
        length = 0
        while (line := file.readline()) not in (b"\r\n", b""):
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
        body = b""
        while len(body) < length and (part := file.read(length - len(body))):
            body += part
        return status, body
