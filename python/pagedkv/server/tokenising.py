"""Text to token ids and back on threads of their own: a long prompt holds up nobody else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from pagedkv.server.errors import Refusal
from pagedkv.text import Tokenizer

_T = TypeVar("_T")


class Tokenising:
    """A model's tokenizer, off the event loop."""

    def __init__(self, tokenizer: Tokenizer, max_model_len: int) -> None:
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        tokenizer.prepare()
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="pagedkv-text")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def run(self, function: Callable[..., _T], *args: Any) -> _T:
        """Anything else about a request that would hold the loop up.

        Raises Refusal (400) for a ValueError of the function.
        """
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, function, *args)
        except ValueError as error:
            raise Refusal(400, str(error)) from None

    async def encode(self, text: str, *, add_special_tokens: bool, param: str) -> list[int]:
        """Raises Refusal: the text is no Unicode, or surely longer than the model's context."""
        self._check_length([text], param)
        return await self.run(self.tokenizer.encode, text, add_special_tokens)

    async def encode_chat(
        self, messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool
    ) -> list[int]:
        """Raises Refusal: the chat template refuses the messages, or there is none, or they are
        surely longer than the model's context.
        """
        self._check_length([one["content"] for one in messages], "messages")
        return await self.run(self.tokenizer.encode_chat, messages, add_generation_prompt)

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return await self.run(self.tokenizer.decode, token_ids, skip_special_tokens)

    def _check_length(self, texts: Sequence[str], param: str) -> None:
        """Refuse early what the engine would refuse after a long time of tokenizing."""
        num_tokens = sum(map(self.tokenizer.fewest_tokens, texts))
        if num_tokens >= self.max_model_len:
            raise Refusal(
                400,
                f"{param} has at least {num_tokens} tokens; max_model_len is {self.max_model_len}, "
                "prompt and answer together",
                param=param,
            )
