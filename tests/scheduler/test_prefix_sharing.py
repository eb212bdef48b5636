"""Prefix caching as the scheduler uses it: salts, equal cold prompts, preemption, failing steps."""

from __future__ import annotations

import numpy as np
import pytest
from simulation import Simulation, make_request, prompt_of


def run_one(simulation: Simulation, name: str, length: int = 21, **kwargs: str) -> int:
    """Run one request to its end; its cached tokens."""
    simulation.add(make_request(name, prompt_of(length), 4, **kwargs))  # type: ignore[arg-type]
    simulation.run_all()
    return simulation.finished[name].num_cached_tokens


def test_requests_with_different_salts_share_nothing() -> None:
    simulation = Simulation()
    assert run_one(simulation, "plain") == 0
    assert run_one(simulation, "salted", salt="tenant a") == 0
    assert run_one(simulation, "other", salt="tenant b") == 0
    assert run_one(simulation, "salted again", salt="tenant a") == 20
    assert run_one(simulation, "plain again") == 20
    simulation.check_outcome()


def test_the_second_of_two_equal_cold_prompts_waits_one_step_and_shares() -> None:
    simulation = Simulation()
    for name in ("first", "second"):
        simulation.add(make_request(name, prompt_of(21), 4))
    step = simulation.schedule()
    assert step is not None
    assert [one.request.request_id for one in step.admitted] == ["first"]
    assert step.num_tokens == 21
    simulation.update(step, simulation.run(step))
    step = simulation.schedule()
    assert step is not None
    assert [one.num_cached_tokens for one in step.admitted] == [20]
    assert step.num_tokens == 1 + 1
    simulation.update(step, simulation.run(step))
    simulation.run_all()
    assert simulation.manager.statistics().prefix_cache_hits == 20
    simulation.check_outcome()


def test_the_second_waits_through_every_chunk_of_the_first() -> None:
    simulation = Simulation(max_num_seqs=4, max_num_batched_tokens=8)
    for name in ("first", "second"):
        simulation.add(make_request(name, prompt_of(29), 4))
    simulation.run_all()
    assert simulation.finished["second"].num_cached_tokens == 28
    simulation.check_outcome()


@pytest.mark.parametrize("difference", ["salt", "short prefix", "no cache"])
def test_prompts_that_gain_little_from_waiting_do_not_wait(difference: str) -> None:
    simulation = Simulation(enable_prefix_caching=difference != "no cache")
    prompt = prompt_of(16)
    other = prompt[:7] + prompt_of(9, 5) if difference == "short prefix" else prompt
    salt = "salt" if difference == "salt" else None
    simulation.add(make_request("first", prompt, 4))
    simulation.add(make_request("second", other, 4, salt=salt))
    step = simulation.schedule()
    assert step is not None
    assert len(step.admitted) == 2
    simulation.update(step, simulation.run(step))
    simulation.run_all()
    simulation.check_outcome()


def test_a_request_that_waits_for_its_twin_goes_on_when_the_twins_step_fails() -> None:
    simulation = Simulation()
    for name in ("first", "second"):
        simulation.add(make_request(name, prompt_of(21), 4))
    step = simulation.schedule()
    assert step is not None
    simulation.run(step, bad_rows=np.arange(step.slots.size))
    simulation.fail(step)
    simulation.run_all()
    assert simulation.finished["first"].reason == "error"
    assert simulation.finished["second"].reason == "length"
    assert simulation.finished["second"].num_cached_tokens == 0  # a failing step published nothing
    simulation.check_outcome()


def test_a_failing_step_publishes_nothing_of_its_later_chunks() -> None:
    simulation = Simulation(max_num_seqs=1, max_num_batched_tokens=8)
    simulation.add(make_request("chunked", prompt_of(24), 4))
    simulation.step()
    step = simulation.schedule()
    assert step is not None
    simulation.run(step, bad_rows=np.arange(step.slots.size))
    simulation.fail(step)
    assert run_one(simulation, "again", 24) == 8
    simulation.check_outcome()


def test_a_cached_chain_survives_preemption_of_its_owner() -> None:
    simulation = Simulation(num_blocks=12, watermark=0.0)
    simulation.add(make_request("early", prompt_of(12, 1), 20))
    simulation.add(make_request("owner", prompt_of(17, 2), 20))
    while not simulation.num_preempted:
        assert simulation.step()
    assert simulation.scheduler.num_waiting == 1
    known = prompt_of(17, 2)
    assert simulation.manager.match(known) == 16
    simulation.run_all()
    assert simulation.finished["owner"].num_preemptions >= 1
    assert simulation.manager.statistics().prefix_cache_hits > 0
    simulation.check_outcome()
