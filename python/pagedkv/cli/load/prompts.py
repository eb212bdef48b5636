"""What is asked: prompts of random tokens, or those of a file, for completions or chats."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Of random chats, which have no token ids: one token each, or nearly, for most tokenizers.
_WORDS = (
    "time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world",
    "school", "state", "family", "student", "group", "country", "problem", "hand", "part", "place",
    "case", "week", "company", "system", "program", "question", "work", "night", "point", "home",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class LoadPrompt:
    """content: text, token ids, or messages of a chat. output_len: most tokens of the answer."""

    content: str | list[int] | list[dict[str, Any]]
    output_len: int

    @property
    def is_chat(self) -> bool:
        return isinstance(self.content, list) and isinstance(self.content[0], dict)


def random_prompts(
    num_prompts: int,
    *,
    input_len: int,
    output_len: int,
    range_ratio: float = 0.0,
    prefix_len: int = 0,
    vocab_size: int = 10_000,
    is_chat: bool = False,
    seed: int = 0,
) -> list[LoadPrompt]:
    """The same each time for a seed.

    Args:
        input_len: tokens of a prompt behind prefix_len tokens that all have in common. Of a chat:
            words of its message, which are about as many tokens.
        range_ratio: lengths are uniform within (1 - range_ratio) and (1 + range_ratio) times
            input_len and output_len, at least 1.
        vocab_size: token ids are below it.

    Raises:
        ValueError: range_ratio outside [0, 1).
    """
    if not 0 <= range_ratio < 1:
        raise ValueError(f"range_ratio must be at least 0 and below 1, got {range_ratio}")
    source = random.Random(seed)

    def content(length: int) -> list[Any]:
        if is_chat:
            return [source.choice(_WORDS) for _ in range(length)]
        return [source.randrange(vocab_size) for _ in range(length)]

    def length(middle: int) -> int:
        low, high = int(middle * (1 - range_ratio)), int(middle * (1 + range_ratio))
        return max(source.randint(low, high), 1)

    prefix, prompts = content(prefix_len), []
    for _ in range(num_prompts):
        whole = prefix + content(length(input_len))
        asked = [{"role": "user", "content": " ".join(whole)}] if is_chat else whole
        prompts.append(LoadPrompt(asked, length(output_len)))
    return prompts


def read_prompts(
    path: Path, num_prompts: int, *, output_len: int, is_chat: bool
) -> list[LoadPrompt]:
    """Prompts of a file of JSON objects, one a line, in its order, again from its start where it
    has fewer. A line has "prompt" (text or token ids) or "messages", and may have "output_tokens".
    A prompt of text is a chat's one message.

    Raises:
        ValueError: a line is none of these, or not for chats or completions, or there is none.
    """
    found = list(_lines(path, output_len, is_chat))
    if not found:
        raise ValueError(f"{path} has no prompts")
    return list(itertools.islice(itertools.cycle(found), num_prompts))


def _lines(path: Path, output_len: int, is_chat: bool) -> Iterator[LoadPrompt]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    yield _prompt(json.loads(line), output_len, is_chat)
                except (ValueError, RecursionError) as error:
                    raise ValueError(f"{path}, line {number}: {error}") from None


def _prompt(given: Any, output_len: int, is_chat: bool) -> LoadPrompt:
    if not isinstance(given, dict) or ("prompt" in given) == ("messages" in given):
        raise ValueError('expected an object with either "prompt" or "messages"')
    wanted = given.get("output_tokens", output_len)
    if type(wanted) is not int or wanted < 1:
        raise ValueError(f"output_tokens must be a number of at least 1, got {wanted!r}")
    content: Any = given.get("prompt", given.get("messages"))
    is_text = isinstance(content, str) and bool(content)
    if "prompt" in given and is_chat and is_text:
        return LoadPrompt([{"role": "user", "content": content}], wanted)
    kind = dict if "messages" in given else int
    is_list = isinstance(content, list) and content and all(type(one) is kind for one in content)
    if not is_list and not (is_text and "prompt" in given):
        raise ValueError("prompt is text or token ids, messages are objects, and not empty")
    if is_chat != (kind is dict):
        raise ValueError(
            "token ids are for --backend openai" if is_chat else "messages need openai-chat"
        )
    return LoadPrompt(content, wanted)
