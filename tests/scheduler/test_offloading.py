"""The CPU pool as the second level of the prefix cache: evicted prefixes come back for a hit, by
the cost model, and nothing that goes wrong on the way changes an answer.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from simulation import Simulation, make_request, prompt_of

from pagedkv.block_manager import BlockManager
from pagedkv.records import Decision
from pagedkv.scheduler import Rates
from pagedkv.scheduler.cost_model import swap_in_cost

DEAR = Rates(link_bytes_per_s=1.0, prefill_tokens_per_s=1e9)


def offloading(**options: Any) -> Simulation:
    return Simulation(
        **{
            "num_blocks": 8,
            "num_cpu_blocks": 16,
            "watermark": 0.0,
            "enable_kv_offloading": True,
            "shuffle_seed": 5,
            **options,
        }
    )


def ask(simulation: Simulation, name: str, prompt: list[int], **options: Any) -> Decision:
    """Run a request alone; how it started."""
    simulation.add(make_request(name, prompt, 3, **options))
    simulation.run_all()
    (one,) = simulation.scheduler.log.explain(name)
    return next(decision for decision in one.decisions if decision.kind == "admitted")


def test_a_working_set_three_times_the_pool_is_served_from_the_cpu() -> None:
    simulation = offloading()
    for i in range(60):
        which = (i * 7 + i // 5) % 6
        started = ask(simulation, str(i), prompt_of(17, which))
        if i >= 30:
            assert started.numbers["num_cached"] == 16 or started.numbers["missed_block"] > 0  # type: ignore[operator]
    simulation.check_outcome()  # every answer is the solo one
    statistics = simulation.manager.statistics()
    assert statistics.prefix_cache_cpu_hits > 300
    assert statistics.prefix_cache_hits > 400
    assert statistics.num_onloaded * 4 == statistics.prefix_cache_cpu_hits
    without = offloading(enable_kv_offloading=False)
    for i in range(60):
        ask(without, str(i), prompt_of(17, (i * 7 + i // 5) % 6))
    assert without.manager.statistics().prefix_cache_hits < statistics.prefix_cache_hits / 2


def test_several_requests_of_one_step_come_back_beside_evictions() -> None:
    for seed in range(30):
        simulation = offloading(num_blocks=12, num_cpu_blocks=10, max_num_seqs=3, shuffle_seed=seed)
        source = np.random.default_rng(seed)
        for i in range(40):
            simulation.add(make_request(str(i), prompt_of(9, int(source.integers(6))), 4))
            if source.random() < 0.5:
                simulation.step()
        simulation.run_all()
        simulation.check_outcome()
        assert simulation.manager.statistics().num_onloaded > 0


def test_a_hit_on_the_cpu_is_told_with_its_tokens() -> None:
    simulation = offloading()
    ask(simulation, "first", prompt_of(17))
    ask(simulation, "other", prompt_of(29, 1))
    (other,) = simulation.scheduler.log.explain("other")
    (moved,) = [one for one in other.decisions if one.kind == "evicted"]
    assert moved.numbers["num_offloaded"] == len(moved.numbers["block_ids"]) > 0  # type: ignore[arg-type]
    assert "tokens move to the CPU, idle for" in moved.text
    again = ask(simulation, "again", prompt_of(17))
    assert again.numbers["num_cached"] == 16
    num_from_cpu = again.numbers["num_from_cpu"]
    assert num_from_cpu == simulation.manager.statistics().prefix_cache_cpu_hits > 0
    assert f"16 of its 17 tokens are in the prefix cache ({num_from_cpu} come back from the" in (
        again.text
    )


def test_drops_on_the_cpu_are_told_to_whom_they_are_for() -> None:
    simulation = offloading(num_cpu_blocks=2)
    for i in range(4):
        ask(simulation, str(i), prompt_of(25, i))
    kinds = [
        decision
        for i in range(4)
        for decision in simulation.scheduler.log.explain(str(i))[0].decisions
    ]
    dropped = [one for one in kinds if one.kind == "dropped"]
    assert sum(len(one.numbers["idle_steps"]) for one in dropped) == (  # type: ignore[arg-type]
        simulation.manager.statistics().num_offload_drops
    )
    assert dropped
    assert "cached tokens on the CPU are given up" in dropped[0].text
    evicted = [one.text for one in kinds if one.kind == "evicted"]
    assert any("move to the CPU but for" in text for text in evicted)
    again = ask(simulation, "again", prompt_of(25))
    assert again.numbers["miss_reason"] == "evicted"


def test_what_costs_more_to_bring_back_is_computed() -> None:
    simulation = offloading()
    ask(simulation, "first", prompt_of(17))
    ask(simulation, "other", prompt_of(29, 1))
    simulation.scheduler.rates = DEAR
    again = ask(simulation, "again", prompt_of(17))
    assert again.numbers["num_from_cpu"] == 0
    assert again.numbers["miss_reason"] == "on_cpu"
    assert "is on the CPU: bringing it back would cost 250000000.0 times" in again.text
    before = simulation.manager.statistics().num_offloaded
    ask(simulation, "third", prompt_of(29, 2))
    assert simulation.manager.statistics().num_offloaded == before  # it would never come back
    simulation.check_outcome()


def test_the_cost_of_a_block_is_its_bytes_over_the_link_against_its_tokens() -> None:
    rates = Rates(link_bytes_per_s=12e9, prefill_tokens_per_s=2000.0)
    cost = swap_in_cost(rates, bytes_per_block=1_200_000, block_size=16)
    assert cost == pytest.approx(0.0001 / 0.008)
    simulation = offloading()
    simulation.scheduler.rates = Rates(link_bytes_per_s=2.0, prefill_tokens_per_s=2.0)
    assert simulation.manager.swap_in_cost == 0.25  # 1 byte at 2 a second, 4 tokens at 2 a second


def test_swapped_requests_come_before_what_the_cache_keeps_there() -> None:
    simulation = offloading(num_blocks=12, num_cpu_blocks=8, max_num_seqs=3, preemption_mode="swap")
    for i in range(3):
        ask(simulation, f"warm{i}", prompt_of(29, 10 + i))
    assert simulation.manager.statistics().num_cpu_free == 0
    num_drops = simulation.manager.statistics().num_offload_drops
    for name in "abc":
        simulation.add(make_request(name, prompt_of(12, ord(name)), 20))
    while simulation.scheduler.num_swapped == 0:
        simulation.step()
    assert simulation.manager.statistics().num_offload_drops > num_drops
    simulation.run_all()
    simulation.check_outcome()


def test_tenants_stay_apart_and_a_reset_clears_the_cpu_too() -> None:
    simulation = offloading()
    ask(simulation, "one", prompt_of(17), salt="one")
    ask(simulation, "other", prompt_of(29, 1))
    assert simulation.manager.statistics().num_cpu_cached_idle > 0
    assert ask(simulation, "two", prompt_of(17), salt="two").numbers["num_cached"] == 0
    simulation.manager.reset_prefix_cache()
    assert simulation.manager.statistics().num_cpu_free == 16
    assert ask(simulation, "again", prompt_of(17), salt="one").numbers["num_cached"] == 0
    simulation.check_outcome()


@pytest.mark.parametrize("has_run", [False, True])
def test_a_failed_step_leaves_nothing_of_its_moves_to_be_found(has_run: bool) -> None:
    simulation = offloading()
    ask(simulation, "first", prompt_of(17))
    ask(simulation, "other", prompt_of(29, 1))
    simulation.add(make_request("fails", prompt_of(17), 3))
    step = simulation.schedule()
    assert step is not None
    assert step.swap_in.size
    assert step.swap_out.size
    if has_run:
        simulation.run(step, bad_rows=np.arange(step.slots.size))
    simulation.fail(step)
    assert simulation.finished["fails"].reason == "error"
    # What came in is gone, and what went out too, though nobody knows whether it arrived.
    again = ask(simulation, "again", prompt_of(17))
    assert again.numbers["num_from_cpu"] == 0
    ask(simulation, "other again", prompt_of(29, 1))
    simulation.check_outcome()


def test_an_abort_beside_the_step_that_brings_its_blocks_back_gives_all_of_them_up() -> None:
    simulation = offloading()
    ask(simulation, "first", prompt_of(17))
    ask(simulation, "other", prompt_of(29, 1))
    simulation.add(make_request("aborted", prompt_of(17), 3))
    step = simulation.schedule()
    assert step is not None
    assert step.swap_in.size
    token_ids = simulation.run(step)
    simulation.abort("aborted")
    simulation.update(step, token_ids)
    assert ask(simulation, "again", prompt_of(17)).numbers["num_cached"] == 16
    simulation.check_outcome()


def test_without_offloading_a_step_asks_for_no_moves() -> None:
    simulation = Simulation(num_cpu_blocks=4)
    assert not simulation.manager.has_offloading
    simulation.add(make_request("a", prompt_of(9), 3))
    simulation.run_all()
    assert simulation.manager.statistics().num_offloaded == 0
    with pytest.raises(ValueError, match="enable_kv_offloading needs enable_prefix_caching"):
        BlockManager(8, enable_kv_offloading=True)
