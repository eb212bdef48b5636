"""How one request's tokens are chosen and when it ends. A value, checked when made; used by server,
engine and sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # a replay, which needs no torch, makes these values too
    import torch

_MAX_STOP_STRINGS = 64
_MAX_STOP_TOKEN_IDS = 256  # of each running sequence they are a row in one array
_MAX_SEED = 2**64 - 1
_MAX_BEAM_WIDTH = 64
_MAX_BAD_WORDS = 256
_MAX_LOGPROBS = 20
MAX_FORKS = 128  # answers of one prompt: a bound on what one small request can ask for

_T = TypeVar("_T")

# (prompt_token_ids int32 [prompt_len], output_token_ids int32 [num generated], logits float32
# [vocab_size]) to the logits to go on with, floats of the same shape on the same device; it may
# write into those it is given.
LogitsProcessor = Callable[[NDArray[np.int32], NDArray[np.int32], "torch.Tensor"], "torch.Tensor"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling options of one request, with the names that vLLM and OpenAI users know.

    Logits are changed in this order, whatever the order of the options: logit_bias;
    repetition_penalty, frequency_penalty, presence_penalty; logits_processors; allowed_token_ids,
    bad_words, min_tokens; temperature, min_p, top_k, top_p. A greedy choice needs no more than the
    first three groups.

    Args:
        temperature: 0 is greedy; below 1e-5 counts as greedy. 0 to 1e6.
        top_k: keep the k most likely tokens; 0, -1 or more than there are keeps all.
        top_p: keep the smallest set of tokens whose probability reaches top_p. In (0, 1].
        min_p: keep tokens at least min_p times as probable as the most probable one. In [0, 1].
        repetition_penalty: divides the logit of each token of prompt or answer if it is above 0,
            multiplies it otherwise. 0.01 to 100; above 1 makes repetitions less likely.
        frequency_penalty: is subtracted as often as the token stands in the answer. -2 to 2.
        presence_penalty: is subtracted once if the token stands in the answer. -2 to 2.
        logit_bias: token id -> what is added to its logit, -100 to 100.
        allowed_token_ids: only these may be chosen. None: all.
        bad_words: words that are not to be generated: the last token of a word, as the tokenizer
            writes it at a text's beginning and behind a space, is forbidden behind the others.
        min_tokens: nothing ends the answer before it has so many: token ids that would are
            forbidden, stop strings count in the text behind them.
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
        logprobs: tell the log-probability of each generated token, and of so many of the most
            likely ones beside it, 0 to 20: under the model itself, of the logits before any option
            changes them. None: of none.
        prompt_logprobs: the same of the prompt's tokens. All of it is computed then: its prefix is
            neither taken from the prefix cache nor shared with other requests.
        logits_processors: functions of yours, called in their order at each token; see
            LogitsProcessor. For users of the library: code never comes in a request to a server.

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
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logits_processors: Sequence[LogitsProcessor] = ()

    def __post_init__(self) -> None:
        # Beyond this all tokens are as likely; its inverse must be a number of 32 bits.
        _check_number("temperature", self.temperature, low=0.0, high=1e6)
        _check_number("top_p", self.top_p, low=0.0, high=1.0, low_open=True)
        _check_int("top_k", self.top_k, low=-1)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise TypeError(
                    f"{name} must be True or False, got {type(value).__name__} {value!r:.200}"
                )
        if self.seed is not None:
            _check_int("seed", self.seed, low=0, high=_MAX_SEED)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, low=1)
        object.__setattr__(self, "stop", _strings("stop", self.stop, _MAX_STOP_STRINGS))
        object.__setattr__(self, "stop_token_ids", _ids("stop_token_ids", self.stop_token_ids))
        if len(self.stop_token_ids) > _MAX_STOP_TOKEN_IDS:
            raise ValueError(
                f"stop_token_ids has {len(self.stop_token_ids)} ids; at most {_MAX_STOP_TOKEN_IDS} "
                "are allowed"
            )
        self._check_logit_rules()
        check_num_forks(self.n)
        if self.best_of is not None:
            _check_int("best_of", self.best_of, low=self.n, high=MAX_FORKS)
        self._check_beams()

    def _check_logit_rules(self) -> None:
        _check_number("min_p", self.min_p, low=0.0, high=1.0)
        _check_number("repetition_penalty", self.repetition_penalty, low=0.01, high=100.0)
        _check_number("frequency_penalty", self.frequency_penalty, low=-2.0, high=2.0)
        _check_number("presence_penalty", self.presence_penalty, low=-2.0, high=2.0)
        object.__setattr__(self, "logit_bias", _pairs("logit_bias", self.logit_bias))
        seen: set[int] = set()
        for token_id, bias in self.logit_bias_pairs:
            _check_int("logit_bias", token_id, low=0)
            _check_number(f"logit_bias of {token_id}", bias, low=-100.0, high=100.0)
            if token_id in seen:
                raise ValueError(f"logit_bias names {token_id} twice")
            seen.add(token_id)
        if self.allowed_token_ids is not None:
            allowed = _ids("allowed_token_ids", self.allowed_token_ids)
            if not allowed:
                raise ValueError("allowed_token_ids is empty, so that no token could be chosen")
            object.__setattr__(self, "allowed_token_ids", allowed)
        object.__setattr__(self, "bad_words", _strings("bad_words", self.bad_words, _MAX_BAD_WORDS))
        _check_int("min_tokens", self.min_tokens, low=0, high=self.max_tokens)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), low=0, high=_MAX_LOGPROBS)
        processors = _listed("logits_processors", self.logits_processors)
        for one in processors:
            if not callable(one):
                raise TypeError(f"logits_processors must hold functions, got {one!r:.200}")
        object.__setattr__(self, "logits_processors", processors)

    def _check_beams(self) -> None:
        _check_number("length_penalty", self.length_penalty, low=-100.0, high=100.0)
        is_known = isinstance(self.early_stopping, bool) or (
            isinstance(self.early_stopping, str) and self.early_stopping == "never"
        )
        if not is_known:
            raise ValueError(
                f'early_stopping must be True, False or "never", got {self.early_stopping!r:.200}'
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
                f"temperature must be 0 in a beam search, got {self.temperature!r:.200}"
            )
        if self.stop:
            raise ValueError("beam search ends at token ids: use stop_token_ids instead of stop")
        if self.logprobs is not None or self.prompt_logprobs is not None:
            raise ValueError("logprobs and prompt_logprobs do not go with beam_width")
        if self.changes_logits or self.min_p:
            raise ValueError(
                "beam search chooses by the model's own log-probabilities: no option that changes "
                "logits goes with beam_width"
            )

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

    @property
    def logit_bias_pairs(self) -> tuple[tuple[int, float], ...]:
        """logit_bias as it is kept."""
        assert isinstance(self.logit_bias, tuple)
        return self.logit_bias

    @property
    def has_penalties(self) -> bool:
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1, 0, 0)

    @property
    def changes_logits(self) -> bool:
        """Whether logits are changed before temperature, min_p, top-k and top-p."""
        return bool(
            self.has_penalties
            or self.logit_bias
            or self.allowed_token_ids is not None
            or self.bad_words
            or self.min_tokens
            or self.logits_processors
        )

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise ValueError for ids that a vocabulary of vocab_size does not have."""
        for name, ids in (
            ("stop_token_ids", self.stop_token_ids),
            ("allowed_token_ids", self.allowed_token_ids or ()),
            ("logit_bias", [token_id for token_id, _ in self.logit_bias_pairs]),
        ):
            for token_id in ids:
                if token_id >= vocab_size:
                    raise ValueError(
                        f"{name} has {token_id}, outside the vocabulary (0 to {vocab_size - 1})"
                    )


