"""Policies and fairness: who goes first, who gives way, and that everybody's wait is bounded."""

from __future__ import annotations

import pytest
from simulation import Simulation, make_request, prompt_of

from pagedkv.records import ScheduledStep
from pagedkv.scheduler.queue import rank_of


def priorities(**options: object) -> Simulation:
    return Simulation(scheduling_policy="priority", watermark=0.0, **options)  # type: ignore[arg-type]


def one_step(simulation: Simulation) -> ScheduledStep:
    step = simulation.schedule()
    assert step is not None
    simulation.update(step, simulation.run(step))
    return step


def admitted(step: ScheduledStep) -> list[str]:
    return [one.request.request_id for one in step.admitted]


def test_the_most_urgent_starts_first_and_equals_in_order_of_arrival() -> None:
    simulation = priorities(max_num_seqs=1)
    for name, priority in (("a", 1), ("b", 0), ("c", -3), ("d", 0)):
        simulation.add(make_request(name, prompt_of(4), 3, priority=priority))
    simulation.run_all()
    assert list(simulation.finished) == ["c", "b", "d", "a"]
    simulation.check_outcome()


def test_a_priority_under_fcfs_is_refused_not_ignored() -> None:
    simulation = Simulation()
    with pytest.raises(ValueError, match="priority is 2, but scheduling_policy is 'fcfs'"):
        simulation.add(make_request("a", prompt_of(4), 3, priority=2))


@pytest.mark.parametrize("priority", [2**31 + 1, -(2**31) - 1, True, 0.5])
def test_a_priority_out_of_range_is_refused(priority: int) -> None:
    with pytest.raises((ValueError, TypeError), match="priority must be"):
        make_request("a", prompt_of(4), 3, priority=priority)


def test_an_urgent_request_displaces_a_running_one_which_leaves_the_step() -> None:
    simulation = priorities(num_blocks=12, max_num_seqs=4)
    for i in range(3):
        simulation.add(make_request(f"low{i}", prompt_of(12, i), 4, priority=i + 1))
    one_step(simulation)
    simulation.add(make_request("urgent", prompt_of(14, 9), 2, priority=0))
    step = one_step(simulation)  # checks that no victim is among its rows
    assert [(one.request_id, one.displaced_by) for one in step.preempted] == [("low2", "urgent")]
    assert admitted(step) == ["urgent"]
    simulation.run_all()
    assert simulation.finished["low2"].num_preemptions == 1
    simulation.check_outcome()


def test_growth_takes_blocks_from_the_lowest_priority_then_from_the_latest_arrival() -> None:
    simulation = priorities(num_blocks=15, max_num_seqs=5, max_num_batched_tokens=60)
    for name, priority in (("a2", 2), ("b0", 0), ("c1", 1), ("d2", 2), ("e1", 1)):
        simulation.add(make_request(name, prompt_of(11, ord(name[0])), 14, priority=priority))
    victims: list[str] = []
    while simulation.scheduler.has_work:
        victims += [one.request_id for one in one_step(simulation).preempted]
    # d2 came after a2, both give way before e1, e1 before c1; b0 never does.
    assert victims[:3] == ["d2", "a2", "e1"]
    assert "b0" not in victims
    simulation.check_outcome()


def test_an_urgent_request_takes_the_slot_of_a_less_urgent_one() -> None:
    simulation = priorities(max_num_seqs=2)
    for i in range(2):
        simulation.add(make_request(f"low{i}", prompt_of(4, i), 8, priority=1))
    one_step(simulation)
    simulation.add(make_request("urgent", prompt_of(4, 9), 2))
    step = one_step(simulation)
    assert [one.request_id for one in step.preempted] == ["low1"]
    assert admitted(step) == ["urgent"]
    simulation.run_all()
    simulation.check_outcome()


def test_nobody_is_displaced_when_that_would_not_make_enough_room() -> None:
    simulation = priorities(num_blocks=12, max_num_seqs=4)
    simulation.add(make_request("equal", prompt_of(30), 6, priority=0))
    one_step(simulation)
    simulation.add(make_request("low", prompt_of(8, 1), 2, priority=1))
    one_step(simulation)
    simulation.add(make_request("urgent", prompt_of(30, 2), 2, priority=-1))
    simulation.add(make_request("late", prompt_of(30, 3), 2, priority=0))
    step = one_step(simulation)
    assert [one.request_id for one in step.preempted] == ["low", "equal"]  # both are needed
    simulation.run_all()
    simulation.check_outcome()

    simulation = priorities(num_blocks=12, max_num_seqs=4)
    simulation.add(make_request("equal", prompt_of(30), 6, priority=0))
    simulation.add(make_request("low", prompt_of(8, 1), 12, priority=1))
    one_step(simulation)
    simulation.add(make_request("same", prompt_of(30, 2), 2, priority=0))
    assert one_step(simulation).preempted == ()  # low's blocks would not be enough
    simulation.run_all()
    simulation.check_outcome()


