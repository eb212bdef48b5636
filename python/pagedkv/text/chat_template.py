"""Chat templates: a model's own Jinja text, turned into a prompt inside a sandbox.

The template comes with the model, never with a request. It runs in an immutable sandbox without
access to Python's attributes, and what it may build is bounded.
"""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Mapping, Sequence
from typing import NoReturn

import jinja2
from jinja2.exceptions import SecurityError
from jinja2.ext import loopcontrols
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_TEMPLATE_CHARS = 2**20
MAX_OUTPUT_CHARS = 2**23

Message = Mapping[str, object]

_SEQUENCES = (str, list, tuple)


class _Environment(ImmutableSandboxedEnvironment):
    """Refuses products and powers that would make something huge out of something small."""

    intercepted_binops = frozenset(["*", "**"])

    def call_binop(self, context: Context, operator: str, left: object, right: object) -> object:
        a, b = _size(left), _size(right)
        limit = 2.0**63
        if isinstance(left, _SEQUENCES) or isinstance(right, _SEQUENCES):
            limit = MAX_OUTPUT_CHARS
        if (a * b if operator == "*" else _power_bound(a, b)) > limit:
            raise SecurityError(f"the result of {operator} would be too large")
        result: object = super().call_binop(context, operator, left, right)
        return result


def _size(value: object) -> float:
    """A number's absolute value, or a text's length."""
    if isinstance(value, _SEQUENCES):
        return len(value)
    if not isinstance(value, int | float) or not abs(value) < 2**62:
        raise SecurityError("only texts, lists and numbers below 2**62 can be multiplied")
    return abs(value)


def _power_bound(base: float, exponent: float) -> float:
    """At least base ** exponent, without computing a huge number."""
    return float(2 ** min(math.ceil(base).bit_length() * math.ceil(exponent), 1000))


def _refuse(message: str) -> NoReturn:
    """raise_exception of a template."""
    raise jinja2.TemplateError(message)


def _to_json(value: object, indent: int | None = None) -> str:
    """As Hugging Face's filter: characters stay what they are."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


class ChatTemplate:
    """A compiled template. Immutable; safe to use from several threads.

    special_tokens: what the template may refer to, such as bos_token and eos_token.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compile a template.

        Raises:
            ValueError: it is too long or has a syntax error.
        """
        if len(source) > MAX_TEMPLATE_CHARS:
            raise ValueError(
                f"the chat template has {len(source)} characters, more than {MAX_TEMPLATE_CHARS}"
            )
        environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _now
        self._special_tokens = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(
                f"the chat template has a syntax error in line {error.lineno}: {error.message}"
            ) from error

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """The prompt of a conversation.

        Args:
            messages: in order, each with a "role" and usually a "content" of text.
            add_generation_prompt: whether the prompt ends where the assistant's answer begins.

        Raises:
            ValueError: messages are malformed, the template refuses them, or the prompt would
                be longer than MAX_OUTPUT_CHARS.
        """
        check_messages(messages)
        parts: list[str] = []
        length = 0
        try:
            for part in self._template.generate(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            ):
                length += len(part)
                if length > MAX_OUTPUT_CHARS:
                    raise SecurityError(f"the prompt is longer than {MAX_OUTPUT_CHARS} characters")
                parts.append(part)
        # Whatever a template does wrong is its own or the messages' fault, never the engine's.
        except Exception as error:
            raise ValueError(f"the chat template refused the messages: {error}") from error
        return "".join(parts)


def check_messages(messages: Sequence[Message]) -> None:
    """Raises ValueError unless messages are a conversation: not empty, each with a role."""
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        raise ValueError("messages must be a list of at least one message")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"message {index} is not an object with a role of text")
        content = message.get("content")
        if content is not None and not isinstance(content, str | list):
            raise ValueError(
                f"message {index}: content is {type(content).__name__}, "
                "expected text, a list of parts, or null"
            )
