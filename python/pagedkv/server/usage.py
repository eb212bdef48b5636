"""usage: the tokens that one HTTP request was worth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pagedkv.records import RequestOutput


def usage(outputs: Sequence[RequestOutput], *, num_dropped: int = 0) -> dict[str, Any]:
    """Of all prompts and the answers that are returned. num_preemptions: how often their sequences
    gave up their blocks. num_dropped: generated tokens that are not told.
    """
    num_prompt = sum(one.prompt_len for one in outputs)
    num_generated = sum(len(one.token_ids) for output in outputs for one in output.outputs)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_generated - num_dropped,
        "total_tokens": num_prompt + num_generated - num_dropped,
        "prompt_tokens_details": {"cached_tokens": sum(one.num_cached_tokens for one in outputs)},
        "num_preemptions": sum(one.num_preemptions for one in outputs),
    }
