"""Prompts that start on a prefix while the step that computes it still runs; and what becomes of
them if that step fails, has bad rows, or loses its request meanwhile.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from simulation import GARBAGE, make_request, prompt_of
from test_pipelined_simulation import Pipelined

from pagedkv.records import ScheduledStep


def with_first(name: str = "first", length: int = 21) -> tuple[Pipelined, ScheduledStep]:
    """A first request whose prompt a launched step computes."""
    one = Pipelined()
    one.add(make_request(name, prompt_of(length), 6))
    step = one.schedule()
    assert step is not None
    return one, step


def started(step: ScheduledStep | None) -> dict[str, int]:
    """Cached tokens of those that start in a step."""
    assert step is not None
    return {a.request.request_id: a.num_cached_tokens for a in step.admitted}


def with_second() -> tuple[Pipelined, ScheduledStep, np.ndarray, ScheduledStep, np.ndarray]:
    """A second request that starts on the first one's prefix, beside the step that computes it:
    that step and what it samples, the one behind it and what that samples.
    """
    one, step = with_first()
    tokens = one.run(step)
    one.add(make_request("second", prompt_of(21), 6))
    ahead = one.schedule_ahead()
    assert ahead is not None
    assert started(ahead) == {"second": 20}
    return one, step, tokens, ahead, one.run(ahead)


def run_all(one: Pipelined, flight: ScheduledStep, tokens: np.ndarray) -> None:
    """To the end, pipelined. tokens: of the step in flight."""
    following: ScheduledStep | None = flight
    while following is not None or one.scheduler.has_work:
        step = following or one.schedule()
        assert step is not None
        if following is None:
            tokens = one.run(step)
        following = one.schedule_ahead()
        next_tokens = None if following is None else one.run(following)
        one.update(step, tokens)
        if next_tokens is not None:
            tokens = next_tokens
    one.check_outcome()


def test_the_second_of_two_equal_cold_prompts_starts_beside_the_step_that_computes_the_first() -> (
    None
):
    one, step = with_first()
    one.add(make_request("second", prompt_of(21), 6))
    one.add(make_request("other", prompt_of(9, 5), 6))
    tokens = one.run(step)
    ahead = one.schedule_ahead()
    assert started(ahead) == {"second": 20, "other": 0}
    ahead_tokens = one.run(ahead)
    one.update(step, tokens)
    run_all(one, ahead, ahead_tokens)
    assert one.finished["second"].num_cached_tokens == 20
    assert one.manager.match(prompt_of(21)) == 20


def test_it_waits_while_the_next_step_computes_more_of_the_prefix() -> None:
    one = Pipelined(max_num_seqs=4, max_num_batched_tokens=8)
    for name in ("first", "second"):
        one.add(make_request(name, prompt_of(29), 4))
    step = one.schedule()
    assert step is not None
    flight, tokens, waited = step, one.run(step), 0
    while not started(ahead := one.schedule_ahead()):
        ahead_tokens = one.run(ahead)
        one.update(flight, tokens)
        flight, tokens = ahead, ahead_tokens
        waited += 1
    assert waited == 3  # chunks of 8 behind the first
    assert started(ahead) == {"second": 28}
    ahead_tokens = one.run(ahead)
    one.update(flight, tokens)
    run_all(one, ahead, ahead_tokens)


def test_if_the_step_fails_whoever_started_on_it_ends_and_nobody_finds_it() -> None:
    one, step = with_first()
    one.run(step, bad_rows=np.arange(step.slots.size))
    one.add(make_request("second", prompt_of(21), 6))
    one.add(make_request("other", prompt_of(9, 5), 6))
    ahead = one.schedule_ahead()
    assert started(ahead) == {"second": 20, "other": 0}
    tokens = one.run(ahead)
    # Who has come back from the CPU goes on with blocks of its own.
    (back,) = (a for a in ahead.admitted if a.num_cached_tokens)
    resumed = dataclasses.replace(ahead, admitted=(dataclasses.replace(back, is_resumed=True),))
    assert one.scheduler._landing._started_on_cached(resumed) == []
    one.fail(step)
    assert {name: ended.reason for name, ended in one.finished.items()} == {
        "first": "error",
        "second": "error",
    }
    assert one.manager.match(prompt_of(21)) == 0
    run_all(one, ahead, tokens)
    assert one.finished["other"].reason == "length"


def test_an_abort_beside_a_step_that_fails_leaves_nothing_to_find() -> None:
    one, step = with_first()
    one.run(step, bad_rows=np.arange(step.slots.size))
    for name in ("second", "third"):
        one.add(make_request(name, prompt_of(21), 6))
    ahead = one.schedule_ahead()
    assert started(ahead) == {"second": 20, "third": 20}
    tokens = one.run(ahead)
    one.abort("first")
    one.abort("second")
    one.add(make_request("second", prompt_of(21), 3))  # another one of the same name
    one.finished.pop("second")
    one.fail(step)
    assert one.finished["third"].reason == "error"
    assert "second" not in one.finished
    assert one.manager.match(prompt_of(21)) == 0
    run_all(one, ahead, tokens)
    assert one.finished["second"].reason == "length"
    assert one.finished["second"].num_cached_tokens == 0


def test_an_abort_beside_a_step_that_ends_well_costs_nobody_else_anything() -> None:
    one, step, tokens, ahead, ahead_tokens = with_second()
    one.abort("first")
    one.update(step, tokens)
    assert one.manager.match(prompt_of(21)) == 20
    run_all(one, ahead, ahead_tokens)


def test_a_bad_row_takes_back_what_was_found_of_it() -> None:
    """Who started on it goes on: if its K/V are no numbers, that one's logits are none either."""
    one, step, tokens, ahead, ahead_tokens = with_second()
    one.update(step, np.full_like(tokens, GARBAGE), np.ones(tokens.size, dtype=np.bool_))
    assert one.finished["first"].reason == "error"
    assert one.manager.match(prompt_of(21)) == 0
    run_all(one, ahead, ahead_tokens)
    assert one.finished["second"].reason == "length"


def test_a_failing_step_that_nobody_looked_into_forgets_nothing_else() -> None:
    one = Pipelined()
    one.add(make_request("before", prompt_of(13, 8), 2))
    one.run_all()
    one.add(make_request("first", prompt_of(21), 6))
    step = one.schedule()
    assert step is not None
    one.run(step, bad_rows=np.arange(step.slots.size))
    ahead = one.schedule_ahead()  # of the first alone: nobody waits
    assert ahead is not None
    one.run(ahead)
    one.fail(step)
    assert one.manager.match(prompt_of(21)) == 0
    assert one.manager.match(prompt_of(13, 8)) == 12
    one.update(ahead, np.zeros(ahead.sample_rows.size, dtype=np.int64))
    one.check_outcome()
