"""load_tokenizer: from a model directory, or from the metadata of a GGUF file, to a Tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import tokenizers

from pagedkv.text.chat_template import ChatTemplate
from pagedkv.text.gguf_vocabulary import read_vocabulary
from pagedkv.text.tokenizer import Tokenizer, value_errors

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


def load_tokenizer(source: str | Path | Mapping[str, object]) -> Tokenizer:
    """Load a tokenizer and its chat template.

    Args:
        source: a directory with tokenizer.json (and, as a rule, tokenizer_config.json), or the
            metadata of a GGUF file. A checkpoint's tokenizer_source is one of them.

    Raises:
        ValueError: files are missing or malformed, the kind of tokenizer is not supported, or the
            chat template has a syntax error.
    """
    if isinstance(source, Mapping):
        vocabulary = read_vocabulary(source)
        template = vocabulary.chat_template
        return Tokenizer(
            vocabulary.backend,
            eos_token_ids=vocabulary.eos_token_ids,
            chat_template=_compiled(template, vocabulary.special_tokens),
        )
    path = Path(source)
    backend = _backend(path / "tokenizer.json")
    settings = _settings(path / "tokenizer_config.json")
    named = {name: text for name in _NAMED_TOKENS if (text := _named_token(settings, name))}
    return Tokenizer(
        backend,
        eos_token_ids=_eos(backend, named.get("eos_token")),
        chat_template=_compiled(_template_source(path, settings), named),
    )


def _compiled(source: str | None, special_tokens: Mapping[str, str]) -> ChatTemplate | None:
    return None if source is None else ChatTemplate(source, special_tokens)


def _backend(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise ValueError(
            f"{path} is missing; a tokenizer comes from tokenizer.json or from a GGUF file"
        )
    with value_errors(f"{path} is not a valid tokenizer"):
        backend = tokenizers.Tokenizer.from_file(str(path))
        backend.encode("a")  # some parts of the file are looked at only now
    return backend


def _settings(path: Path) -> dict[str, object]:
    if not path.exists():
        return {}
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{path} holds a {type(settings).__name__}, not an object")
    return settings


def _named_token(settings: Mapping[str, object], name: str) -> str | None:
    """A token's text; older files write it as an object."""
    value = settings.get(name)
    if isinstance(value, Mapping):
        value = value.get("content")
    if value is not None and not isinstance(value, str):
        raise ValueError(f"tokenizer_config.json: {name} is {value!r:.200}, not a token")
    return value


def _eos(backend: tokenizers.Tokenizer, token: str | None) -> frozenset[int]:
    if token is None:
        return frozenset()
    index = backend.token_to_id(token)
    if index is None:
        raise ValueError(
            f"tokenizer_config.json: eos_token is {token!r:.200}, which is not in the vocabulary"
        )
    return frozenset([index])


def _template_source(path: Path, settings: Mapping[str, object]) -> str | None:
    """The chat template: a file of its own, or a setting; of several named ones, the default."""
    file = path / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except ValueError as error:
            raise ValueError(f"{file} is not UTF-8: {error}") from error
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = (one for one in template if isinstance(one, Mapping))
        default = (one.get("template") for one in named if one.get("name") == "default")
        template = next(default, None)
    if template is not None and not isinstance(template, str):
        raise ValueError(f"tokenizer_config.json: chat_template is {type(template).__name__}")
    return template
