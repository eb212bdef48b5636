"""Whose prompt gets a step's tokens: a more urgent request that waits goes before less urgent
prompts in progress, which keep their blocks; and they share the tokens as ever if it cannot start.
"""

from __future__ import annotations

import pytest
from simulation import Simulation, make_request, prompt_of

from pagedkv.records import Explanation, ScheduledStep


def urgent_first(**options: object) -> Simulation:
    made = {"scheduling_policy": "priority", "watermark": 0.0, "max_num_batched_tokens": 16}
    return Simulation(**{**made, **options})  # type: ignore[arg-type]


def one_step(simulation: Simulation) -> ScheduledStep:
    step = simulation.schedule()
    assert step is not None
    simulation.update(step, simulation.run(step))
    return step


def shares(simulation: Simulation) -> dict[str, int]:
    """One more step: the tokens of each request in it."""
    step = simulation.schedule()
    assert step is not None
    at = simulation.scheduler.request_at
    rows = [at(slot) for slot in step.slots.tolist()]
    names = [one.request_id for one in rows if one is not None]
    simulation.update(step, simulation.run(step))
    return dict(zip(names, step.query_lens.tolist(), strict=True))


def why(simulation: Simulation, name: str) -> Explanation:
    (one,) = simulation.scheduler.log.explain(name)
    return one


def ended_well(simulation: Simulation) -> None:
    simulation.run_all()
    simulation.check_outcome()


def a_long_prompt_in_progress(**options: object) -> Simulation:
    """`low`, 100 tokens, has computed 16 of them."""
    simulation = urgent_first(**options)
    simulation.add(make_request("low", prompt_of(100), 4, priority=5))
    assert shares(simulation) == {"low": 16}
    return simulation


def test_an_urgent_prompt_goes_before_a_less_urgent_one_which_keeps_its_blocks() -> None:
    simulation = a_long_prompt_in_progress()
    simulation.add(make_request("urgent", prompt_of(40, 1), 3, priority=0))
    held = simulation.manager.num_tokens(0)
    assert shares(simulation) == {"urgent": 16}
    assert simulation.manager.num_tokens(0) == held
    assert shares(simulation) == {"urgent": 16}
    assert shares(simulation) == {"urgent": 8, "low": 8}  # what it leaves is not lost
    assert shares(simulation) == {"urgent": 1, "low": 15}
    ended_well(simulation)
    assert list(simulation.finished) == ["urgent", "low"]
    assert simulation.num_preempted == 0


def test_the_prompt_that_sits_out_says_for_whom_with_the_numbers() -> None:
    simulation = a_long_prompt_in_progress()
    simulation.add(make_request("urgent", prompt_of(32, 1), 3, priority=0))
    ended_well(simulation)
    waits = [one for one in why(simulation, "low").decisions if one.kind == "waits"]
    assert [(one.step, one.last_step) for one in waits] == [(2, 3)]
    assert waits[0].numbers == {
        "lacks": "urgent",
        "by": "urgent",
        "num_tokens": 16,
        "max_num_batched_tokens": 16,
    }
    assert (
        "steps 2 to 3: waits for a more urgent request's prompt: 'urgent' gets 16 of the step's 16 "
        "tokens; it keeps its blocks"
    ) in why(simulation, "low").text
    assert "waits" not in why(simulation, "urgent").text


def test_under_fcfs_and_among_equals_a_prompt_in_progress_keeps_its_turn() -> None:
    for policy, priority in (("fcfs", 0), ("priority", 5), ("priority", 6)):
        simulation = urgent_first(scheduling_policy=policy)
        first = 5 if policy == "priority" else 0
        simulation.add(make_request("first", prompt_of(100), 4, priority=first))
        one_step(simulation)
        simulation.add(make_request("second", prompt_of(40, 1), 3, priority=priority))
        assert shares(simulation) == {"first": 16}
        assert "the step's 16 tokens are used up" in why(simulation, "second").text
        ended_well(simulation)
        assert "more urgent" not in why(simulation, "first").text


def test_one_that_has_waited_for_long_enough_is_not_passed_any_more() -> None:
    simulation = a_long_prompt_in_progress(priority_ageing_steps=1, max_model_len=128)
    for _ in range(3):
        assert shares(simulation) == {"low": 16}
    simulation.add(make_request("early", prompt_of(8, 1), 3, priority=0))  # within 5 levels of 1
    assert shares(simulation) == {"early": 8, "low": 8}
    assert shares(simulation) == {"early": 1, "low": 15}
    simulation.add(make_request("late", prompt_of(8, 2), 3, priority=0))
    assert shares(simulation) == {"early": 1, "low": 13, "late": 2}
    ended_well(simulation)


def test_decodes_go_on_beside_an_urgent_prompt() -> None:
    simulation = urgent_first()
    for i in range(3):
        simulation.add(make_request(f"decode{i}", prompt_of(4, i), 40, priority=6))
    one_step(simulation)
    simulation.add(make_request("low", prompt_of(60, 7), 4, priority=5))
    assert shares(simulation)["low"] == 13
    simulation.add(make_request("urgent", prompt_of(30, 8), 4))
    for _ in range(2):
        assert shares(simulation) == {"decode0": 1, "decode1": 1, "decode2": 1, "urgent": 13}
    assert shares(simulation)["low"] == 9
    ended_well(simulation)


