"""How one request's tokens are chosen and when it ends. A value, checked when made; used by server,
engine and sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from pagedkv.numbers import integer, real_between, truth

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
    """Sampling options of one request, with the names that vLLM and OpenAI users know. NumPy's
    numbers are kept as Python's.

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
        self._keep_real("temperature", low=0.0, high=1e6)
        self._keep_real("top_p", low=0.0, high=1.0, low_open=True)
        self._keep_integer("top_k", low=-1)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            object.__setattr__(self, name, truth(name, getattr(self, name)))
        if self.seed is not None:
            self._keep_integer("seed", low=0, high=_MAX_SEED)
        if self.max_tokens is not None:
            self._keep_integer("max_tokens", low=1)
        object.__setattr__(self, "stop", _strings("stop", self.stop, _MAX_STOP_STRINGS))
        object.__setattr__(self, "stop_token_ids", _ids("stop_token_ids", self.stop_token_ids))
        if len(self.stop_token_ids) > _MAX_STOP_TOKEN_IDS:
            raise ValueError(
                f"stop_token_ids has {len(self.stop_token_ids)} ids; at most {_MAX_STOP_TOKEN_IDS} "
                "are allowed"
            )
        self._check_logit_rules()
        object.__setattr__(self, "n", checked_num_forks(self.n))
        if self.best_of is not None:
            self._keep_integer("best_of", low=self.n, high=MAX_FORKS)
        self._check_beams()

    def _keep_integer(self, name: str, *, low: int, high: int | None = None) -> None:
        object.__setattr__(self, name, integer(name, getattr(self, name), low=low, high=high))

    def _keep_real(self, name: str, *, low: float, high: float, low_open: bool = False) -> None:
        value = getattr(self, name)
        object.__setattr__(
            self, name, real_between(name, value, low=low, high=high, low_open=low_open)
        )

    def _check_logit_rules(self) -> None:
        self._keep_real("min_p", low=0.0, high=1.0)
        self._keep_real("repetition_penalty", low=0.01, high=100.0)
        self._keep_real("frequency_penalty", low=-2.0, high=2.0)
        self._keep_real("presence_penalty", low=-2.0, high=2.0)
        object.__setattr__(self, "logit_bias", _pairs("logit_bias", self.logit_bias))
        seen: set[int] = set()
        for token_id, _ in self.logit_bias_pairs:
            if token_id in seen:
                raise ValueError(f"logit_bias names {token_id} twice")
            seen.add(token_id)
        if self.allowed_token_ids is not None:
            allowed = _ids("allowed_token_ids", self.allowed_token_ids)
            if not allowed:
                raise ValueError("allowed_token_ids is empty, so that no token could be chosen")
            object.__setattr__(self, "allowed_token_ids", allowed)
        object.__setattr__(self, "bad_words", _strings("bad_words", self.bad_words, _MAX_BAD_WORDS))
        self._keep_integer("min_tokens", low=0, high=self.max_tokens)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._keep_integer(name, low=0, high=_MAX_LOGPROBS)
        processors = _listed("logits_processors", self.logits_processors)
        for one in processors:
            if not callable(one):
                raise TypeError(f"logits_processors must hold functions, got {one!r:.200}")
        object.__setattr__(self, "logits_processors", processors)

    def _check_beams(self) -> None:
        self._keep_real("length_penalty", low=-100.0, high=100.0)
        if isinstance(self.early_stopping, np.bool_):
            object.__setattr__(self, "early_stopping", bool(self.early_stopping))
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
        self._keep_integer("beam_width", low=2, high=_MAX_BEAM_WIDTH)
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


def checked_num_forks(n: int) -> int:
    """n, or TypeError or ValueError unless so many sequences may be asked for at once."""
    return integer("n", n, low=1, high=MAX_FORKS)


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
    return tuple(integer(name, token_id, low=0) for token_id in _listed(name, given))


def _pairs(name: str, given: object) -> tuple[tuple[int, float], ...]:
    """A mapping, or what it was turned into, as pairs."""
    pairs = tuple(given.items()) if isinstance(given, Mapping) else given
    if not isinstance(pairs, tuple) or not all(
        isinstance(one, tuple) and len(one) == 2 for one in pairs
    ):
        raise TypeError(f"{name} must map token ids to numbers, got {given!r:.200}")
    ids = [integer(name, token_id, low=0) for token_id, _ in pairs]
    return tuple(
        (token_id, real_between(f"{name} of {token_id}", bias, low=-100.0, high=100.0))
        for token_id, (_, bias) in zip(ids, pairs, strict=True)
    )
