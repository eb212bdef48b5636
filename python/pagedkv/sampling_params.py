"""How one request's tokens are chosen and when it ends. A plain value, checked when made; used by
server, engine and sampling.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

_MAX_STOP_STRINGS = 64
_MAX_STOP_TOKEN_IDS = 256  # of each running sequence they are a row in one array
_MAX_SEED = 2**64 - 1
_MAX_BEAM_WIDTH = 64
MAX_FORKS = 128  # answers of one prompt: a bound on what one small request can ask for


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling options of one request, with the names that vLLM and OpenAI users know.

    Args:
        temperature: 0 is greedy; below 1e-5 counts as greedy. Finite, >= 0.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches top_p. In (0, 1].
        seed: makes the draws of this request repeatable, whatever its neighbours are. None: a
            random one.
        max_tokens: most tokens to generate, cut to what max_model_len leaves after the prompt; the
            answer then ends with "length". None: all of that.
        stop: strings that end the text; it is cut before the one that is complete first.
        stop_token_ids: token ids that end the text.
        ignore_eos: go on past the end-of-sequence token.
        include_stop_str_in_output: keep the stop string in the text.
        skip_special_tokens: leave special tokens out of the text.
        n: answers to return, 1 to 128. The prompt is computed once and its blocks are shared;
            answer k draws with (seed, k).
        best_of: answers to generate, n to 128; the n with the highest cumulative log-probability
            are returned, best first. None: n.
        beam_width: beams of a beam search, 2 to 64, of which the n best are returned, best first;
            it chooses by log-probability alone: temperature must be 0. None: no beam search.
        length_penalty: beams are ranked by cumulative log-probability / length ** length_penalty;
            above 0 favours longer ones.
        early_stopping: when a search ends. True: as soon as beam_width beams have finished; False:
            when the best running one, at its present length, cannot beat them; "never": when it
            could not at any length.

    Raises:
        ValueError, TypeError: a value out of its range, naming it and what is allowed.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    max_tokens: int | None = 16
    stop: Sequence[str] = field(default=())
    stop_token_ids: Sequence[int] = field(default=())
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    n: int = 1
    best_of: int | None = None
    beam_width: int | None = None
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature, low=0.0)
        _check_number("top_p", self.top_p, low=0.0, high=1.0, low_open=True)
        _check_int("top_k", self.top_k, low=-1)
        if self.seed is not None:
            _check_int("seed", self.seed, low=0, high=_MAX_SEED)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, low=1)
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if len(stop) > _MAX_STOP_STRINGS:
            raise ValueError(
                f"stop has {len(stop)} strings; at most {_MAX_STOP_STRINGS} are allowed"
            )
        for text in stop:
            if not isinstance(text, str) or not text:
                raise ValueError(f"stop must hold non-empty strings, got {text!r}")
        object.__setattr__(self, "stop", stop)
        ids = tuple(self.stop_token_ids)
        if len(ids) > _MAX_STOP_TOKEN_IDS:
            raise ValueError(
                f"stop_token_ids has {len(ids)} ids; at most {_MAX_STOP_TOKEN_IDS} are allowed"
            )
        for token_id in ids:
            _check_int("stop_token_ids", token_id, low=0)
        object.__setattr__(self, "stop_token_ids", ids)
        check_num_forks(self.n)
        if self.best_of is not None:
            _check_int("best_of", self.best_of, low=self.n, high=MAX_FORKS)
        self._check_beams()

    def _check_beams(self) -> None:
        _check_number("length_penalty", self.length_penalty, low=-100.0, high=100.0)
        if self.early_stopping not in (True, False, "never"):
            raise ValueError(
                f'early_stopping must be True, False or "never", got {self.early_stopping!r}'
            )
        if self.beam_width is None:
            if self.length_penalty != 1.0 or self.early_stopping is not False:
                raise ValueError("length_penalty and early_stopping need a beam_width")
            return
        _check_int("beam_width", self.beam_width, low=2, high=_MAX_BEAM_WIDTH)
        if self.n > self.beam_width:
            raise ValueError(f"n is {self.n}, but a beam search has {self.beam_width} beams")
        if self.best_of is not None:
            raise ValueError("best_of has no meaning beside beam_width: leave it out")
        if not self.is_greedy:
            raise ValueError(
                f"beam search draws nothing: temperature must be 0, got {self.temperature!r}"
            )
        if self.stop:
            raise ValueError("beam search ends at token ids: use stop_token_ids instead of stop")

    @property
    def num_forks(self) -> int:
        """Sequences that are generated for the prompt."""
        if self.beam_width is not None:
            return self.beam_width
        return self.n if self.best_of is None else self.best_of

    def num_candidates(self, num_stop_ids: int) -> int:
        """Continuations of each beam that a beam search looks at: enough that beam_width of them do
        not end, whatever else does. 0: no beam search.
        """
        return max(2, 1 + num_stop_ids) * self.beam_width if self.beam_width is not None else 0

    @property
    def is_greedy(self) -> bool:
        return self.temperature < 1e-5

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise ValueError for ids that a vocabulary of vocab_size does not have."""
        for token_id in self.stop_token_ids:
            if token_id >= vocab_size:
                raise ValueError(
                    f"stop_token_ids has {token_id}, outside the vocabulary (0 to {vocab_size - 1})"
                )


def check_num_forks(n: int) -> None:
    """Raise TypeError or ValueError unless n sequences may be asked for at once."""
    _check_int("n", n, low=1, high=MAX_FORKS)


def _check_number(
    name: str, value: float, *, low: float, high: float = math.inf, low_open: bool = False
) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {type(value).__name__} {value!r}")
    bounds = f"{'above' if low_open else 'at least'} {low:g}"
    if high != math.inf:
        bounds += f" and at most {high:g}"
    if not math.isfinite(value) or value < low or value > high or (low_open and value == low):
        raise ValueError(f"{name} must be finite, {bounds}, got {value!r}")


def _check_int(name: str, value: int, *, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, got {type(value).__name__} {value!r}")
    if value < low or (high is not None and value > high):
        upper = "" if high is None else f" and at most {high}"
        raise ValueError(f"{name} must be at least {low}{upper}, got {value}")