def check_num_forks(n: int) -> None:
    """Raise TypeError or ValueError unless n sequences may be asked for at once."""
    _check_int("n", n, low=1, high=MAX_FORKS)


def _listed(name: str, given: Iterable[_T]) -> tuple[_T, ...]:
    if isinstance(given, Mapping) or not isinstance(given, Iterable):
        raise TypeError(f"{name} must be a list, got {type(given).__name__} {given!r:.200}")
    return tuple(given)


def _strings(name: str, given: Sequence[str], most: int) -> tuple[str, ...]:
    """As a tuple; one string stands for itself."""
    texts = (given,) if isinstance(given, str) else _listed(name, given)
    if len(texts) > most:
        raise ValueError(f"{name} has {len(texts)} strings; at most {most} are allowed")
    for text in texts:
        if not isinstance(text, str) or not text:
            raise ValueError(f"{name} must hold non-empty strings, got {text!r:.200}")
    return texts


def _ids(name: str, given: Sequence[int]) -> tuple[int, ...]:
    ids = _listed(name, given)
    for token_id in ids:
        _check_int(name, token_id, low=0)
    return ids


def _pairs(name: str, given: object) -> tuple[tuple[int, float], ...]:
    """A mapping, or what it was turned into, as pairs."""
    if isinstance(given, Mapping):
        return tuple(given.items())
    if isinstance(given, tuple) and all(isinstance(one, tuple) and len(one) == 2 for one in given):
        return given
    raise TypeError(f"{name} must map token ids to numbers, got {given!r:.200}")


def _check_number(
    name: str, value: float, *, low: float, high: float, low_open: bool = False
) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {type(value).__name__} {value!r:.200}")
    bounds = f"{'above' if low_open else 'at least'} {low:g} and at most {high:g}"
    # Not by math.isfinite, which fails for integers that no float can hold.
    if not low <= value <= high or (low_open and value == low):
        raise ValueError(f"{name} must be finite, {bounds}, got {value!r:.200}")


def _check_int(name: str, value: int, *, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, got {type(value).__name__} {value!r:.200}")
    if value < low or (high is not None and value > high):
        upper = "" if high is None else f" and at most {high}"
        raise ValueError(f"{name} must be at least {low}{upper}, got {value}")
