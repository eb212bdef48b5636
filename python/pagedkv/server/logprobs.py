"""Log-probabilities as the two APIs write them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from pagedkv.records import Logprob, TokenLogprobs
from pagedkv.text import Tokenizer, token_bytes

_LEAST = -9999.0  # JSON has no -inf


def _number(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LEAST


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """A token as text; one that is no whole character as "bytes:\\xe2\\x82"."""
    data = token_bytes(tokenizer, token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def likeliest(told: TokenLogprobs, num_top: int) -> list[tuple[int, Logprob]]:
    """The num_top most likely tokens of a place, best first."""
    ranked = sorted(told.items(), key=lambda item: item[1].rank)
    return [one for one in ranked if one[1].rank <= num_top][:num_top]


def chat_logprobs(
    tokenizer: Tokenizer, told: Sequence[TokenLogprobs], num_top: int
) -> dict[str, Any]:
    """choices[].logprobs of a chat completion: one entry for each generated token."""

    def entry(token_id: int, one: Logprob) -> dict[str, Any]:
        return {
            "token": token_text(tokenizer, token_id),
            "logprob": _number(one.logprob),
            "bytes": list(token_bytes(tokenizer, token_id)),
        }

    content = []
    for place in told:
        token_id, one = next(iter(place.items()))
        tops = [entry(*top) for top in likeliest(place, num_top)]
        content.append({**entry(token_id, one), "top_logprobs": tops})
    return {"content": content, "refusal": None}


def completion_logprobs(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    told: Sequence[TokenLogprobs | None],
    num_top: int,
    first_offset: int = 0,
) -> dict[str, Any]:
    """choices[].logprobs of a completion: arrays over tokens, those of an echoed prompt included.
    first_offset: characters before the first.
    """
    texts = [token_text(tokenizer, token_id) for token_id in token_ids]
    offsets, at = [], first_offset
    for text in texts:
        offsets.append(at)
        at += len(text)
    logprobs: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    for token_id, place in zip(token_ids, told, strict=True):
        if place is None:
            logprobs.append(None)
            tops.append(None)
            continue
        logprobs.append(_number(place[token_id].logprob))
        # The token itself too, where it is none of the most likely ones.
        shown = likeliest(place, num_top) if num_top else []
        shown += [(token_id, place[token_id])] if token_id not in dict(shown) else []
        tops.append({token_text(tokenizer, one): _number(had.logprob) for one, had in shown})
    return {
        "tokens": texts,
        "token_logprobs": logprobs,
        "top_logprobs": tops,
        "text_offset": offsets,
    }


def prompt_logprobs(
    tokenizer: Tokenizer, told: Sequence[TokenLogprobs | None] | None
) -> list[dict[str, Any] | None] | None:
    """vLLM's prompt_logprobs: of each token of the prompt, by token id; None of the first."""
    if told is None:
        return None
    return [
        None
        if place is None
        else {
            str(token_id): {
                "logprob": _number(one.logprob),
                "rank": one.rank,
                "decoded_token": token_text(tokenizer, token_id),
            }
            for token_id, one in place.items()
        }
        for place in told
    ]