def test_each_of_several_urgent_requests_goes_ahead_and_the_rest_is_shared() -> None:
    simulation = a_long_prompt_in_progress()
    for name, length, priority in (("b", 3, 1), ("a", 5, 0), ("equal", 4, 5)):
        simulation.add(make_request(name, prompt_of(length, length), 2, priority=priority))
    assert shares(simulation) == {"a": 5, "b": 3, "low": 8}
    ended_well(simulation)


def test_a_prompt_between_the_two_in_urgency_keeps_its_share() -> None:
    simulation = a_long_prompt_in_progress()
    simulation.add(make_request("middle", prompt_of(44, 1), 3, priority=2))
    assert shares(simulation) == {"middle": 16}
    simulation.add(make_request("urgent", prompt_of(9, 2), 3, priority=3))
    # It is behind the middle one, and ahead of low.
    assert shares(simulation) == {"middle": 16}
    assert shares(simulation) == {"middle": 12, "urgent": 4}
    assert "'middle'" in why(simulation, "low").text
    ended_well(simulation)


@pytest.mark.parametrize("lacking", ["slot", "blocks", "prefix"])
def test_the_others_take_the_tokens_where_the_urgent_one_cannot_start(lacking: str) -> None:
    """Of equals in the way: those it could displace are too few."""
    simulation = urgent_first(
        num_blocks=40, max_num_seqs=2 if lacking == "slot" else 8, reserve_after_preemptions=1
    )
    simulation.add(make_request("equal", prompt_of(8, 3), 40, priority=0))
    one_step(simulation)
    # Reserved, since it was preempted as often as allowed, so nobody displaces it.
    simulation.add(make_request("low", prompt_of(90), 4, priority=5))
    one_step(simulation)
    simulation.scheduler._running.entry_at(1).is_reserved = True
    simulation.scheduler.slots.worst_blocks[1] = 24
    prompt = prompt_of(90)[:80] if lacking == "prefix" else prompt_of(60, 2)
    length = {"slot": 8, "blocks": 60, "prefix": 80}[lacking]
    simulation.add(make_request("urgent", prompt[:length], 3, priority=0))
    step = simulation.schedule()
    assert step is not None
    assert step.admitted == step.preempted == ()
    assert step.query_lens.tolist() == [1, 15]  # the whole budget, as though nobody waited
    simulation.update(step, simulation.run(step))
    assert "more urgent" not in why(simulation, "low").text
    ended_well(simulation)


def test_a_beam_search_and_a_group_go_ahead_whole() -> None:
    for answers in ({"n": 3}, {"beam_width": 3}):
        simulation = a_long_prompt_in_progress()
        simulation.add(make_request("urgent", prompt_of(20, 1), 5, priority=0, **answers))
        assert shares(simulation) == {"urgent-0": 16}
        assert shares(simulation) == {"urgent-0": 4, "low": 12}
        later = shares(simulation)
        assert later.pop("low") == 13  # beside one token of each answer, or beam
        assert list(later.values()) == [1, 1, 1]
        ended_well(simulation)
        assert simulation.num_preempted == 0


def test_beams_and_copies_of_a_less_urgent_search_have_their_blocks_beside_an_urgent_prompt() -> (
    None
):
    simulation = urgent_first(num_blocks=40)
    simulation.add(make_request("search", prompt_of(6, 3), 12, priority=6, beam_width=3))
    one_step(simulation)
    simulation.add(make_request("low", prompt_of(80), 4, priority=5))
    assert shares(simulation)["low"] == 13
    simulation.add(make_request("urgent", prompt_of(30, 1), 4))
    step = one_step(simulation)
    assert [one.request.request_id for one in step.admitted] == ["urgent"]
    assert step.query_lens.tolist() == [1, 1, 1, 13]
    assert len(step.copies) or simulation.manager.statistics().num_copies
    ended_well(simulation)


def test_a_swapped_out_urgent_request_comes_back_before_a_less_urgent_prompt_goes_on() -> None:
    simulation = urgent_first(num_blocks=32, num_cpu_blocks=64, preemption_mode="swap")
    simulation.add(make_request("back", prompt_of(40, 1), 30, priority=1))
    for _ in range(2):
        one_step(simulation)
    simulation.add(make_request("first", prompt_of(90, 2), 2, priority=-9))
    assert [one.request_id for one in one_step(simulation).preempted] == ["back"]
    # Not enough blocks are left for it, yet enough for a shorter one, which starts at last.
    simulation.add(make_request("low", prompt_of(30), 4, priority=5))
    while "first" not in simulation.finished:
        step = one_step(simulation)
    assert step.query_lens.tolist() == [1, 15]
    assert simulation.scheduler.num_swapped == 1
    assert shares(simulation) == {"back": 8, "low": 8}
    ended_well(simulation)


def test_a_step_planned_before_the_last_has_ended_tells_who_sits_out_too() -> None:
    simulation = a_long_prompt_in_progress()
    simulation.add(make_request("urgent", prompt_of(48, 1), 3, priority=0))
    assert shares(simulation) == {"urgent": 16}
    step = simulation.schedule()
    ahead = simulation.scheduler.schedule_ahead()
    assert step is not None
    assert ahead is not None
    (wait,) = [one for one in why(simulation, "low").decisions if one.kind == "waits"]
    assert (wait.step, wait.last_step) == (2, 4)
    assert ahead.query_lens.tolist() == [16]
