"""From the fields of a request to SamplingParams."""

from __future__ import annotations

from typing import Any

from pagedkv.sampling_params import SamplingParams
from pagedkv.server.errors import Refusal, refused
from pagedkv.server.limits import Limits
from pagedkv.server.protocol import GenerationBody

# Fields that mean the same under the same name, where they are given.
_SAME = (
    "temperature", "top_p", "top_k", "min_p", "seed", "stop", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "stop_token_ids", "allowed_token_ids", "bad_words",
)  # fmt: skip


def sampling_params(
    body: GenerationBody,
    *,
    max_tokens: int | None,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """How the answers to one prompt are chosen. max_tokens None: as many as fit.

    Raises Refusal: a value out of its range, or values that do not go together.
    """
    given = given_options(body)
    answers = _answers(body, given)
    try:
        return SamplingParams(
            max_tokens=max_tokens,
            ignore_eos=body.ignore_eos,
            min_tokens=body.min_tokens,
            include_stop_str_in_output=body.include_stop_str_in_output,
            skip_special_tokens=body.skip_special_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            **given,
            **answers,
        )
    except (ValueError, TypeError) as error:
        raise refused(error, *type(body).model_fields) from None


def given_options(body: GenerationBody) -> dict[str, Any]:
    """Options of SamplingParams that the body gives, under their names there."""
    given: dict[str, Any] = {
        name: value for name in _SAME if (value := getattr(body, name)) is not None
    }
    if body.logit_bias is not None:
        given["logit_bias"] = _bias(body.logit_bias)
    return given


def _answers(body: GenerationBody, given: dict[str, Any]) -> dict[str, Any]:
    """How many sequences, and whether they are beams."""
    n = body.n or 1
    if not body.use_beam_search:
        if body.length_penalty is not None:
            raise Refusal(400, "length_penalty needs use_beam_search", param="length_penalty")
        return {"n": n, "best_of": body.best_of}
    width = n if body.best_of is None else body.best_of
    if width < 2:
        raise Refusal(
            400,
            f"use_beam_search searches with best_of beams, or n: at least 2, got {width}",
            param="use_beam_search",
        )
    given.setdefault("temperature", 0.0)  # OpenAI's default, 1, would be refused
    beams: dict[str, Any] = {"n": n, "beam_width": width}
    if body.length_penalty is not None:
        beams["length_penalty"] = body.length_penalty
    return beams


def _bias(given: dict[str, float]) -> dict[int, float]:
    bias = {}
    for key, value in given.items():
        if not (key.isascii() and key.isdigit()):
            raise Refusal(400, f"logit_bias: {key!r} is not a token id", param="logit_bias")
        bias[int(key)] = value
    if len(bias) < len(given):
        raise Refusal(400, "logit_bias names a token id twice", param="logit_bias")
    return bias


def check_size(
    params: SamplingParams, prompt_lens: list[int], limits: Limits, max_model_len: int
) -> None:
    """Raise Refusal if the prompts ask for more sequences, tokens or log-probabilities than one
    request may.
    """
    num_answers = len(prompt_lens) * params.num_forks
    if num_answers > limits.max_answers:
        raise Refusal(
            400,
            f"{len(prompt_lens)} prompts with {params.num_forks} sequences each are {num_answers}; "
            f"one request may have {limits.max_answers}",
            param="n",
        )
    for name in ("logprobs", "prompt_logprobs"):
        wanted = getattr(params, name)
        if wanted is not None and wanted > limits.max_logprobs:
            raise Refusal(
                400, f"{name} is {wanted}; at most {limits.max_logprobs} are told", param=name
            )
    most = limits.max_request_tokens or 64 * max_model_len
    num_tokens = 0
    for prompt_len in prompt_lens:
        room = max(max_model_len - prompt_len, 0)
        num_tokens += params.num_forks * min(room, params.max_tokens or room)
    if num_tokens > most:
        raise Refusal(
            400,
            f"max_tokens: the request may generate {num_tokens} tokens in all its answers; "
            f"{most} are allowed: lower max_tokens or n",
            param="max_tokens",
        )
