"""The scheduler of a model with a sliding window: what it frees and when, what it lets in, how a
preempted sequence comes back.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from simulation import Simulation, make_request, prompt_of

from pagedkv.block_manager import FREED_BLOCK


def windowed(**options: Any) -> Simulation:
    settings = {"window": 8, "block_size": 4, "watermark": 0.0, "max_num_batched_tokens": 16}
    return Simulation(**{**settings, **options})


def seq_id_of(simulation: Simulation, name: str) -> int:
    return simulation.scheduler._entries[name].seq_id


def test_blocks_are_freed_after_the_step_that_read_them_last_and_not_before() -> None:
    simulation = windowed(enable_prefix_caching=False)
    simulation.add(make_request("a", prompt_of(5), 40))
    while (step := simulation.schedule()) is not None:
        seq_id, computed = int(step.seq_ids[0]), simulation.manager.num_tokens(int(step.seq_ids[0]))
        first_read = computed - int(step.query_lens[0]) - 7
        assert simulation.manager.num_freed_blocks(seq_id) == max(0, first_read) // 4
        simulation.update(step, simulation.run(step))
        if simulation.scheduler.has_work:
            assert simulation.manager.num_freed_blocks(seq_id) == max(0, computed - 7) // 4
    simulation.check_outcome()


def test_a_step_frees_in_one_call_and_only_when_a_block_is_due() -> None:
    simulation = windowed(max_num_seqs=8, num_blocks=64, max_num_batched_tokens=64)
    for i in range(6):
        simulation.add(make_request(str(i), prompt_of(5 + i % 2, seed=i), 30))
    calls: list[int] = []
    free = simulation.manager.free_behind_batch

    class Counting:
        def __getattr__(self, name: str) -> Any:
            return getattr(simulation.manager, name)

        def free_behind_batch(self, seq_ids: np.ndarray, first_needed: np.ndarray) -> int:
            calls.append(len(seq_ids))
            return free(seq_ids, first_needed)

    simulation.scheduler.window._manager = Counting()  # type: ignore[assignment]
    simulation.run_all()
    simulation.check_outcome()
    # Each frees a block every 4 tokens from its 11th on, until it has 34 or 35; three in one step.
    assert calls == [3] * (6 + 7)


def test_a_prompt_longer_than_the_pool_is_computed_in_chunks_that_fit() -> None:
    simulation = windowed(num_blocks=4, max_num_batched_tokens=64, max_model_len=100)
    simulation.add(make_request("a", prompt_of(60), 30))
    longest, most = 0, 0
    while (step := simulation.schedule()) is not None:
        longest = max(longest, int(step.query_lens.max()))
        most = max(most, simulation.manager.statistics().num_referenced)
        simulation.update(step, simulation.run(step))
    simulation.check_outcome()
    assert most == 4
    assert longest == 7  # no more than the window, whatever the budget


def test_a_pool_without_room_for_the_window_serves_what_fits_whole() -> None:
    simulation = windowed(num_blocks=2)
    simulation.add(make_request("a", prompt_of(5), 4))
    with pytest.raises(ValueError, match=r"need 3 blocks of 4 tokens for a sliding window of 8 t"):
        simulation.add(make_request("b", prompt_of(5), 5))
    simulation.run_all()
    simulation.check_outcome()


def test_what_decodes_beyond_its_window_keeps_no_blocks_from_others() -> None:
    simulation = windowed(num_blocks=8, max_model_len=100)
    simulation.add(make_request("old", prompt_of(30), 60))
    for _ in range(10):
        simulation.step()
    # It holds 3 blocks at most from here on, and the other needs 5.
    simulation.add(make_request("new", prompt_of(30, seed=1), 5))
    simulation.step()
    assert simulation.scheduler.num_running == 2
    simulation.run_all()
    simulation.check_outcome()
    assert simulation.num_preempted == 0


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_a_preempted_sequence_comes_back_with_its_window(mode: str) -> None:
    simulation = windowed(
        num_blocks=4, num_cpu_blocks=8, preemption_mode=mode, scheduling_policy="priority"
    )
    simulation.add(make_request("a", prompt_of(5), 60))
    for _ in range(20):
        simulation.step()
    simulation.add(make_request("urgent", prompt_of(9, seed=1), 10, priority=-1))
    simulation.step()
    entry = simulation.scheduler._entries["a"]
    assert entry.is_swapped == (mode == "swap")
    if entry.is_swapped:
        table = simulation.manager.block_table(entry.seq_id)
        assert entry.num_freed_blocks == 4
        assert (table == FREED_BLOCK).tolist() == [True] * 4 + [False] * (len(table) - 4)
        assert (table[4:] < 0).all()
    simulation.run_all()
    simulation.check_outcome()
    assert simulation.finished["a"].num_preemptions == 1


def test_a_hit_holds_what_the_window_needs_and_says_so() -> None:
    simulation = windowed(num_blocks=16, max_model_len=100)
    simulation.add(make_request("a", prompt_of(40), 4))
    simulation.run_all()
    simulation.add(make_request("b", [*prompt_of(40), 1, 2], 4))
    simulation.step()
    assert simulation.manager.num_freed_blocks(seq_id_of(simulation, "b")) == 8
    assert simulation.manager.statistics().num_referenced == 3
    text = simulation.scheduler.log.explain("b")[0].text
    assert "40 of its 42 tokens are in the prefix cache, " in text
    assert "; 8 blocks of them lie behind its window and are not held" in text
    simulation.run_all()
    simulation.check_outcome()


def test_without_a_window_nothing_is_freed_before_the_end() -> None:
    simulation = windowed(window=0, enable_prefix_caching=False)
    simulation.add(make_request("a", prompt_of(5), 20))
    while simulation.step():
        if simulation.scheduler.has_work:
            assert simulation.manager.num_freed_blocks(seq_id_of(simulation, "a")) == 0
    simulation.check_outcome()


def test_reserved_requests_stay_while_one_on_the_cpu_holds_blocks_of_the_pool() -> None:
    """a goes on from what it shares with its fork, which alone holds that then."""
    simulation = windowed(
        num_blocks=12, block_size=1, window=4, num_cpu_blocks=40, preemption_mode="swap",
        max_num_batched_tokens=4, max_num_seqs=4, enable_prefix_caching=False,
    )  # fmt: skip
    for name, num_steps in (("a", 2), ("b", 4)):
        simulation.add(make_request(name, prompt_of(4, ord(name)), 30))
        for _ in range(num_steps):
            simulation.step()
    simulation.fork("a", 1)
    simulation.step()
    scheduler = simulation.scheduler
    fork = scheduler._entries["a-1"]
    assert fork.slot is not None
    scheduler._preemption.preempt_alone(fork.slot, 0, 0, scheduler._num_steps, "in the test")
    assert (simulation.manager.block_table(fork.seq_id) >= 0).sum() == 2
    for name in "ab":  # as after preemptions: together they may need the whole pool
        entry = scheduler._entries[name]
        entry.is_reserved = True
        scheduler.slots.worst_blocks[entry.slot] = 6
    simulation.run_all()
    simulation.check_outcome()
    assert {name: simulation.finished[name].num_preemptions for name in ("a", "b", "a-1")} == {
        "a": 0,
        "b": 0,
        "a-1": 1,
    }
    assert "swapped-out blocks are given up since what they share fills the pool" in (
        scheduler.log.explain("a-1")[0].text
    )
