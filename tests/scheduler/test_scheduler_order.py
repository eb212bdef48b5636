"""Order and room: who is admitted, who waits, who is preempted, and what a step costs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from simulation import Simulation, make_request, prompt_of

from pagedkv.config import SchedulerConfig
from pagedkv.scheduler import Scheduler
from pagedkv.scheduler.rows import share_budget


@pytest.mark.parametrize("extra", [-1, 0, 1, 2])
def test_what_can_never_fit_is_refused_with_its_numbers(extra: int) -> None:
    simulation = Simulation(num_blocks=6, block_size=4, watermark=0.5)
    prompt, max_tokens = prompt_of(20), 5 + extra  # 24 + extra tokens need a place
    request = make_request("big", prompt, max_tokens)
    if extra > 0:
        with pytest.raises(ValueError, match=r"20 prompt tokens .* need 7 blocks of 4 .* has 6"):
            simulation.add(request)
        assert not simulation.scheduler.has_work
    else:
        simulation.add(request)
    simulation.add(make_request("small", prompt_of(3), 3))
    simulation.run_all()
    simulation.check_outcome()


def test_a_request_longer_than_the_context_is_refused_with_its_numbers() -> None:
    simulation = Simulation(max_model_len=16)
    with pytest.raises(ValueError, match=r"12 tokens and 5 more .* 17 in all, .* is 16"):
        simulation.add(make_request("long", prompt_of(12), 5))
    simulation.add(make_request("fits", prompt_of(12), 4))
    simulation.run_all()
    simulation.check_outcome()


def test_a_name_is_taken_until_its_request_ends() -> None:
    simulation = Simulation()
    simulation.add(make_request("a", prompt_of(3), 2))
    with pytest.raises(ValueError, match="'a' is in use"):
        simulation.add(make_request("a", prompt_of(4), 2))
    with pytest.raises(KeyError):
        simulation.scheduler.finish("unknown", "abort")
    simulation.run_all()
    assert "a" not in simulation.scheduler


def test_the_latest_arrival_is_the_victim_and_is_not_in_the_step() -> None:
    simulation = Simulation(num_blocks=9, max_num_seqs=3, watermark=0.0)
    for name in "abc":
        simulation.add(make_request(name, prompt_of(12, ord(name)), 10))
    preempted: list[Any] = []
    while simulation.scheduler.has_work:
        step = simulation.schedule()
        assert step is not None
        preempted += step.preempted
        simulation.update(step, simulation.run(step))
    assert {one.request_id for one in preempted} == {"b", "c"}
    assert all(one.num_blocks_needed > one.num_blocks_available for one in preempted)
    assert list(simulation.finished) == ["a", "b", "c"]
    assert simulation.finished["c"].num_preemptions >= 1
    simulation.check_outcome()


def test_a_preemption_after_any_token_changes_no_answer() -> None:
    seen: set[int] = set()
    for head_start in range(1, 40):
        simulation = Simulation(num_blocks=44, block_size=1, watermark=0.0)
        simulation.add(make_request("keeps", prompt_of(2), 42))
        for _ in range(head_start):
            simulation.step()
        simulation.add(make_request("victim", prompt_of(6, 1), 30))
        while simulation.scheduler.has_work:
            num_known = simulation.scheduler.slots.num_tokens.copy()
            step = simulation.schedule()
            assert step is not None
            seen |= {int(num_known[one.slot]) - 6 for one in step.preempted}
            simulation.update(step, simulation.run(step))
        simulation.check_outcome()
    assert seen >= set(range(1, 18))


def test_a_large_request_and_a_stream_of_small_ones_both_get_on() -> None:
    simulation = Simulation(num_blocks=20, max_num_seqs=4, max_num_batched_tokens=8)
    number = 0
    waited: dict[str, int] = {}
    for round_ in range(300):
        while simulation.scheduler.num_waiting < 3 and number < 90:
            is_large = number == 20
            prompt = prompt_of(60 if is_large else 3, number)
            simulation.add(make_request(f"r{number}", prompt, 10 if is_large else 4))
            waited[f"r{number}"] = round_
            number += 1
        simulation.step()
        for name in simulation.finished:
            if name in waited:
                assert round_ - waited.pop(name) < 60, f"{name} waited too long"
    simulation.run_all()
    assert len(simulation.finished) == 90
    simulation.check_outcome()


def test_a_long_prefill_gets_a_share_of_every_step_beside_steady_decodes() -> None:
    simulation = Simulation(num_blocks=200, max_num_seqs=8, max_num_batched_tokens=8)
    for i in range(7):
        simulation.add(make_request(f"decode{i}", prompt_of(2, i), 60))
    for _ in range(4):
        simulation.step()
    simulation.add(make_request("long", prompt_of(50, 99), 4))
    for i in range(50):
        step = simulation.schedule()
        assert step is not None
        assert step.query_lens.tolist() == [1] * 8, f"step {i}"
        simulation.update(step, simulation.run(step))
    simulation.run_all()
    simulation.check_outcome()


def test_chunks_and_decodes_share_a_step_single_tokens_first() -> None:
    simulation = Simulation(max_num_seqs=4, max_num_batched_tokens=10)
    simulation.add(make_request("a", prompt_of(3), 9))
    simulation.step()
    simulation.add(make_request("b", prompt_of(12, 1), 3))
    simulation.add(make_request("c", prompt_of(5, 2), 3))
    lens = []
    for _ in range(3):
        step = simulation.schedule()
        assert step is not None
        lens.append(step.query_lens.tolist())
        simulation.update(step, simulation.run(step))
    assert lens == [[1, 9], [1, 3, 5], [1, 1, 1]]
    simulation.run_all()
    simulation.check_outcome()


def test_admission_leaves_the_watermark_to_running_requests() -> None:
    simulation = Simulation(num_blocks=20, watermark=0.25)
    simulation.add(make_request("a", prompt_of(40), 2))  # 10 blocks, 10 left
    simulation.add(make_request("b", prompt_of(24, 1), 2))  # 6 blocks would leave 4 of 5
    step = simulation.schedule()
    assert step is not None
    assert [one.request.request_id for one in step.admitted] == ["a"]
    simulation.update(step, simulation.run(step))
    simulation.run_all()
    simulation.check_outcome()


def test_a_prompt_in_progress_keeps_the_blocks_it_was_promised() -> None:
    simulation = Simulation(num_blocks=12, max_num_seqs=3, max_num_batched_tokens=10, watermark=0.0)
    simulation.add(make_request("long", prompt_of(36), 4))
    simulation.add(make_request("next", prompt_of(16, 1), 2))
    simulation.run_all()
    assert simulation.num_preempted == 0
    simulation.check_outcome()


class CountingManager:
    """Counts the calls that reach the C++ manager."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self.num_calls = 0

    def __getattr__(self, name: str) -> Any:
        self.num_calls += 1
        return getattr(self._manager, name)


