"""Preemption in steps that are planned ahead: victims sit out a step, then give up their blocks
beside another, and no step waits for the tokens of the one before it.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from simulation import make_request, prompt_of
from test_pipelined_simulation import Pipelined

from pagedkv.records import ScheduledStep
from pagedkv.scheduler import RunView


def crowded(requests: str = "abc", **options: object) -> Pipelined:
    """Requests that start together and outgrow the pool."""
    made = Pipelined(
        **{  # type: ignore[arg-type]
            "num_blocks": 22,
            "max_num_seqs": 3,
            "watermark": 0.0,
            "num_cpu_blocks": 40,
            "preemption_mode": "swap",
            "max_num_batched_tokens": 64,
            **options,
        }
    )
    for name in requests:
        made.add(make_request(name, prompt_of(12, ord(name)), 30))
    return made


def names(one: Pipelined, step: ScheduledStep) -> list[str]:
    found = [one.scheduler.request_at(slot) for slot in step.slots.tolist()]
    return [request.request_id for request in found if request is not None]


def run_to_the_end(one: Pipelined) -> tuple[list[ScheduledStep], int]:
    """Its steps, and how many of them were not planned ahead."""
    steps: list[ScheduledStep] = []
    flight, num_waited = None, 0
    while one.scheduler.has_work:
        if flight is None:
            step = one.schedule()
            assert step is not None
            flight, num_waited = (step, one.run(step)), num_waited + 1
            steps.append(step)
        ahead = one.schedule_ahead()
        following = None if ahead is None else (ahead, one.run(ahead))
        if ahead is not None:
            steps.append(ahead)
        one.update(*flight)
        flight = following
    return steps, num_waited


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_room_is_made_without_waiting_for_tokens(mode: str) -> None:
    one = crowded(preemption_mode=mode)
    steps, num_waited = run_to_the_end(one)
    one.check_outcome()
    assert one.num_preempted_ahead == one.num_preempted > 0
    # The first step, and the one after the other two have ended, which runs the third alone.
    assert num_waited == 2
    assert sum(len(step.swap_out) for step in steps) == (0 if mode == "recompute" else 7)
    assert sum(len(step.swap_in) for step in steps) == (0 if mode == "recompute" else 7)


def test_a_victim_sits_out_one_step_and_goes_in_the_next() -> None:
    one = crowded()
    steps, _ = run_to_the_end(one)
    k = next(k for k, step in enumerate(steps) if step.preempted)
    gone = steps[k].preempted[0]
    assert gone.request_id == "c"  # the latest arrival
    assert gone.slot in steps[k - 2].slots
    assert gone.slot not in steps[k - 1].slots
    assert gone.num_blocks_needed > gone.num_blocks_available
    # Its blocks are there when the running step has ended: nobody writes to one of them beside it.
    assert len(steps[k].swap_out) == gone.choice.num_blocks > 0


def test_a_victim_is_told_why_it_sits_out_and_a_look_tells_it_until_it_has_gone() -> None:
    one = crowded()
    view = RunView(one.manager, one.scheduler)
    flight = one.schedule()
    assert flight is not None
    tokens = one.run(flight)
    while names(one, flight) != ["a", "b"]:
        assert view.take()[1].reasons == ()
        ahead = one.schedule_ahead()
        assert ahead is not None
        ahead_tokens = one.run(ahead)
        one.update(flight, tokens)
        flight, tokens = ahead, ahead_tokens
    (told,) = one.scheduler.log.explain("c")
    last = told.decisions[-1]
    assert (last.kind, last.numbers["lacks"], last.step) == ("waits", "growth", flight.step_id)
    assert last.numbers["needed"] > last.numbers["available"]  # type: ignore[operator]
    assert last.text.startswith("sits out: the next 3 steps need ")
    assert view.take()[1].reasons == ((2, last.text),)
    one.schedule_ahead()
    ((seq_id, why),) = view.take()[1].reasons  # it has gone to the queue
    assert seq_id == 2
    assert why.startswith("preempted since the next 3 steps need ")


def test_who_sat_out_goes_on_if_a_request_ends_meanwhile() -> None:
    one = crowded()
    flight = one.schedule()
    assert flight is not None
    one.run(flight)
    while True:
        ahead = one.schedule_ahead()
        assert ahead is not None
        one.run(ahead)
        one.update(flight, np.full(flight.sample_rows.size, 7))
        flight = ahead
        if names(one, flight) == ["a", "b"]:
            break
    assert one.num_preempted == 0
    assert one.scheduler.num_running == 3
    one.abort("b")
    ahead = one.schedule_ahead()
    assert ahead is not None
    assert names(one, ahead) == ["a", "c"]
    assert not ahead.preempted


def test_nobody_sits_out_for_blocks_that_an_end_gives_back() -> None:
    """The pool is full when a ends with 5 of its 15 blocks, and the others want one each then."""
    one = crowded("", num_blocks=15)
    for name, max_tokens in (("a", 8), ("b", 12), ("c", 12)):
        one.add(make_request(name, prompt_of(12, ord(name)), max_tokens))
    steps, _ = run_to_the_end(one)
    one.check_outcome()
    assert one.num_preempted == 0
    last = max(k for k, step in enumerate(steps) if 0 in step.slots)
    assert sorted(steps[last + 1].slots.tolist()) == [1, 2]


def test_pinned_blocks_go_before_anybody_has_to() -> None:
    one = crowded("", num_blocks=24)
    kept = make_request("kept", prompt_of(12, 1), 1)
    one.add(dataclasses.replace(kept, keeps_blocks=True))
    run_to_the_end(one)
    assert len(one.scheduler.pins) == 1
    for name in "ab":  # 11 blocks each at their ends
        one.add(make_request(name, prompt_of(12, ord(name)), 30))
    _, num_waited = run_to_the_end(one)
    one.check_outcome()
    assert len(one.scheduler.pins) == one.num_preempted == 0
    assert num_waited == 1


def test_a_step_that_fails_makes_those_that_it_moves_out_compute_again() -> None:
    one = crowded(num_blocks=22)
    flight = one.schedule()
    assert flight is not None
    one.run(flight)
    while not flight.preempted:
        ahead = one.schedule_ahead()
        assert ahead is not None
        one.run(ahead)
        one.update(flight, np.full(flight.sample_rows.size, 7))
        flight = ahead
    assert one.scheduler.num_swapped == 1
    one.abort("b")  # their blocks drain until it has landed
    one.abort("a")
    ahead = one.schedule_ahead()
    assert ahead is None or not ahead.admitted
    one.fail(flight)
    assert one.scheduler.num_swapped == 0
    assert one.scheduler.num_waiting == 1
    run_to_the_end(one)
    assert one.finished["c"].token_ids.size == 30
