"""Ends: wherever a request is and however it ends, it gives up its blocks and names once, within
two steps, and late results for it are ignored.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from simulation import GARBAGE, Simulation, make_request, prompt_of

from pagedkv.records import ScheduledStep


def is_whole(simulation: Simulation) -> bool:
    """Every block can be taken, no name is in use, no slot is held."""
    scheduler, statistics = simulation.scheduler, simulation.manager.statistics()
    return (
        simulation.manager.num_allocatable_blocks == simulation.num_blocks
        and statistics.num_cpu_free == simulation.num_cpu_blocks
        and statistics.num_sequences == 0
        and not scheduler._entries
        and not scheduler._forking.groups
        and not scheduler._forking._group_names
        and len(scheduler._queue) == scheduler.num_running == 0
        and scheduler.slots.num_free == simulation.max_num_seqs
    )


def schedule(simulation: Simulation) -> ScheduledStep:
    step = simulation.schedule()
    assert step is not None
    return step


KINDS: dict[str, dict[str, Any]] = {"one answer": {}, "four answers": {"n": 4}, "beams": {}}
KINDS["beams"] = {"n": 2, "beam_width": 4}


@pytest.mark.parametrize("kind", [*KINDS, "forks"])
@pytest.mark.parametrize("preemption_mode", ["recompute", "swap"])
def test_an_abort_at_any_moment_returns_all_blocks_within_two_steps(
    kind: str, preemption_mode: str
) -> None:
    seen: set[str] = set()
    for num_steps in range(16):
        for is_in_flight in (False, True):
            simulation = Simulation(
                num_blocks=34,
                max_num_seqs=5,
                max_num_batched_tokens=9,
                watermark=0.0,
                num_cpu_blocks=40,
                preemption_mode=preemption_mode,
                scheduling_policy="priority",
            )
            simulation.add(
                make_request("gone", prompt_of(21), 12, priority=1, **KINDS.get(kind, {}))
            )
            for i in range(num_steps):
                simulation.step()
                if i == 4 and kind == "forks":
                    simulation.fork("gone", 3)
                if i == 8:  # displaces some or all of it
                    simulation.add(make_request("urgent", prompt_of(110, 1), 2))
            others = ["urgent"] if "urgent" in simulation.scheduler else []
            names = [name for name in simulation.requests if name in simulation.scheduler]
            names = [name for name in names if name not in others]
            step = simulation.schedule() if is_in_flight else None
            if step is not None:
                token_ids = simulation.run(step)
                simulation.launched.launch()  # the step after it
            seen.add("swapped" if simulation.scheduler.num_swapped else "")
            seen.add("waiting" if simulation.scheduler.num_waiting else "running")
            for name in [*(["gone"] if kind in ("four answers", "beams") else names), *others]:
                if name in simulation.scheduler:
                    simulation.abort(name)
            assert not simulation.scheduler.has_work
            if step is not None:
                simulation.update(step, token_ids)
                simulation.launched.end_oldest()
            assert is_whole(simulation)
            assert {one.reason for one in simulation.finished.values()} <= {"abort", "length"}
            simulation.check_outcome()
    assert seen >= {"waiting", "running"}
    assert ("swapped" in seen) == (preemption_mode == "swap")


def test_late_results_of_five_thousand_aborted_requests_are_ignored() -> None:
    rng = random.Random(0)
    simulation = Simulation(num_blocks=24, max_num_seqs=4, max_num_batched_tokens=10)
    simulation.check = simulation.launched.look  # type: ignore[method-assign]  # fully below
    num_in_flight = 0
    for i in range(5000):
        length, max_tokens = rng.randint(1, 12), rng.randint(1, 3)
        simulation.add(make_request(str(i), prompt_of(length, i % 3), max_tokens))
        if rng.random() < 0.3:
            simulation.abort(rng.choice([*simulation.scheduler._entries]))
        step = simulation.schedule()
        if step is None:
            continue
        token_ids = simulation.run(step)
        while rng.random() < 0.5 and simulation.scheduler.has_work:
            simulation.abort(rng.choice([*simulation.scheduler._entries]))
            num_in_flight += 1
        simulation.update(step, token_ids)
        if i % 50 == 0:
            Simulation.check(simulation)
    simulation.run_all()
    Simulation.check(simulation)
    assert num_in_flight > 2000
    assert is_whole(simulation)
    whole = [one for one in simulation.finished.values() if one.reason == "length"]
    assert len(whole) > 500
    assert all(one.token_ids.size == one.request.max_tokens for one in whole)
    simulation.check_outcome()


@pytest.mark.parametrize("end", ["length", "stop", "abort", "failed row", "failed step"])
def test_a_request_that_ends_on_the_step_that_took_it_a_block_gives_it_back_once(end: str) -> None:
    simulation = Simulation(num_blocks=8)
    request = make_request("a", prompt_of(4), 2 if end == "length" else 20)
    if end == "stop":
        simulation.add(make_request("probe", prompt_of(4), 2))
        simulation.run_all()
        second = int(simulation.finished.pop("probe").token_ids[1])
        del simulation.requests["probe"]
        request = make_request("a", prompt_of(4), 20, stops=(second,))
    simulation.add(request)
    simulation.step()
    assert simulation.manager.statistics().num_referenced == 1
    step = schedule(simulation)
    assert simulation.manager.statistics().num_referenced == 2  # for the token at position 4
    failed = np.array([end == "failed row"])
    token_ids = simulation.run(step, bad_rows=np.flatnonzero(failed))
    if end == "abort":
        simulation.abort("a")
    if end == "failed step":
        simulation.fail(step)
    else:
        token_ids[failed] = GARBAGE
        simulation.update(step, token_ids, failed)
    reasons = {"failed row": "error", "failed step": "error"}
    assert simulation.finished["a"].reason == reasons.get(end, end)
    assert is_whole(simulation)
    with pytest.raises(KeyError):
        simulation.scheduler.finish("a", "stop")
    with pytest.raises(RuntimeError, match="is not the one in flight"):
        simulation.scheduler.update(step, token_ids)
    assert is_whole(simulation)
    simulation.check()
    simulation.check_outcome()


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_eight_answers_of_one_prompt_and_two_cpu_blocks_are_all_right(mode: str) -> None:
    simulation = Simulation(
        num_blocks=14, max_num_seqs=8, watermark=0.0, num_cpu_blocks=2, preemption_mode=mode
    )
    simulation.add(make_request("a", prompt_of(9), 24, n=8))
    simulation.run_all()
    assert simulation.num_preempted > 0
    assert {one.reason for one in simulation.finished.values()} == {"length"}
    assert len(simulation.finished) == 8
    simulation.check_outcome()
    assert is_whole(simulation)