def test_a_decode_step_makes_a_fixed_number_of_core_calls() -> None:
    calls = {}
    for num_seqs in (2, 64):
        simulation = Simulation(num_blocks=1000, max_num_seqs=64, max_num_batched_tokens=512)
        counting = CountingManager(simulation.manager)
        scheduler = Scheduler(
            counting,  # type: ignore[arg-type]
            SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=512),
            max_model_len=128,
        )
        for i in range(num_seqs):
            scheduler.add(make_request(str(i), prompt_of(5, i), 20))
        for _ in range(4):
            before = counting.num_calls
            step = scheduler.schedule()
            assert step is not None
            scheduler.update(step, np.zeros(step.sample_rows.size, dtype=np.int64))
        assert step.slots.size == num_seqs
        calls[num_seqs] = counting.num_calls - before
    assert calls[2] == calls[64] <= 7


def test_a_blocked_prompt_is_not_hashed_again_in_every_step() -> None:
    simulation = Simulation(num_blocks=10, max_num_seqs=2, watermark=0.0)
    counting = CountingManager(simulation.manager)
    simulation.scheduler._admission._manager = counting  # type: ignore[assignment]
    asked: list[int] = []
    counting.can_allocate = lambda ids, **key: (  # type: ignore[attr-defined]
        asked.append(1) or simulation.manager.can_allocate(ids, **key)
    )
    simulation.add(make_request("holds", prompt_of(20), 16))
    simulation.add(make_request("waits", prompt_of(30, 1), 4))
    simulation.run_all()
    assert len(asked) <= 3
    simulation.check_outcome()


def test_steps_are_taken_one_at_a_time() -> None:
    simulation = Simulation()
    assert simulation.schedule() is None
    simulation.add(make_request("a", prompt_of(3), 4))
    step = simulation.schedule()
    assert step is not None
    with pytest.raises(RuntimeError, match="is in flight"):
        simulation.schedule()
    with pytest.raises(ValueError, match="samples 1 rows, got token ids of shape"):
        simulation.scheduler.update(step, np.zeros(2, dtype=np.int64))
    simulation.update(step, simulation.run(step))
    with pytest.raises(RuntimeError, match="is not the one in flight"):
        simulation.scheduler.update(step, np.zeros(1, dtype=np.int64))
    simulation.run_all()
    simulation.check_outcome()


def test_share_budget_gives_singles_first_then_chunks_in_order() -> None:
    def shares(order: list[int], remaining: list[int], budget: int) -> tuple[list[int], list[int]]:
        rows, counts = share_budget(np.array(order), np.array(remaining), budget)
        return rows.tolist(), counts.tolist()

    assert shares([4, 0, 7, 2], [1, 9, 1, 30], 16) == ([4, 7, 0, 2], [1, 1, 9, 5])
    assert shares([4, 0], [30, 2], 30) == ([4], [30])
    assert shares([4, 0], [29, 2], 30) == ([0, 4], [1, 29])
    assert shares([], [], 8) == ([], [])


def test_broken_books_are_noticed() -> None:
    def broken(change: Any) -> None:
        simulation = Simulation()
        simulation.add(make_request("runs", prompt_of(3), 9))
        simulation.step()
        simulation.add(make_request("waits", prompt_of(3), 9))
        change(simulation.scheduler)
        with pytest.raises(AssertionError):
            simulation.scheduler.check_invariants()

    broken(lambda scheduler: scheduler._queue._entries.clear())
    broken(lambda scheduler: scheduler._queue.push(scheduler._entries["runs"]))
    broken(lambda scheduler: scheduler.slots.num_computed.__setitem__(0, 2))
    broken(lambda scheduler: scheduler.slots.num_computed.__setitem__(0, 5))
    broken(lambda scheduler: scheduler.slots.seq_ids.__setitem__(1, 0))
    broken(lambda scheduler: scheduler.slots._free.pop())
    broken(lambda scheduler: scheduler._manager.free(0))
    broken(lambda scheduler: scheduler._running.by_slot.__setitem__(0, None))