def test_equal_priority_never_displaces() -> None:
    simulation = priorities(num_blocks=8, max_num_seqs=4)
    simulation.add(make_request("first", prompt_of(20), 4, priority=3))
    one_step(simulation)
    simulation.add(make_request("second", prompt_of(20, 1), 4, priority=3))
    assert one_step(simulation).preempted == ()
    simulation.run_all()
    simulation.check_outcome()


@pytest.mark.parametrize("ageing", [4, 16])
def test_a_stream_of_urgent_requests_passes_a_patient_one_for_a_stated_time_only(
    ageing: int,
) -> None:
    simulation = priorities(max_num_seqs=1, priority_ageing_steps=ageing)
    simulation.add(make_request("patient", prompt_of(4), 3, priority=2))
    number = 0
    while "patient" not in simulation.finished:
        simulation.add(make_request(f"u{number}", prompt_of(4, number), 2, priority=0))
        number += 1
        one_step(simulation)
        assert number < 200
    passed = [name for name in simulation.finished if name != "patient"]
    # Only those that arrived within 2 * ageing steps passed it; each takes two steps.
    assert all(int(name[1:]) <= 2 * ageing for name in passed)
    assert len(passed) >= ageing
    simulation.run_all()
    simulation.check_outcome()


def test_a_rank_is_the_arrival_moved_by_the_priority() -> None:
    assert rank_of("fcfs", 0, 77, 10) == rank_of("fcfs", 0, 5, 10)
    assert rank_of("priority", 2, 77, 10) == 97
    assert rank_of("priority", -1, 77, 10) == 67


@pytest.mark.parametrize("max_num_overtakes", [0, 1, 5])
def test_small_requests_pass_a_large_one_that_waits_for_blocks_a_stated_number_of_times(
    max_num_overtakes: int,
) -> None:
    simulation = Simulation(
        num_blocks=20, max_num_seqs=8, watermark=0.0, max_num_overtakes=max_num_overtakes
    )
    simulation.add(make_request("holds", prompt_of(40), 20))
    one_step(simulation)
    simulation.add(make_request("large", prompt_of(60, 1), 4))
    passed, number = 0, 0
    while "large" not in simulation.finished:
        if simulation.scheduler.num_waiting < 3:
            simulation.add(make_request(f"small{number}", prompt_of(3, number), 2))
            number += 1
        names = admitted(one_step(simulation))
        if "large" in names:
            passed += names.index("large")
            break
        passed += len(names)
    assert passed == max_num_overtakes
    simulation.run_all()
    simulation.check_outcome()


def test_a_preempted_prefill_resumes_under_a_steady_stream_of_short_decodes() -> None:
    simulation = Simulation(num_blocks=24, max_num_seqs=6, max_num_batched_tokens=12, watermark=0.0)
    for i in range(2):
        simulation.add(make_request(f"old{i}", prompt_of(4, i), 40))
    simulation.add(make_request("long", prompt_of(60, 7), 4))
    number, steps, preempted = 0, 0, 0
    while "long" not in simulation.finished:
        if simulation.scheduler.num_waiting < 2:
            simulation.add(make_request(f"s{number}", prompt_of(2, number + 9), 6))
            number += 1
        preempted += sum(one.request_id == "long" for one in one_step(simulation).preempted)
        steps += 1
        assert steps < 200, "the long prefill never resumes"
    assert preempted <= simulation.reserve_after_preemptions
    simulation.run_all()
    simulation.check_outcome()


