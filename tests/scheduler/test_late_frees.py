"""Blocks that launched steps hold back: what nobody holds any more, but cannot be taken yet, is
waited for. Nobody is preempted for room that is about to be there, and nobody in vain.
"""

from __future__ import annotations

import pytest
from simulation import Simulation, make_request, prompt_of

from pagedkv.records import ScheduledStep


def one_step(simulation: Simulation, *, launch: bool = False) -> ScheduledStep:
    """launch: another step is launched before this one ends, and is in flight afterwards."""
    step = simulation.schedule()
    assert step is not None
    if launch:
        simulation.launched.launch()
    simulation.update(step, simulation.run(step))
    return step


def names_in(simulation: Simulation, step: ScheduledStep) -> set[str]:
    entries = simulation.scheduler._entries
    return {name for name, one in entries.items() if one.seq_id in step.seq_ids.tolist()}


def test_running_requests_wait_for_blocks_that_drain_instead_of_preempting() -> None:
    simulation = Simulation(num_blocks=6, watermark=0.0, enable_prefix_caching=False)
    simulation.add(make_request("ends", prompt_of(11), 2))
    simulation.add(make_request("grows", prompt_of(11, 1), 12))
    one_step(simulation)
    one_step(simulation, launch=True)
    assert set(simulation.finished) == {"ends"}
    assert simulation.manager.num_allocatable_blocks == 0
    assert simulation.manager.num_returning_blocks == 3
    assert simulation.schedule() is None  # "grows" needs its fourth block
    assert simulation.scheduler.has_work
    simulation.launched.end_oldest()
    assert one_step(simulation).slots.size == 1
    simulation.run_all()
    assert simulation.num_preempted == 0
    simulation.check_outcome()


def test_those_first_in_rank_go_on_with_what_is_there() -> None:
    simulation = Simulation(
        num_blocks=10, max_num_batched_tokens=64, watermark=0.0, enable_prefix_caching=False
    )
    simulation.add(make_request("ends", prompt_of(11), 2))
    for name in ("first", "second"):
        simulation.add(make_request(name, prompt_of(11, ord(name[0])), 6))
    one_step(simulation)
    one_step(simulation, launch=True)
    # One block can be taken, and three drain; each of the two needs one.
    assert simulation.manager.num_allocatable_blocks == 1
    step = one_step(simulation, launch=False)
    assert names_in(simulation, step) == {"first"}
    simulation.run_all()
    assert simulation.num_preempted == 0
    assert list(simulation.finished) == ["ends", "first", "second"]
    simulation.check_outcome()


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_no_more_are_preempted_than_make_room_once_their_blocks_are_back(mode: str) -> None:
    simulation = Simulation(
        num_blocks=15,
        max_num_batched_tokens=64,
        watermark=0.0,
        enable_prefix_caching=False,
        num_cpu_blocks=30,
        preemption_mode=mode,
    )
    for i in range(5):
        simulation.add(make_request(str(i), prompt_of(11, i), 12))
    one_step(simulation)
    one_step(simulation, launch=True)
    assert simulation.manager.num_allocatable_blocks == 0
    assert simulation.schedule() is None  # all five need a block: two victims have enough for three
    assert simulation.scheduler.num_running == 3
    assert simulation.manager.num_returning_blocks == 6
    assert simulation.schedule() is None  # and nobody follows them
    assert simulation.scheduler.num_running == 3
    simulation.launched.end_oldest()
    step = one_step(simulation)
    assert names_in(simulation, step) >= {"0", "1", "2"}
    assert [one.request_id for one in step.preempted] == ["4", "3"]  # told with the next step
    simulation.run_all()
    simulation.check_outcome()


def test_an_urgent_request_displaces_no_more_than_it_needs_while_blocks_drain() -> None:
    simulation = Simulation(
        num_blocks=12, watermark=0.0, scheduling_policy="priority", enable_prefix_caching=False
    )
    for i in range(4):
        simulation.add(make_request(str(i), prompt_of(9, i), 3, priority=1))
    one_step(simulation, launch=True)
    simulation.add(make_request("urgent", prompt_of(10, 9), 2, priority=0))
    displaced = one_step(simulation).preempted
    assert [(one.request_id, one.displaced_by) for one in displaced] == [("3", "urgent")]
    assert "urgent" in names_in(simulation, one_step(simulation))
    simulation.run_all()
    assert simulation.num_preempted == 1
    simulation.check_outcome()


def test_with_every_free_a_step_late_and_a_full_pool_every_step_has_tokens() -> None:
    tokens = {}
    for is_late in (False, True):
        simulation = Simulation(num_blocks=20, max_num_seqs=8, watermark=0.0)
        for i in range(24):
            simulation.add(make_request(str(i), prompt_of(9 + i % 5, i), 12))
        num_waits = 0
        while simulation.scheduler.has_work:
            step = simulation.schedule()
            if step is None:
                num_waits += 1
                simulation.launched.end_oldest()
                continue
            if is_late:
                simulation.launched.launch()
            simulation.update(step, simulation.run(step))
        while len(simulation.launched):
            simulation.launched.end_oldest()
        simulation.check_outcome()
        tokens[is_late] = simulation.num_steps
        assert num_waits <= is_late * simulation.num_steps / 8
    assert tokens[True] <= 2 * tokens[False]


def test_what_swapped_requests_share_is_not_given_up_while_blocks_drain() -> None:
    # Nothing runs, but what will make room is on its way.
    simulation = Simulation(
        num_blocks=8,
        watermark=0.0,
        num_cpu_blocks=20,
        preemption_mode="swap",
        enable_prefix_caching=False,
        scheduling_policy="priority",
    )
    simulation.add(make_request("low", prompt_of(13), 16, priority=1))
    one_step(simulation)
    simulation.add(make_request("urgent", prompt_of(25, 1), 2, priority=0))
    one_step(simulation)
    one_step(simulation, launch=True)
    assert set(simulation.finished) == {"urgent"}
    assert simulation.scheduler.num_swapped == 1
    assert simulation.schedule() is None
    assert simulation.scheduler.num_swapped == 1
    simulation.launched.end_oldest()
    assert one_step(simulation).admitted[0].is_resumed
    simulation.run_all()
    simulation.check_outcome()
