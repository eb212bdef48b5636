"""What stands for a token id in a recording: the id itself, or a keyed pseudonym.

A pseudonym is a keyed hash of the token and of everything before it (cache_salt included), so
equal beginnings of two sequences stay equal and nothing else does: prefixes match as they did, at
any block size, and there is nothing to count. The key is random and is not kept.

A stop id that ends a sequence stands as its index among the request's stop ids; pseudonyms are
RESERVED and above.
"""

from __future__ import annotations

import hashlib
import secrets
import zlib
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pagedkv.request import Request

RESERVED = 512  # above the most stop ids of a request
_NUM_IDS = 2**31 - RESERVED
_CHUNK = 16  # tokens; what comes before the last whole chunk is known by one hash

Ids = NDArray[np.int32] | NDArray[np.int64]


class TokenNames(Protocol):
    """How a recorder writes tokens. slot: of the running sequence that is asked about; forget_slot:
    it has another sequence from now on.
    """

    def prompt(self, request: Request) -> list[int]: ...

    def stop_ids(self, request: Request) -> list[int]: ...

    def next_ids(
        self, slot: int, request: Request, known: NDArray[np.int32], token_ids: list[int]
    ) -> list[int]:
        """Each of token_ids as it would stand right after known, the sequence so far."""

    def mark(self, slot: int, request: Request, known: NDArray[np.int32]) -> int:
        """A number that tells known from the other beams of its search: `mark_of` of its names."""

    def forget_slot(self, slot: int) -> None: ...


class PlainIds:
    """Every token stands for itself."""

    def prompt(self, request: Request) -> list[int]:
        return [int(one) for one in request.prompt_token_ids]

    def stop_ids(self, request: Request) -> list[int]:
        return list(request.stop_token_ids)

    def next_ids(
        self, slot: int, request: Request, known: NDArray[np.int32], token_ids: list[int]
    ) -> list[int]:
        return token_ids

    def mark(self, slot: int, request: Request, known: NDArray[np.int32]) -> int:
        return mark_of(known, is_plain=True)

    def forget_slot(self, slot: int) -> None:
        pass


class Pseudonyms:
    """Keyed, by prefix. `_states` remembers of each slot its whole chunks and their hash."""

    def __init__(self, key: bytes | None = None) -> None:
        """key: 16 to 64 bytes; None: random."""
        self._keyed = hashlib.blake2b(key=key or secrets.token_bytes(32), digest_size=16)
        self._states: dict[int, tuple[int, bytes]] = {}

    def prompt(self, request: Request) -> list[int]:
        token_ids = request.prompt_token_ids
        names: list[int] = []
        state = self._start(request)
        for begin in range(0, token_ids.size, _CHUNK):
            chunk = token_ids[begin : begin + _CHUNK]
            names += (self._name(state, chunk[: i + 1].tobytes()) for i in range(chunk.size))
            state = self._hash(state, chunk.tobytes())
        return names

    def stop_ids(self, request: Request) -> list[int]:
        return list(range(len(request.stop_token_ids)))

    def next_ids(
        self, slot: int, request: Request, known: NDArray[np.int32], token_ids: list[int]
    ) -> list[int]:
        state, rest = self._before(slot, request, known)
        stops = request.stop_token_ids
        return [
            stops.index(one)
            if one in stops
            else self._name(state, rest + one.to_bytes(4, "little", signed=True))
            for one in token_ids
        ]

    def mark(self, slot: int, request: Request, known: NDArray[np.int32]) -> int:
        state, rest = self._before(slot, request, known[:-1])
        return self._name(state, rest + known[-1:].tobytes())

    def forget_slot(self, slot: int) -> None:
        self._states.pop(slot, None)

    def _start(self, request: Request) -> bytes:
        return self._hash(b"salt", request.extra_key)

    def _before(self, slot: int, request: Request, known: NDArray[np.int32]) -> tuple[bytes, bytes]:
        """The hash of known's whole chunks, and the tokens after them."""
        num_chunks, state = self._states.get(slot) or (0, self._start(request))
        if num_chunks * _CHUNK > known.size:
            num_chunks, state = 0, self._start(request)
        while (num_chunks + 1) * _CHUNK <= known.size:
            chunk = known[num_chunks * _CHUNK : (num_chunks + 1) * _CHUNK]
            state = self._hash(state, chunk.tobytes())
            num_chunks += 1
        self._states[slot] = num_chunks, state
        return state, known[num_chunks * _CHUNK :].tobytes()

    def _hash(self, state: bytes, tokens: bytes) -> bytes:
        one = self._keyed.copy()
        one.update(b"chunk" + state + tokens)
        return one.digest()

    def _name(self, state: bytes, tokens: bytes) -> int:
        one = self._keyed.copy()
        one.update(b"token" + state + tokens)
        return RESERVED + int.from_bytes(one.digest()[:8], "little") % _NUM_IDS


def mark_of(known: Ids, *, is_plain: bool) -> int:
    """What tells a beam from the others of its search. known: its tokens as they are recorded. The
    last pseudonym says all, since it is a hash of what it follows.
    """
    if is_plain:
        return zlib.crc32(np.ascontiguousarray(known, dtype=np.int32).tobytes())
    return int(known[-1])
