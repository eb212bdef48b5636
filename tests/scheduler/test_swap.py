"""Swapping preempted requests to the CPU and back, or computing them again: which, and how."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from simulation import Simulation, make_request, prompt_of

from pagedkv.scheduler import Rates
from pagedkv.scheduler.cost_model import choose


def crowded(**options: Any) -> Simulation:
    """Three requests that together need more than the pool."""
    made = Simulation(
        **{"num_blocks": 12, "max_num_seqs": 3, "watermark": 0.0, "num_cpu_blocks": 30, **options}
    )
    for name in "abc":
        made.add(make_request(name, prompt_of(12, ord(name)), 20))
    return made


def run_and_collect(simulation: Simulation) -> list[Any]:
    steps = []
    while (step := simulation.schedule()) is not None:
        steps.append(step)
        simulation.update(step, simulation.run(step))
    simulation.check_outcome()
    return steps


def test_a_swapped_request_goes_on_where_it_stopped() -> None:
    simulation = crowded(preemption_mode="swap", enable_prefix_caching=False)
    steps = run_and_collect(simulation)
    statistics = simulation.manager.statistics()
    assert statistics.num_swapped_out == statistics.num_swapped_in > 0
    resumed = [one for step in steps for one in step.admitted if one.is_resumed]
    assert resumed
    # Nothing is computed twice: 12 prompt tokens and 19 of the answer, three times.
    assert sum(step.num_tokens for step in steps) == 3 * (12 + 19)
    assert all(one.num_cached_tokens >= 12 for one in resumed)


def test_resumption_keeps_the_order_of_arrival() -> None:
    simulation = crowded(preemption_mode="swap")
    for name in "de":
        simulation.add(make_request(name, prompt_of(12, ord(name)), 20))
    run_and_collect(simulation)
    assert list(simulation.finished) == sorted(simulation.finished)


@pytest.mark.parametrize("num_cpu_blocks", [0, 1, 2, 3])
def test_without_enough_swap_space_a_victim_is_computed_again(num_cpu_blocks: int) -> None:
    simulation = crowded(preemption_mode="swap", num_cpu_blocks=num_cpu_blocks)
    steps = run_and_collect(simulation)
    choices = [one.choice for step in steps for one in step.preempted]
    assert choices
    for choice in choices:
        assert choice.swaps == (choice.num_blocks <= num_cpu_blocks and num_cpu_blocks > 0)
    if num_cpu_blocks:
        assert any("CPU blocks are needed" in choice.why for choice in choices)


def test_eight_requests_and_two_cpu_blocks_all_get_their_answer() -> None:
    simulation = Simulation(
        num_blocks=14, max_num_seqs=8, watermark=0.0, num_cpu_blocks=2, preemption_mode="swap"
    )
    for i in range(8):
        simulation.add(make_request(str(i), prompt_of(5, i), 30))
    run_and_collect(simulation)
    assert simulation.num_preempted > 0


def test_a_swapped_request_can_be_aborted() -> None:
    simulation = crowded(preemption_mode="swap")
    while simulation.scheduler.num_swapped == 0:
        simulation.step()
    simulation.abort("c")
    assert simulation.scheduler.num_swapped == 0
    simulation.run_all()
    simulation.check_outcome()


@pytest.mark.parametrize("has_run", [False, True])
def test_a_failed_step_makes_those_it_swapped_out_compute_again(has_run: bool) -> None:
    simulation = crowded(preemption_mode="swap")
    while True:
        step = simulation.schedule()
        assert step is not None
        token_ids = simulation.run(step) if has_run or not step.preempted else None
        if step.preempted:
            break
        assert token_ids is not None
        simulation.update(step, token_ids)
    assert simulation.scheduler.num_swapped == 1
    simulation.fail(step)
    assert simulation.scheduler.num_swapped == 0
    assert simulation.scheduler.num_waiting == 1
    simulation.run_all()
    assert simulation.finished["c"].reason in ("stop", "length")
    simulation.check_outcome()


def test_blocks_that_swapped_requests_share_never_lock_the_pool() -> None:
    prefix = prompt_of(24)
    for seed in range(40):
        simulation = Simulation(
            num_blocks=14,
            max_num_seqs=4,
            watermark=0.0,
            num_cpu_blocks=20,
            preemption_mode="swap",
            scheduling_policy="priority",
            shuffle_seed=seed,
        )
        for i in range(3):
            simulation.add(make_request(f"low{i}", [*prefix, i], 16, priority=2))
        for _ in range(2 + seed % 12):
            simulation.step()
        simulation.add(make_request("urgent", prompt_of(50, seed), 6, priority=0))
        run_and_collect(simulation)


def test_auto_swaps_when_that_is_cheaper_by_the_given_rates() -> None:
    for rates, swaps in (
        (Rates(link_bytes_per_s=1e12, prefill_tokens_per_s=1.0), True),
        (Rates(link_bytes_per_s=1.0, prefill_tokens_per_s=1e9), False),
    ):
        simulation = crowded(preemption_mode="auto")
        simulation.scheduler.rates = rates
        steps = run_and_collect(simulation)
        choices = [one.choice for step in steps for one in step.preempted]
        assert {choice.swaps for choice in choices} == {swaps}


def cost(mode: str = "auto", **numbers: Any) -> Any:
    given = {
        "num_blocks": 10,
        "num_cpu_free": 100,
        "num_tokens": 160,
        "bytes_per_block": 1_200_000,
        "rates": Rates(link_bytes_per_s=12e9, prefill_tokens_per_s=2000.0),
    }
    return choose(mode, **{**given, **numbers})


def test_the_cost_model_weighs_bytes_both_ways_against_tokens() -> None:
    choice = cost()
    assert choice.swap_us == pytest.approx(2000.0)  # 2 * 10 * 1.2 MB / 12 GB/s
    assert choice.recompute_us == pytest.approx(80_000.0)  # 160 / 2000 tokens/s
    assert choice.swaps
    assert choice.why == "moving 2000 us, computing again 80000 us"
    assert not cost(rates=Rates(12e9, 160 / 0.001999)).swaps
    assert cost(rates=Rates(12e9, 160 / 0.002001)).swaps
    assert not cost(num_tokens=4).swaps  # equal costs: computed again
    # However few they are, a step for them takes its time.
    for step_s, swaps in ((0.001, False), (0.002, False), (0.0021, True)):
        choice = cost(num_tokens=2, rates=Rates(step_s=step_s))
        assert choice.swaps == swaps
        assert choice.recompute_us == 1e6 * max(2 / 2000, step_s)


def test_a_forced_mode_is_kept_to_where_it_can_be() -> None:
    assert cost("swap", num_tokens=1).swaps
    assert not cost("recompute").swaps
    assert not cost("swap", num_cpu_free=9).swaps
    assert "10 CPU blocks are needed and 9 are free" in cost("swap", num_cpu_free=9).why
    assert not cost("swap", num_blocks=0).swaps


def test_pairs_of_a_step_are_arrays_of_pairs() -> None:
    simulation = crowded(preemption_mode="swap")
    for step in run_and_collect(simulation):
        for pairs in (step.swap_out, step.copies, step.swap_in):
            assert pairs.dtype == np.int64
            assert pairs.ndim == 2
            assert pairs.shape[1] == 2


def test_one_that_was_swapped_out_comes_back_when_the_others_can_grow_a_while_beside_it() -> None:
    simulation = Simulation(
        num_blocks=28, watermark=0.0, num_cpu_blocks=60, preemption_mode="swap", max_num_seqs=4
    )
    for name in "abcd":
        simulation.add(make_request(name, prompt_of(12, ord(name)), 20 if name == "a" else 34))
    found = []  # blocks that are left, and running requests, whenever one comes back
    while (step := simulation.schedule()) is not None:
        if any(one.is_resumed for one in step.admitted):
            found.append((simulation.manager.num_allocatable_blocks, step.slots.size - 1))
        simulation.update(step, simulation.run(step))
    simulation.check_outcome()
    assert found
    # 16 steps' growth of each in blocks of 4, but for the block that it takes itself.
    assert all(num_left >= 16 * num_others // 4 for num_left, num_others in found)
    assert any(num_others > 0 for _, num_others in found)
    assert simulation.num_preempted == len(found) == 1  # nobody goes twice
