"""The forks and beams of one request are swapped as a unit: out together, what they share once, and
back together with the sharing as it was.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from simulation import Simulation, make_request, prompt_of

from pagedkv.records import ScheduledStep
from pagedkv.scheduler import Rates


def crowded(**options: Any) -> Simulation:
    """A request that runs first and grows, and a group behind it, in a pool too small for both."""
    return Simulation(
        **{
            "num_blocks": 20,
            "max_num_seqs": 6,
            "watermark": 0.0,
            "num_cpu_blocks": 40,
            "preemption_mode": "swap",
            "enable_prefix_caching": False,
            **options,
        }
    )


def with_group(simulation: Simulation, *, prompt_len: int = 22, **answers: Any) -> Simulation:
    simulation.add(make_request("first", prompt_of(prompt_len), 40))
    simulation.add(make_request("group", prompt_of(18, 1), 16, **{"n": 3, **answers}))
    return simulation


def run_until_preempted(simulation: Simulation) -> ScheduledStep:
    while True:
        step = simulation.schedule()
        assert step is not None
        if step.preempted:
            return step
        simulation.update(step, simulation.run(step))


def tables(simulation: Simulation, names: list[str]) -> list[np.ndarray]:
    by_name = {name: seq_id for seq_id, name in simulation.scheduler.names_by_seq_id().items()}
    return [simulation.manager.block_table(by_name[name]) for name in names]


MEMBERS = ["group-0", "group-1", "group-2"]


@pytest.mark.parametrize("answers", [{"n": 3}, {"n": 1, "best_of": 3}, {"beam_width": 3, "n": 2}])
def test_forks_go_and_come_back_as_a_unit_and_share_as_before(answers: dict[str, Any]) -> None:
    if "beam_width" in answers:  # beams must fit even when they share nothing
        simulation = with_group(crowded(num_blocks=27), prompt_len=50, **answers)
    else:
        simulation = with_group(crowded(), **answers)
    before: list[np.ndarray] = []
    num_allocatable = num_held = 0
    while True:
        names = simulation.scheduler.names_by_seq_id().values()
        if set(MEMBERS) <= set(names):
            before = tables(simulation, MEMBERS)
            num_allocatable = simulation.manager.num_allocatable_blocks
            num_held = simulation.manager.block_table(0).size
        step = simulation.schedule()
        assert step is not None
        if step.preempted:
            break
        simulation.update(step, simulation.run(step))

    assert [one.request_id for one in step.preempted] == MEMBERS
    distinct = np.unique(np.concatenate(before))
    assert distinct.size < sum(map(len, before))  # they share their prompt
    # Every block once, in one step, and all of them can be taken by others.
    assert sorted(step.swap_out[:, 0]) == distinct.tolist()
    assert np.unique(step.swap_out[:, 1]).size == distinct.size
    taken = simulation.manager.block_table(0).size - num_held
    assert simulation.manager.num_allocatable_blocks == num_allocatable + distinct.size - taken
    assert {one.choice.num_sequences for one in step.preempted} == {3}
    assert {one.choice.num_blocks for one in step.preempted} == {distinct.size}
    # On the CPU the tables share as they did in the pool.
    away = tables(simulation, MEMBERS)
    for one, other in ((0, 1), (0, 2), (1, 2)):
        was_shared = before[one][: len(before[other])] == before[other][: len(before[one])]
        is_shared = away[one][: len(away[other])] == away[other][: len(away[one])]
        assert was_shared.tolist() == is_shared.tolist()
    simulation.update(step, simulation.run(step))

    while not any(one.is_resumed for one in step.admitted):
        next_step = simulation.schedule()
        assert next_step is not None
        step = next_step
        if any(one.is_resumed for one in step.admitted):
            # Three hold each of the prompt's full blocks again.
            prompt_blocks = tables(simulation, MEMBERS[:1])[0][: 18 // 4]
            assert (simulation.manager.ref_counts()[prompt_blocks] == 3).all()
        simulation.update(step, simulation.run(step))
    assert sorted(one.request.request_id for one in step.admitted) == MEMBERS
    assert len(step.swap_in) == distinct.size
    simulation.run_all()
    simulation.check_outcome()
    statistics = simulation.manager.statistics()
    assert statistics.num_swapped_out == statistics.num_swapped_in
    assert simulation.finished["group-0"].num_preemptions >= 1


def test_a_block_that_forks_share_and_write_next_is_copied_after_it_came_back() -> None:
    simulation = crowded(num_blocks=16)
    simulation.add(make_request("first", prompt_of(22), 40))
    simulation.add(make_request("group", prompt_of(18, 1), 16, n=3))
    for _ in range(2):
        simulation.step()
    # Both prompts are computed, and the forks hold one partial block together.
    last = tables(simulation, MEMBERS)
    assert len({int(one[-1]) for one in last}) == 1
    simulation.add(make_request("urgent", prompt_of(4, 2), 2))
    slots = [int(s) for s in simulation.scheduler._running.order]
    preemption = simulation.scheduler._preemption
    unit = preemption._unit_of(slots[-1])
    assert [one.request.request_id for one in unit] == MEMBERS
    preemption._preempt(unit, 3, "for the test")
    while not (step := simulation.schedule()).swap_in.size:  # type: ignore[union-attr]
        simulation.update(step, simulation.run(step))  # type: ignore[arg-type]
    assert step is not None
    assert len(step.copies) == 2
    assert set(step.copies[:, 0]) <= set(step.swap_in[:, 1])
    simulation.update(step, simulation.run(step))
    simulation.run_all()
    simulation.check_outcome()


def test_the_cost_model_prices_the_unit_with_what_it_shares_once() -> None:
    for is_cached in (False, True):
        simulation = with_group(crowded(preemption_mode="auto", enable_prefix_caching=is_cached))
        simulation.scheduler.rates = Rates(link_bytes_per_s=1e12, prefill_tokens_per_s=1.0)
        step = run_until_preempted(simulation)
        choice = step.preempted[0].choice
        assert choice.swaps
        held = tables(simulation, MEMBERS)
        computed = sum(simulation.manager.num_tokens(k + 1) for k in range(3))
        shared = sum(map(len, held)) - np.unique(np.concatenate(held)).size
        assert choice.num_blocks == np.unique(np.concatenate(held)).size
        assert choice.num_tokens == computed - (4 * shared if is_cached else 0)
        assert shared == 2 * (18 // 4)
        (one,) = simulation.scheduler.log.explain("group-1")
        assert "its unit of 3 sequences held" in one.text
        simulation.update(step, simulation.run(step))
        simulation.run_all()
        simulation.check_outcome()
        (one,) = simulation.scheduler.log.explain("group-1")
        assert "resumes with its unit of 3 sequences: " in one.text


def test_without_swap_space_for_the_whole_unit_it_is_computed_again() -> None:
    simulation = with_group(crowded(num_cpu_blocks=6))
    step = run_until_preempted(simulation)
    choice = step.preempted[0].choice
    assert [one.request_id for one in step.preempted] == ["group-2"]
    assert not choice.swaps
    assert choice.num_sequences == 1
    assert choice.why.startswith("for its unit of 3 sequences ")
    assert choice.why.endswith("CPU blocks are needed and 6 are free")
    simulation.update(step, simulation.run(step))
    simulation.run_all()
    simulation.check_outcome()


def test_a_group_that_alone_outgrows_the_pool_gives_up_one_at_a_time() -> None:
    simulation = crowded(num_blocks=14)
    simulation.add(make_request("group", prompt_of(18, 1), 24, n=4))
    step = run_until_preempted(simulation)
    assert [one.request_id for one in step.preempted] == ["group-3"]
    assert step.preempted[0].choice.num_sequences == 1
    simulation.update(step, simulation.run(step))
    simulation.run_all()
    simulation.check_outcome()


def test_an_urgent_request_displaces_a_group_whole() -> None:
    simulation = crowded(scheduling_policy="priority", num_blocks=14)
    simulation.add(make_request("group", prompt_of(18, 1), 16, n=3, priority=2))
    for _ in range(4):
        simulation.step()
    simulation.add(make_request("urgent", prompt_of(40, 2), 4, priority=0))
    step = run_until_preempted(simulation)
    assert sorted(one.request_id for one in step.preempted) == MEMBERS
    assert {one.displaced_by for one in step.preempted} == {"urgent"}
    simulation.update(step, simulation.run(step))
    simulation.run_all()
    simulation.check_outcome()


@pytest.mark.parametrize("whom", ["group-0", "group-2", "group"])
def test_one_answer_or_all_of_a_swapped_group_can_be_aborted(whom: str) -> None:
    simulation = with_group(crowded())
    step = run_until_preempted(simulation)
    simulation.update(step, simulation.run(step))
    assert simulation.scheduler.num_swapped == 3
    simulation.abort(whom)
    assert simulation.scheduler.num_swapped == (0 if whom == "group" else 2)
    simulation.run_all()
    simulation.check_outcome()


@pytest.mark.parametrize("has_run", [False, True])
def test_a_failed_step_makes_the_whole_unit_it_swapped_out_compute_again(has_run: bool) -> None:
    simulation = with_group(crowded())
    step = run_until_preempted(simulation)
    if has_run:
        simulation.run(step)
    simulation.fail(step)
    assert simulation.scheduler.num_swapped == 0
    assert simulation.scheduler.num_waiting == 3
    simulation.run_all()
    assert {simulation.finished[name].reason for name in MEMBERS} <= {"stop", "length"}
    simulation.check_outcome()


def test_a_unit_waits_for_slots_and_tokens_for_all_of_it() -> None:
    simulation = with_group(crowded(max_num_seqs=4, max_num_batched_tokens=8))
    step = run_until_preempted(simulation)
    simulation.update(step, simulation.run(step))
    for i in range(6):
        simulation.add(make_request(f"later{i}", prompt_of(3, 10 + i), 12))
    entries = simulation.scheduler._entries
    while entries.keys() >= set(MEMBERS) and entries["group-0"].is_swapped:
        assert all(entries[name].is_swapped for name in MEMBERS)
        simulation.step()
    assert not any(entries[name].is_swapped for name in MEMBERS)
    (one,) = simulation.scheduler.log.explain("group-0")
    assert {d.numbers.get("lacks") for d in one.decisions if d.kind == "waits"} & {"slot", "blocks"}
    simulation.run_all()
    simulation.check_outcome()


def test_pairs_of_a_member_given_up_in_the_same_step_are_not_run() -> None:
    simulation = with_group(crowded())
    for _ in range(5):
        simulation.step()
    preemption = simulation.scheduler._preemption
    slots = [int(s) for s in simulation.scheduler._running.order]
    unit = preemption._unit_of(slots[-1])
    preemption._preempt(unit, 6, "for the test")
    own = {int(-1 - one) for one in simulation.manager.block_table(unit[-1].seq_id)}
    kept = {
        int(-1 - block) for one in unit[:-1] for block in simulation.manager.block_table(one.seq_id)
    }
    preemption.drop_swapped(unit[-1], "for the test")
    pairs = preemption.take_swapped_out()
    assert set(pairs[:, 1].tolist()) == kept
    assert own - kept
