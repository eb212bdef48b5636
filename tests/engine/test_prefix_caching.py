"""Prefix caching as callers see it: salts, counters, reset."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_model import make_engine
from harness import GREEDY, run

from pagedkv.records import RequestOutput

PROMPT = "a system prompt that many requests of one tenant begin with"  # 59 tokens


def ask(folder: Path, *salts: str | None) -> tuple[list[RequestOutput], int, int]:
    """The same prompt once for each salt, one after the other; and queries and hits in all."""
    engine = make_engine(folder, block_size=8)
    outputs = []
    for i, salt in enumerate(salts):
        engine.add_request(str(i), PROMPT, GREEDY, cache_salt=salt)
        outputs.append(run(engine)[0][str(i)])
    statistics = engine.statistics()
    return outputs, statistics.prefix_cache_queries, statistics.prefix_cache_hits


def test_hits_are_counted_in_tokens_for_each_request_and_in_all(tokenizer_folder: Path) -> None:
    outputs, num_queries, num_hits = ask(tokenizer_folder, None, None)
    assert [one.num_cached_tokens for one in outputs] == [0, 56]
    assert (num_queries, num_hits) == (2 * len(PROMPT), 56)
    assert outputs[0].outputs == outputs[1].outputs


def test_salts_keep_tenants_apart_and_change_no_answer(tokenizer_folder: Path) -> None:
    outputs, _, num_hits = ask(tokenizer_folder, "a", "b", None, "a")
    assert [one.num_cached_tokens for one in outputs] == [0, 0, 0, 56]
    assert num_hits == 56
    assert all(one.outputs == outputs[0].outputs for one in outputs)


@pytest.mark.parametrize(
    ("salt", "error", "message"),
    [
        ("", ValueError, "cache_salt must have 1 to 256 bytes, got 0"),
        ("x" * 257, ValueError, "1 to 256 bytes, got 257"),
        ("\ud800", ValueError, "cache_salt is not valid text"),
        (7, TypeError, "cache_salt must be a string, got 7"),
    ],
)
def test_bad_salts_are_refused(
    tokenizer_folder: Path, salt: object, error: type[Exception], message: str
) -> None:
    engine = make_engine(tokenizer_folder)
    with pytest.raises(error, match=message):
        engine.add_request("a", PROMPT, GREEDY, cache_salt=salt)  # type: ignore[arg-type]
    assert not engine.has_work


def test_a_reset_forgets_every_prefix_and_disturbs_nobody(tokenizer_folder: Path) -> None:
    engine = make_engine(tokenizer_folder, block_size=8)
    engine.add_request("before", PROMPT, GREEDY)
    expected = run(engine)[0]["before"]
    engine.add_request("during", PROMPT, GREEDY)
    engine.step()
    assert engine.reset_prefix_cache() >= 7
    outputs, _ = run(engine)
    assert outputs["during"].num_cached_tokens == 56
    assert outputs["during"].outputs == expected.outputs
    engine.add_request("after", PROMPT, GREEDY)
    after = run(engine)[0]["after"]
    assert after.num_cached_tokens == 0
    assert after.outputs == expected.outputs
