"""A tokenizer from the metadata of a GGUF file: byte-level BPE (`gpt2`) and SentencePiece BPE
(`llama`). Other kinds are refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split
from tokenizers.processors import TemplateProcessing

_PREFIX = "tokenizer.ggml."
# GGUF's token types.
_UNDEFINED, _NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(7)
# What text never turns into by itself: these have meanings, or are written as bytes.
_NOT_JOINED = (_UNKNOWN, _CONTROL, _BYTE)
# Every cut of a token is looked at, so a few long ones could keep the loader busy for hours.
_MAX_TOKEN_CHARS = 256
_LOOKS_LIKE_CONTROL = re.compile(r"<[^\s<>]+>|\[[^\s\[\]]+\]")
_SPACE = "\u2581"  # SentencePiece's visible space

# Words, up to three digits, punctuation and runs of spaces, as Llama 3 splits text.
_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# The same, but digits one by one, as Qwen2 and Qwen3 split text.
_QWEN2_WORDS = _LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")


def _gpt2() -> PreTokenizer:
    return ByteLevel(add_prefix_space=False)


def _smollm() -> PreTokenizer:
    return Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])


def _words(pattern: str) -> PreTokenizer:
    words = Split(Regex(pattern), behavior="isolated")
    return Sequence([words, ByteLevel(add_prefix_space=False, use_regex=False)])


_LLAMA3 = ("llama-bpe", "llama3", "llama-v3")
# By tokenizer.ggml.pre.
_PRE_TOKENIZERS: dict[str, Callable[[], PreTokenizer]] = {
    "gpt-2": _gpt2,
    "smollm": _smollm,
    **dict.fromkeys(_LLAMA3, lambda: _words(_LLAMA3_WORDS)),
    "qwen2": lambda: _words(_QWEN2_WORDS),
    "deepseek-r1-qwen": lambda: _words(_QWEN2_WORDS),
}


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a GGUF file says of its tokens. special_tokens: for chat templates."""

    backend: Tokenizer
    eos_token_ids: frozenset[int]
    special_tokens: dict[str, str]
    chat_template: str | None