@pytest.mark.parametrize("limit", [1, 2, 4])
def test_after_a_stated_number_of_preemptions_a_request_keeps_its_blocks_to_the_end(
    limit: int,
) -> None:
    simulation = Simulation(
        num_blocks=16,
        max_num_seqs=4,
        watermark=0.0,
        enable_prefix_caching=False,
        reserve_after_preemptions=limit,
    )
    number = 0
    for i in range(4):
        simulation.add(make_request(f"a{i}", prompt_of(6, i), 40))
    reserved_ran = False
    while simulation.scheduler.has_work:
        if number < 12 and simulation.scheduler.num_waiting == 0:
            simulation.add(make_request(f"b{number}", prompt_of(6, number), 40))
            number += 1
        one_step(simulation)
        reserved_ran |= bool(simulation.scheduler.slots.worst_blocks.any())
    counts = [one.num_preemptions for one in simulation.finished.values()]
    assert max(counts) == limit
    assert reserved_ran
    simulation.check_outcome()


def test_the_lowest_rank_advances_beside_a_beam_that_waits_with_reserved_blocks() -> None:
    simulation = Simulation(
        num_blocks=7,
        watermark=0.0,
        scheduling_policy="priority",
        preemption_mode="recompute",
        reserve_after_preemptions=1,
    )
    simulation.add(make_request("first", prompt_of(13), 11))  # 4 blocks at first, 6 at last
    simulation.add(make_request("search", prompt_of(4, seed=1), 4, beam_width=2))
    for _ in range(2):
        simulation.step()
    # Displaces both beams. There is room for one of them then, with the blocks it can ever need.
    simulation.add(make_request("urgent", prompt_of(9, seed=2), 1, priority=-1))
    while "urgent" not in simulation.finished:
        simulation.step()
    while simulation.step() and "first" not in simulation.finished:
        queued = [entry.request.request_id for entry in simulation.scheduler._queue]
        assert "search-1" in queued  # which the other waits for
    simulation.run_all()
    simulation.check_outcome()
    assert simulation.finished["first"].num_preemptions == 0
    assert simulation.num_preempted >= 3


def a_search_beside_a_reserved_request(**late: int) -> Simulation:
    """`first`, a search, has one of two slots and needs both; `late` was preempted, has the other,
    and computes its prompt once more with its blocks reserved.
    """
    simulation = priorities(
        max_num_seqs=2,
        max_num_batched_tokens=4,
        reserve_after_preemptions=1,
        enable_prefix_caching=False,
    )
    simulation.add(make_request("late", prompt_of(40), 4, priority=1, **late))
    while simulation.scheduler.slots.num_tokens.max() < 41:
        one_step(simulation)
    for i in range(2):  # they take both slots, one after the other, and end together
        simulation.add(make_request(f"urgent{i}", prompt_of(2, i), 3 - i, priority=-3))
    simulation.add(make_request("first", prompt_of(2, seed=9), 4, beam_width=2, priority=-2))
    while "first-1" not in simulation.scheduler:
        one_step(simulation)
    one_step(simulation)  # the newest token of the beam that has a slot, which waits from here on
    return simulation


def test_a_search_that_lacks_a_slot_gets_that_of_a_reserved_search_which_lacks_one_too() -> None:
    simulation = a_search_beside_a_reserved_request(beam_width=2)
    step = one_step(simulation)
    assert [one.request_id for one in step.preempted] == ["late-0"]
    assert admitted(step) == ["first-1"]
    simulation.run_all()
    simulation.check_outcome()


def test_a_search_that_lacks_a_slot_waits_for_a_reserved_request_that_ends_by_itself() -> None:
    simulation = a_search_beside_a_reserved_request()
    assert one_step(simulation).preempted == ()
    simulation.run_all()
    simulation.check_outcome()
    assert simulation.finished["late"].num_preemptions == 1


def test_a_search_that_lacks_a_slot_gets_that_of_the_highest_rank() -> None:
    simulation = Simulation(max_num_seqs=2, max_num_batched_tokens=8)
    simulation.add(make_request("a", prompt_of(4), 4, beam_width=2))
    simulation.add(make_request("b", prompt_of(20, seed=1), 4, beam_width=2))
    simulation.step()  # a's prompt, and the first chunk of b's
    simulation.step()  # the token after it in the one beam that has a slot
    assert [entry.request.request_id for entry in simulation.scheduler._queue] == ["a-1"]
    step = simulation.schedule()
    assert step is not None
    assert [one.request_id for one in step.preempted] == ["b-0"]
    assert [one.request.request_id for one in step.admitted] == ["a-1"]
    simulation.update(step, simulation.run(step))
    simulation.run_all()
    simulation.check_outcome()
