"""IncrementalDecoder: the text of a stream of tokens, as it grows.

Its parts joined are exactly what decoding all tokens at once gives. A character comes when its last
byte has come, never in halves; a byte that can no longer be part of one becomes U+FFFD at once. A
token costs the same however many came before it.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping, Sequence
from typing import Protocol

from pagedkv.text.byte_alphabet import BYTE_ALPHABET
from pagedkv.text.tokenizer import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
# Steps of a backend's decoder that look at one token, or at a run of byte tokens, at a time.
_LOCAL_STEPS = ("Replace", "ByteFallback", "Metaspace", "Fuse", "Strip")


class _Decoder(Protocol):
    def push(self, ids: Sequence[int]) -> str: ...
    def finish(self) -> str: ...


class IncrementalDecoder:
    """The growing text of one sequence. Not for use from several threads.

    Raises ValueError if the tokenizer's way of decoding cannot be done piece by piece.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        parts = tokenizer.decoder_parts
        kinds = [str(part["type"]) for part in parts]
        self._decoder: _Decoder
        if kinds == ["ByteLevel"]:
            self._decoder = _ByteLevel(tokenizer, skip_special_tokens)
        elif kinds and all(map(_is_local, parts)):
            self._decoder = _ByteRuns(tokenizer, skip_special_tokens)
        else:
            raise ValueError(
                f"text of a tokenizer with the decoder {kinds} cannot be streamed; supported are "
                f"ByteLevel, and sequences of {', '.join(_LOCAL_STEPS)}"
            )

    def push(self, ids: Sequence[int]) -> str:
        """Take the next tokens; returns the text that they complete, often none."""
        return self._decoder.push(ids)

    def finish(self) -> str:
        """The end of the stream: what was held back. The decoder is then as new."""
        return self._decoder.finish()


def token_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    """What one token adds to a text, as bytes: it may begin or end within a character. Of a special
    token its name; of an id that the vocabulary does not have, nothing.
    """
    token = tokenizer.backend.id_to_token(token_id)
    if token is None or token_id in tokenizer.special_token_ids:
        return (token or "").encode()
    kinds = [part["type"] for part in tokenizer.decoder_parts]
    if kinds == ["ByteLevel"]:
        return _ByteLevel(tokenizer, False).bytes_of(token_id)
    if _BYTE_TOKEN.fullmatch(token):
        return bytes([int(token[3:5], 16)])
    # Behind another of itself, so that a leading space is not lost as at a text's beginning.
    once = tokenizer.decode([token_id], skip_special_tokens=False)
    twice = tokenizer.decode([token_id, token_id], skip_special_tokens=False)
    return twice[len(once) :].encode()


def _is_local(part: Mapping[str, object]) -> bool:
    """Whether a step needs no more than a token, the one before it, and the run it is in."""
    if part["type"] == "Strip":
        # The end of a growing text is not known; and one token behind another hides the start
        # only from a step that takes a single character.
        return part["stop"] == 0 and part["start"] in (0, 1)
    if part["type"] == "Replace":
        pattern = part["pattern"]
        return isinstance(pattern, Mapping) and len(pattern.get("String", "")) == 1
    return part["type"] in _LOCAL_STEPS


class _ByteLevel:
    """Tokens are strings of bytes, written in the byte alphabet."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._id_to_token = tokenizer.backend.id_to_token
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        return self._utf8.decode(b"".join(map(self.bytes_of, ids)))

    def finish(self) -> str:
        text = self._utf8.decode(b"", True)
        self._utf8.reset()
        return text

    def bytes_of(self, index: int) -> bytes:
        token = None if index in self._skipped else self._id_to_token(index)
        if token is None:
            return b""
        try:
            return bytes(map(BYTE_ALPHABET.__getitem__, token))
        except KeyError:
            # An added token is written as itself.
            return token.encode()


class _ByteRuns:
    """Tokens are text, or one byte each. A run of byte tokens is decoded as a whole, when a token
    of text ends it: the backend makes all of it U+FFFD if any of it is no character."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        # The last token whose text is out: what follows may be written differently at the very
        # start of a text (without a leading space), so it is decoded behind this one.
        self._context: list[int] = []
        self._run: list[int] = []

    def push(self, ids: Sequence[int]) -> str:
        text = ""
        for index in ids:
            token = None if index in self._skipped else self._tokenizer.backend.id_to_token(index)
            if token is None:
                continue
            self._run.append(index)
            if not _BYTE_TOKEN.fullmatch(token):
                text += self._take()
        return text

    def finish(self) -> str:
        text = self._take()
        self._context = []
        return text

    def _take(self) -> str:
        before = self._tokenizer.decode(self._context, skip_special_tokens=False)
        both = self._tokenizer.decode(self._context + self._run, skip_special_tokens=False)
        self._context, self._run = self._run[-1:], []
        return both[len(before) :]