@dataclass(frozen=True, slots=True)
class _Metadata:
    """The metadata below tokenizer.ggml., checked where it is read."""

    values: Mapping[str, object]

    def texts(self, key: str) -> list[str]:
        value = self.values.get(_PREFIX + key)
        if not isinstance(value, list) or not value:
            raise ValueError(f"GGUF metadata: {_PREFIX}{key} is missing or not a list of texts")
        return value

    def numbers(self, key: str, count: int) -> list[float] | None:
        value = self.values.get(_PREFIX + key)
        if value is None:
            return None
        if not isinstance(value, np.ndarray) or len(value) != count:
            raise ValueError(f"GGUF metadata: {_PREFIX}{key} is not a list of {count} numbers")
        numbers: list[float] = value.tolist()
        return numbers

    def token_id(self, key: str, num_tokens: int) -> int | None:
        value = self.values.get(_PREFIX + key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < num_tokens:
            raise ValueError(
                f"GGUF metadata: {_PREFIX}{key} is {value!r:.200}, not an id below {num_tokens}"
            )
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(_PREFIX + key)
        if value is not None and not isinstance(value, bool):
            raise ValueError(
                f"GGUF metadata: {_PREFIX}{key} is {value!r:.200}, neither true nor false"
            )
        return default if value is None else value

    def text(self, key: str) -> str | None:
        value = self.values.get(key)
        if value is not None and not isinstance(value, str):
            raise ValueError(f"GGUF metadata: {key} is {value!r:.200}, not a text")
        return value

    def types(self, count: int) -> list[float]:
        """The kind of each token."""
        found = self.numbers("token_type", count) or [_NORMAL] * count
        for one in found:
            if one not in range(_BYTE + 1):
                raise ValueError(f"GGUF metadata: {_PREFIX}token_type has the unknown type {one}")
        return found


def read_vocabulary(values: Mapping[str, object]) -> Vocabulary:
    """Build the tokenizer that a GGUF file's metadata describe.

    Raises:
        ValueError: the kind of tokenizer is not supported, or the metadata are malformed.
    """
    metadata = _Metadata(values)
    kind = values.get(_PREFIX + "model")
    if not isinstance(kind, str) or kind not in ("gpt2", "llama"):
        raise ValueError(
            f"GGUF metadata: {_PREFIX}model is {kind!r:.200}; supported are gpt2 and llama"
        )
    tokens = metadata.texts("tokens")
    ids = {token: index for index, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        raise ValueError(f"GGUF metadata: {_PREFIX}tokens holds some token twice")
    types = metadata.types(len(tokens))
    named = {
        name: metadata.token_id(f"{name}_token_id", len(tokens)) for name in ("bos", "eos", "eot")
    }
    template = metadata.text("tokenizer.chat_template")
    types = _with_controls(tokens, types, set(named.values()), template or "")
    is_byte_level = kind == "gpt2"
    backend = _byte_level(metadata, ids) if is_byte_level else _sentencepiece(metadata, ids, types)
    for wanted in ((_CONTROL, _UNKNOWN), (_USER_DEFINED,)):
        is_special = _CONTROL in wanted
        added = [
            AddedToken(token, special=is_special, normalized=False)
            for token, of_type in zip(tokens, types, strict=True)
            if of_type in wanted
        ]
        add = backend.add_special_tokens if is_special else backend.add_tokens
        add(added)
    _frame(backend, metadata, tokens, named)
    return Vocabulary(
        backend=backend,
        eos_token_ids=frozenset(
            index for name, index in named.items() if name != "bos" and index is not None
        ),
        special_tokens={
            f"{name}_token": tokens[index]
            for name, index in named.items()
            if name != "eot" and index is not None
        },
        chat_template=template,
    )


def _with_controls(
    tokens: list[str], types: list[float], named: set[int | None], template: str
) -> list[float]:
    """The types, with those tokens as control ones that some files call user-defined or normal:
    which begin or end a text, and names in brackets that the chat template spells. Otherwise a
    message could make them.
    """

    def is_control(index: int) -> bool:
        if index in named:
            return types[index] != _UNKNOWN
        token = tokens[index]
        looks_so = types[index] == _USER_DEFINED and _LOOKS_LIKE_CONTROL.fullmatch(token)
        return bool(looks_so) and token in template

    return [_CONTROL if is_control(index) else one for index, one in enumerate(types)]


def _byte_level(metadata: _Metadata, ids: dict[str, int]) -> Tokenizer:
    pre = metadata.values.get(_PREFIX + "pre")
    if not isinstance(pre, str) or pre not in _PRE_TOKENIZERS:
        raise ValueError(
            f"GGUF metadata: {_PREFIX}pre is {pre!r:.200}; "
            f"supported are {', '.join(_PRE_TOKENIZERS)}"
        )
    merges = [(left, right) for left, _, right in map(_cut, metadata.texts("merges"))]
    try:
        # Llama 3 takes a word that is a token as it is, even where merges do not lead to it.
        model = models.BPE(ids, merges, ignore_merges=pre in _LLAMA3)
    # The library raises plain exceptions for merges of tokens that do not exist.
    except Exception as error:
        raise ValueError(f"GGUF metadata: {_PREFIX}merges are malformed: {error}") from error
    backend = Tokenizer(model)
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    backend.decoder = decoders.ByteLevel()
    return backend


def _cut(merge: str) -> tuple[str, str, str]:
    """left, space, right. Byte-level tokens hold no space."""
    return merge.partition(" ")


def _sentencepiece(metadata: _Metadata, ids: dict[str, int], types: list[float]) -> Tokenizer:
    scores = metadata.numbers("scores", len(ids))
    if scores is None or not np.isfinite(scores).all():
        raise ValueError(f"GGUF metadata: {_PREFIX}scores is missing or not finite")
    unknown = metadata.token_id("unknown_token_id", len(ids))
    tokens = list(ids)
    backend = Tokenizer(
        models.BPE(
            ids,
            _merges(ids, scores, types),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    has_prefix = metadata.flag("add_space_prefix", True)
    spaces = normalizers.Replace(" ", _SPACE)
    backend.normalizer = (
        normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if has_prefix else spaces
    )
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if has_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)
    return backend


def _merges(ids: dict[str, int], scores: list[float], types: list[float]) -> list[tuple[str, str]]:
    """SentencePiece joins the neighbours whose union scores highest; as a list of merges, that is
    every split of every token into two tokens, better unions first."""
    joined = [(token, index) for token, index in ids.items() if types[index] not in _NOT_JOINED]
    longest = max((len(token) for token, _ in joined), default=0)
    if longest > _MAX_TOKEN_CHARS:
        raise ValueError(
            f"GGUF metadata: {_PREFIX}tokens has one of {longest} characters, more than "
            f"{_MAX_TOKEN_CHARS}"
        )
    found = [
        (-scores[index], index, token[:cut], token[cut:])
        for token, index in joined
        for cut in range(1, len(token))
        if token[:cut] in ids and token[cut:] in ids
    ]
    return [(left, right) for _, _, left, right in sorted(found)]


def _frame(
    backend: Tokenizer, metadata: _Metadata, tokens: list[str], named: dict[str, int | None]
) -> None:
    """Let encode put the tokens around a text that the model expects there."""
    is_llama = metadata.values.get(_PREFIX + "model") == "llama"
    starts = is_llama or metadata.values.get(_PREFIX + "pre") in _LLAMA3
    frame = {
        "bos": metadata.flag("add_bos_token", starts),
        "eos": metadata.flag("add_eos_token", False),
    }
    used = {name: index for name, index in named.items() if frame.get(name) and index is not None}
    if used:
        # By names of our own: what the tokens are called may mean something else in a template.
        backend.post_processor = TemplateProcessing(
            single=[*(["bos"] if "bos" in used else []), "$A", *(["eos"] if "eos" in used else [])],
            special_tokens=[
                {"id": name, "ids": [index], "tokens": [tokens[index]]}
                for name, index in used.items()
            ],
        )
