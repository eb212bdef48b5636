"""Text that users give, as arguments and on standard input; where bytes are not text, an error that
says which.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence


class NotTextError(ValueError):
    """Bytes that are not text in their encoding."""


def checked_arguments(option: str, texts: Sequence[str]) -> list[str]:
    """The values of a text option. Python has put a lone surrogate in the place of each byte of an
    argument that is not text.

    Raises:
        NotTextError: bytes of one of them are not text.
    """
    return [
        _decoded(
            option if len(texts) == 1 else f"{option} number {i}",
            text.encode("utf-8", "surrogateescape"),
            "utf-8",
        )
        for i, text in enumerate(texts, 1)
    ]


def read_all() -> str:
    """All of standard input, with line ends as a line feed.

    Raises:
        NotTextError: it is not text.
    """
    text = _decoded("standard input", sys.stdin.buffer.read(), sys.stdin.encoding)
    return io.StringIO(text, newline=None).read()


def read_line() -> str | None:
    """The next line of standard input without white space around it, or None at its end.

    Raises:
        NotTextError: it is not text; the line after it can be read.
    """
    line = sys.stdin.buffer.readline()
    return _decoded("the line", line, sys.stdin.encoding).strip() if line else None


def _decoded(what: str, data: bytes, encoding: str) -> str:
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        raise NotTextError(
            f"{what} is not valid {encoding.upper()}: byte 0x{data[error.start]:02x} at byte "
            f"{error.start + 1} of {len(data)}"
        ) from None
