"""Bad requests: each refused with what is wrong, before anything is queued."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_model import make_engine
from harness import GREEDY, answer, run

from pagedkv.sampling_params import SamplingParams

BAD_REQUESTS: dict[str, tuple[Any, Any, str]] = {
    "empty text": ("", GREEDY, "the prompt is empty"),
    "empty ids": ([], GREEDY, "the prompt is empty"),
    "empty array": (np.zeros(0, dtype=np.int32), GREEDY, "the prompt is empty"),
    "as long as the context": ("p" * 64, GREEDY, "has 64 tokens and max_tokens is 24, but max_mod"),
    "over the context": ("p" * 74, SamplingParams(max_tokens=None), "has 74 tokens .* is any, but"),
    "over the context, with a limit": (
        "p" * 74,
        GREEDY,
        "has 74 tokens and max_tokens is 24, but max_model_len is 64, .* to 63 tokens",
    ),
    "id one too high": ([1, 260], GREEDY, r"token id 260 at position 1 .* \(0 to 259\)"),
    "huge id": ([2**40], GREEDY, "token id 1099511627776 at position 0"),
    "negative id": ([5, -1], GREEDY, "token id -1 at position 1"),
    "floats": ([1.0, 2.0], GREEDY, r"flat list of integer token ids, got float 1\.0 at position 0"),
    "a float behind an id": ([1, 2.0], GREEDY, r"got float 2\.0 at position 1"),
    "a text behind an id": ([1, "a"], GREEDY, "got str 'a' at position 1"),
    "nothing behind an id": ([1, None], GREEDY, "got NoneType None at position 1"),
    "a list behind an id": ([1, [2]], GREEDY, r"got list \[2\] at position 1"),
    "a float of NumPy": ([1, np.float64(2)], GREEDY, r"got float64 .* at position 1"),
    "id over 63 bits": ([1, 2**63], GREEDY, "token id 9223372036854775808 at position 1"),
    "id over 64 bits": ([1, -(2**70)], GREEDY, "token id -1180591620717411303424 at position 1"),
    "id that cannot be written out": ([1, 10**5000], GREEDY, "token id of 16610 bits at posit"),
    "negative id of NumPy": ([1, np.int64(-5)], GREEDY, "token id -5 at position 1"),
    "id too high in an array": (np.array([1, 2**40]), GREEDY, "token id 1099511627776 at posit"),
    "truths": ([True, False], GREEDY, "got bool True at position 0"),
    "a truth behind an id": ([1, True], GREEDY, "got bool True at position 1"),
    "a truth in a tuple": ((1, False), GREEDY, "got bool False at position 1"),
    "a truth of NumPy": ([1, np.True_], GREEDY, r"got bool.* .*True_* at position 1"),
    "truths in an array": (np.array([True]), GREEDY, r"got ndarray of bool with shape \(1,\)"),
    "lists of several lengths": ([[1], [2, 3]], GREEDY, r"flat list .* list \[1\] at position 0"),
    "nested": ([[1, 2], [3, 4]], GREEDY, r"got list \[1, 2\] at position 0"),
    "nested in an array": (np.ones((2, 2), dtype=np.int32), GREEDY, r"flat list .* shape \(2, 2\)"),
    "an array in a list": ([1, np.ones(2, dtype=int)], GREEDY, r"got ndarray .* at position 1"),
    "a generator": ((i for i in range(3)), GREEDY, "flat list .* got generator"),
    "a set": ({1, 2}, GREEDY, "flat list .* got set"),
    "bytes": (b"ab", GREEDY, "flat list .* got bytes"),
    "no params": ("hi", None, "sampling_params must be a SamplingParams, got None"),
    "stop id": ("hi", SamplingParams(stop_token_ids=[260]), "stop_token_ids has 260, outside"),
    "never fits": ("p" * 30, SamplingParams(max_tokens=20), "need 13 blocks of 4 .* pool has 12"),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_a_bad_request_is_refused_and_nothing_is_queued(tokenizer_folder: Path, name: str) -> None:
    prompt, params, message = BAD_REQUESTS[name]
    engine = make_engine(
        tokenizer_folder, max_model_len=64, block_size=4, num_gpu_blocks_override=12
    )
    engine.add_request("good", "hello", GREEDY)
    with pytest.raises((ValueError, TypeError), match=message):
        engine.add_request("bad", prompt, params)
    assert engine.num_waiting == 1
    outputs, _ = run(engine)
    assert outputs.keys() == {"good"}
    assert outputs["good"].outputs == answer(tokenizer_folder, "hello", GREEDY).outputs


@pytest.mark.parametrize(
    "prompt",
    [
        (97, 98, 99),
        range(97, 100),
        deque([97, 98, 99]),
        [97, np.int64(98), np.uint8(99)],
        np.array([97, 98, 99], dtype=np.uint8),
    ],
    ids=lambda prompt: type(prompt).__name__,
)
def test_token_ids_come_in_any_sequence(tokenizer_folder: Path, prompt: Any) -> None:
    given = answer(tokenizer_folder, prompt, GREEDY)
    listed = answer(tokenizer_folder, [97, 98, 99], GREEDY)
    assert given.prompt_token_ids == listed.prompt_token_ids == [97, 98, 99]
    assert given.outputs == listed.outputs


def test_what_just_fits_the_pool_runs(tokenizer_folder: Path) -> None:
    # 30 + 19 - 1 tokens are written: exactly 12 blocks of 4.
    params = SamplingParams(temperature=0, max_tokens=19, ignore_eos=True)
    output = answer(
        tokenizer_folder, "p" * 30, params, block_size=4, num_gpu_blocks_override=12, watermark=0.5
    )
    assert len(output.outputs[0].token_ids) == 19


@pytest.mark.parametrize("over", [-2, -1, 0, 1])
@pytest.mark.parametrize("max_tokens", [0, 1, 3])
def test_a_prompt_around_the_context_gets_what_is_left_of_it_or_a_refusal(
    tokenizer_folder: Path, over: int, max_tokens: int
) -> None:
    engine = make_engine(tokenizer_folder, max_model_len=32)
    if max_tokens == 0:
        with pytest.raises(ValueError, match="max_tokens must be at least 1, got 0"):
            SamplingParams(temperature=0, max_tokens=max_tokens)
        return
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    if over >= 0:
        with pytest.raises(ValueError, match=f"the prompt has {32 + over} tokens .* is 32"):
            engine.add_request("a", "p" * (32 + over), params)
        return
    engine.add_request("a", "p" * (32 + over), params)
    one = run(engine)[0]["a"].outputs[0]
    assert (len(one.token_ids), one.finish_reason) == (min(max_tokens, -over), "length")


def test_a_name_in_use_is_refused_until_it_is_free(tokenizer_folder: Path) -> None:
    engine = make_engine(tokenizer_folder)
    engine.add_request("a", "hello", GREEDY)
    with pytest.raises(ValueError, match="request id 'a' is in use"):
        engine.add_request("a", "other", GREEDY)
    run(engine)
    engine.add_request("a", "other", GREEDY)
    run(engine)
