"""Turns what callers pass (text or token ids, SamplingParams) into checked Requests. Queues
nothing, so that a bad prompt in a list is refused before any of the list runs.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
import secrets
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedkv._core import token_ids as ids_of_list
from pagedkv.request import Request
from pagedkv.sampling import philox4x32
from pagedkv.sampling_params import SamplingParams
from pagedkv.text import Tokenizer

MAX_CACHE_SALT_LEN = 256  # bytes
_SEEDS_AT_ONCE = 64  # which take no longer than one

Prompt = str | Sequence[int] | NDArray[np.integer]


class RequestBuilder:
    """What every request of one engine is checked against."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        eos_token_ids: frozenset[int],
        vocab_size: int,
        sampled_vocab_size: int,
        max_model_len: int,
        num_cache_tokens: int,
        seed: int | None,
    ) -> None:
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._vocab_size = vocab_size
        self._sampled_vocab_size = sampled_vocab_size
        self._max_model_len = max_model_len
        self._num_cache_tokens = num_cache_tokens
        self._seeds = _seeds(seed)

    def build(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        prompt_text: str | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
        user: str | None = None,
        keeps_blocks: bool = False,
    ) -> Request:
        """A Request, or ValueError / TypeError naming what is wrong with it.

        max_tokens is cut to what max_model_len leaves after the prompt; None takes all of that, as
        far as the pool can hold it. prompt_text: what to show of a prompt given as ids.
        """
        if not isinstance(params, SamplingParams):
            raise TypeError(f"sampling_params must be a SamplingParams, got {params!r}")
        check_cache_salt(request_id, cache_salt)
        token_ids = self._token_ids(request_id, prompt)
        params.check_vocabulary(self._sampled_vocab_size)
        if params.stop and self._tokenizer is None:
            raise ValueError(f"request {request_id!r}: stop strings need a tokenizer")
        bad_token_ids = self._bad_token_ids(f"request {request_id!r}", params)
        return Request(
            request_id=request_id,
            prompt_token_ids=token_ids,
            max_tokens=self._max_tokens(request_id, token_ids.size, params),
            stop_token_ids=self._stop_ids(params),
            sampling_params=params,
            seed=next(self._seeds) if params.seed is None else params.seed,
            prompt=prompt if isinstance(prompt, str) else prompt_text,
            # A prefix that was found would not be computed, and so have no log-probabilities.
            cache_salt=cache_salt if params.prompt_logprobs is None else secrets.token_hex(16),
            priority=priority,
            user=user,
            keeps_blocks=keeps_blocks,
            bad_token_ids=bad_token_ids,
        )

    def branch(self, parent: Request, params: SamplingParams) -> Request:
        """What a fork of parent with other params is, but for its name and draw; or ValueError /
        TypeError naming what cannot be changed. Without a seed it draws with its parent's.
        """
        name = f"a fork of request {parent.request_id!r}"
        if not isinstance(params, SamplingParams):
            raise TypeError(f"sampling_params must be a SamplingParams, got {params!r}")
        if params.num_forks > 1:
            raise ValueError(f"{name} is one answer: n, best_of and beam_width must be left out")
        if params.stop and self._tokenizer is None:
            raise ValueError(f"{name}: stop strings need a tokenizer")
        params.check_vocabulary(self._sampled_vocab_size)
        had = parent.sampling_params
        if params.logprobs is not None and had.logprobs is None:
            raise ValueError(f"{name} has no logprobs: its parent was not asked for any")
        if params.prompt_logprobs != had.prompt_logprobs:
            raise ValueError(f"{name} has its parent's prompt_logprobs, {had.prompt_logprobs}")
        if self._stop_ids(params) != parent.stop_token_ids:
            raise ValueError(
                f"{name} ends at the token ids that its parent ends at: stop_token_ids and "
                "ignore_eos must be the same"
            )
        return dataclasses.replace(
            parent,
            sampling_params=params,
            max_tokens=self._max_tokens(parent.request_id, parent.prompt_len, params),
            seed=parent.seed if params.seed is None else params.seed,
            bad_token_ids=self._bad_token_ids(name, params),
        )

    def _bad_token_ids(self, name: str, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """The spellings of params.bad_words; or ValueError if they leave nothing to choose."""
        spellings: tuple[tuple[int, ...], ...] = ()
        if params.bad_words:
            if self._tokenizer is None:
                raise ValueError(f"{name}: bad_words need a tokenizer")
            texts = [lead + word.lstrip(" ") for word in params.bad_words for lead in ("", " ")]
            encoded = [self._tokenizer.encode(text, add_special_tokens=False) for text in texts]
            spellings = tuple(dict.fromkeys(tuple(ids) for ids in encoded if ids))
        if params.allowed_token_ids is not None:
            forbidden = {ids[0] for ids in spellings if len(ids) == 1}
            if params.min_tokens:
                forbidden |= set(self._stop_ids(params))
            if forbidden.issuperset(params.allowed_token_ids):
                raise ValueError(
                    f"{name}: bad_words and min_tokens forbid all of allowed_token_ids, so that no "
                    "token could be chosen"
                )
        return spellings

    def _stop_ids(self, params: SamplingParams) -> tuple[int, ...]:
        ids = set(params.stop_token_ids)
        return tuple(sorted(ids if params.ignore_eos else ids | self._eos_token_ids))

    def _token_ids(self, request_id: str, prompt: Prompt) -> NDArray[np.int32]:
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise ValueError(f"request {request_id!r}: a prompt as text needs a tokenizer")
            prompt = self._tokenizer.encode(prompt)
        if isinstance(prompt, Sequence) and not isinstance(prompt, (bytes, bytearray)):
            listed: list[Any] = prompt if isinstance(prompt, list) else list(prompt)
            made = ids_of_list(listed, self._vocab_size)
            if made is not None and made.size > 0:
                return made
            prompt = [  # and what is wrong with it
                self._token_id(request_id, one, place) for place, one in enumerate(listed)
            ]
        ids: NDArray[Any] = np.asarray(prompt)
        if ids.size == 0:
            raise ValueError(
                f"request {request_id!r}: the prompt is empty; give at least one token"
            )
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise TypeError(
                f"request {request_id!r}: a prompt is text or a flat list of integer token ids, "
                f"got {type(prompt).__name__} of {ids.dtype} with shape {ids.shape}"
            )
        outside = (ids < 0) | (ids >= self._vocab_size)
        if outside.any():
            place = int(outside.argmax())
            raise self._outside(request_id, int(ids[place]), place)
        return ids.astype(np.int32)

    def _token_id(self, request_id: str, value: Any, place: int) -> int:
        """value as an int, which NumPy's integers become too; truths do not."""
        try:
            if isinstance(value, bool):
                raise TypeError
            token_id = operator.index(value)
        except TypeError:
            raise TypeError(
                f"request {request_id!r}: a prompt is text or a flat list of integer token ids, "
                f"got {type(value).__name__} {value!r:.200} at position {place}"
            ) from None
        if not 0 <= token_id < self._vocab_size:
            raise self._outside(request_id, token_id, place)
        return token_id

    def _outside(self, request_id: str, token_id: int, place: int) -> ValueError:
        num_bits = token_id.bit_length()  # Python refuses to write out more than some thousands
        told = str(token_id) if num_bits <= 128 else f"of {num_bits} bits"
        return ValueError(
            f"request {request_id!r}: token id {told} at position {place} is outside the "
            f"vocabulary (0 to {self._vocab_size - 1})"
        )

    def _max_tokens(self, request_id: str, prompt_len: int, params: SamplingParams) -> int:
        room = self._max_model_len - prompt_len
        if room < 1:
            requested = "any" if params.max_tokens is None else str(params.max_tokens)
            raise ValueError(
                f"request {request_id!r}: the prompt has {prompt_len} tokens and max_tokens is "
                f"{requested}, but max_model_len is {self._max_model_len}, prompt and answer "
                f"together: shorten the prompt to {self._max_model_len - 1} tokens or raise "
                "max_model_len"
            )
        if params.max_tokens is not None:
            return min(params.max_tokens, room)
        # The last token's K/V needs no place. A prompt too long for the pool is refused later, with
        # the pool's numbers.
        return max(1, min(room, self._num_cache_tokens + 1 - prompt_len))


def _seeds(seed: int | None) -> Iterator[int]:
    """For requests without a seed: random ones, or the engine's own sequence."""
    while seed is None:
        yield secrets.randbits(64)
    zeros = np.zeros(_SEEDS_AT_ONCE, dtype=np.uint64)
    key = tuple(zeros + np.uint64(word) for word in divmod(seed, 2**32)[::-1])
    for first in itertools.count(0, _SEEDS_AT_ONCE):
        counter = np.arange(first, first + _SEEDS_AT_ONCE, dtype=np.uint64)
        # The last word sets these apart from draws of tokens.
        low, high, _, _ = philox4x32((counter, zeros, zeros, zeros + np.uint64(1)), key)
        yield from (high << np.uint64(32) | low).tolist()


def check_cache_salt(request_id: str, salt: str | None) -> None:
    if salt is None:
        return
    if not isinstance(salt, str):
        raise TypeError(f"request {request_id!r}: cache_salt must be a string, got {salt!r}")
    try:
        num_bytes = len(salt.encode())
    except UnicodeEncodeError as error:
        raise ValueError(f"request {request_id!r}: cache_salt is not valid text: {error}") from None
    if not 1 <= num_bytes <= MAX_CACHE_SALT_LEN:
        raise ValueError(
            f"request {request_id!r}: cache_salt must have 1 to {MAX_CACHE_SALT_LEN} bytes, got "
            f"{num_bytes}; leave it out to share with all requests that have none"
        )
