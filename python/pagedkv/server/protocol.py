"""The bodies of requests. Every field that is not here is refused by name; types are strict, and no
number is NaN or infinite. Ranges stand here for the description at /openapi.json, and to bound
work; SamplingParams is what decides.

One thing that is wrong with a body is told, so nothing looks for more: a list is left at its first
wrong item, and of a union only the arm that the value looks like is tried. Otherwise 4 MB of nulls
are a million errors, and ten seconds in which nobody else is answered.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    model_validator,
)

_MAX_INT = 2**31 - 1
MAX_PROMPTS = 128
_MAX_STOP_CHARS = 1024
_MAX_BAD_WORD_CHARS = 128

Id = Annotated[int, Field(ge=0, le=_MAX_INT)]
StopString = Annotated[str, Field(min_length=1, max_length=_MAX_STOP_CHARS)]
BadWord = Annotated[str, Field(min_length=1, max_length=_MAX_BAD_WORD_CHARS)]
TokenIds = Annotated[list[Id], Field(min_length=1, max_length=2**20, fail_fast=True)]


class Body(BaseModel):
    """What all bodies have in common."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


def _text_or_list(value: Any) -> str | None:
    """The only form that such a value can have."""
    forms: dict[type, str] = {str: "text", list: "list"}
    return forms.get(type(value))


def _form(text: str, items: str) -> Discriminator:
    """Of what is a text or a list, told in words where it is neither."""
    return Discriminator(
        _text_or_list,
        custom_error_type="form",
        custom_error_message=f"Input should be {text} or a list of {items}",
    )


class StreamOptions(Body):
    include_usage: bool = False


class ResponseFormat(Body):
    type: Literal["text"]


class GenerationBody(Body):
    """What completions, chat completions and forks have in common."""

    # OpenAI's description lets it be null.
    stream: Annotated[bool, BeforeValidator(lambda given: False if given is None else given)] = (
        False
    )
    stream_options: StreamOptions | None = None
    n: int | None = Field(default=None, ge=1, le=MAX_PROMPTS)
    best_of: int | None = Field(default=None, ge=1, le=MAX_PROMPTS)
    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    seed: int | None = Field(default=None, ge=0, lt=2**64)
    stop: (
        Annotated[
            Annotated[StopString, Tag("text")]
            | Annotated[list[StopString], Field(max_length=64, fail_fast=True), Tag("list")],
            _form("a text", "texts"),
        ]
        | None
    ) = None
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    logit_bias: dict[Annotated[str, Field(max_length=10)], float] | None = Field(
        default=None, max_length=1024
    )
    user: str | None = Field(default=None, max_length=256)
    response_format: ResponseFormat | None = None
    # vLLM's extensions
    top_k: int | None = Field(default=None, ge=-1, le=_MAX_INT)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=100)
    ignore_eos: bool = False
    min_tokens: int = Field(default=0, ge=0, le=_MAX_INT)
    stop_token_ids: Annotated[list[Id], Field(max_length=256, fail_fast=True)] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    allowed_token_ids: (
        Annotated[list[Id], Field(min_length=1, max_length=4096, fail_fast=True)] | None
    ) = None
    bad_words: Annotated[list[BadWord], Field(max_length=256, fail_fast=True)] | None = None
    priority: int = Field(default=0, ge=-(2**31), le=2**31)
    use_beam_search: bool = False
    length_penalty: float | None = Field(default=None, ge=-100, le=100)

    @model_validator(mode="after")
    def _check_stream(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only for stream: true")
        return self


class KeptBody(GenerationBody):
    """Of what can be kept for forks when it has ended."""

    keep_seconds: float | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _check_kept(self) -> KeptBody:
        if self.keep_seconds is not None and (self.use_beam_search or self.best_of is not None):
            raise ValueError("keep_seconds does not go with best_of or use_beam_search")
        return self


class PromptBody(KeptBody):
    """Of a new prompt."""

    model: str | None = Field(default=None, max_length=512)
    cache_salt: str | None = Field(default=None, min_length=1, max_length=256)
    prompt_logprobs: int | None = Field(default=None, ge=0, le=20)


def _kind_of_prompt(value: Any) -> str | None:
    """The only form that a prompt can have, by its first item."""
    if isinstance(value, str):
        return "text"
    if not isinstance(value, list):
        return None
    first = value[0] if value else None
    kinds: dict[type, str] = {str: "texts", list: "lists_of_token_ids"}
    return kinds.get(type(first), "token_ids")


class CompletionBody(PromptBody):
    """POST /v1/completions"""

    prompt: Annotated[
        Annotated[str, Tag("text")]
        | Annotated[TokenIds, Tag("token_ids")]
        | Annotated[
            list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True), Tag("texts")
        ]
        | Annotated[
            list[TokenIds],
            Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True),
            Tag("lists_of_token_ids"),
        ],
        Discriminator(
            _kind_of_prompt,
            custom_error_type="form",
            custom_error_message="Input should be a text, a list of token ids, or a list of either",
        ),
    ]
    max_tokens: int | None = Field(default=None, ge=0, le=_MAX_INT)
    echo: bool = False
    logprobs: int | None = Field(default=None, ge=0, le=20)
    add_special_tokens: bool = True


class TextPart(Body):
    type: Literal["text"]
    text: str


class ChatMessage(Body):
    role: str = Field(min_length=1, max_length=64)
    content: Annotated[
        Annotated[str, Tag("text")]
        | Annotated[
            list[TextPart], Field(min_length=1, max_length=1024, fail_fast=True), Tag("list")
        ],
        _form("a text", "parts of type text"),
    ]
    name: str | None = Field(default=None, max_length=256)

    def plain(self) -> dict[str, Any]:
        """As a chat template takes it; parts of text are lines."""
        content = self.content
        if not isinstance(content, str):
            content = "\n".join(part.text for part in content)
        named = {} if self.name is None else {"name": self.name}
        return {"role": self.role, "content": content, **named}


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=4096, fail_fast=True)]


class ChatLogprobs(Body):
    """How chat answers ask for log-probabilities."""

    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class ChatBody(PromptBody, ChatLogprobs):
    """POST /v1/chat/completions"""

    messages: Messages
    max_tokens: int | None = Field(default=None, ge=1, le=_MAX_INT)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=_MAX_INT)
    add_generation_prompt: bool = True

    @model_validator(mode="after")
    def _check_logprobs(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        return self


class TokenizeBody(Body):
    """POST /tokenize: a text, or a conversation."""

    model: str | None = Field(default=None, max_length=512)
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True

    @model_validator(mode="after")
    def _check_one(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeBody(Body):
    """POST /detokenize"""

    model: str | None = Field(default=None, max_length=512)
    tokens: Annotated[list[Id], Field(max_length=2**18, fail_fast=True)]


class ForkBody(KeptBody):
    """POST /v1/fork: id is that of a response, choice the index in it. One that has ended and was
    kept goes on with prompt or messages.
    """

    id: str = Field(min_length=1, max_length=128)
    choice: int = Field(default=0, ge=0, le=MAX_PROMPTS)
    prompt: str | None = None
    messages: Messages | None = None
    max_tokens: int | None = Field(default=None, ge=1, le=_MAX_INT)
