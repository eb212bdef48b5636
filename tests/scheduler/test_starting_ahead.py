"""What queues starts in steps that are planned while one runs, before its tokens are known: beside
the rows that go on, in order of arrival, and never with what the running step has yet to tell."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from simulation import make_request

from pagedkv.config import CacheConfig, SchedulerConfig
from pagedkv.records import PENDING, RunFacts, ScheduledStep
from pagedkv.scheduler import Scheduler, build_scheduler


def made(
    num_blocks: int = 40, *, num_cpu_blocks: int = 0, watermark: float = 0.0, **options: Any
) -> Scheduler:
    cache = CacheConfig(block_size=4, watermark=watermark)
    config = SchedulerConfig(**{"max_num_seqs": 4, "max_num_batched_tokens": 64, **options})
    facts = RunFacts("none", "float32", 1, 1, 1, 8, 128, num_blocks, num_cpu_blocks)
    return build_scheduler(cache, config, facts)[1]


def prompt(length: int, first: int = 0) -> list[int]:
    return [(first + 3 * i) % 50 for i in range(length)]


def names(scheduler: Scheduler, step: ScheduledStep | None) -> list[str]:
    assert step is not None
    scheduler.check_invariants()
    found = [scheduler.request_at(int(slot)) for slot in step.slots]
    return [one.request_id for one in found if one is not None]


def land(scheduler: Scheduler, step: ScheduledStep | None, token: int = 7) -> list[str]:
    """Every sampled row gets this token; who has ended."""
    assert step is not None
    ended = scheduler.update(step, np.full(step.sample_rows.size, token, dtype=np.int64))
    scheduler.check_invariants()
    return [one.request.request_id for one in ended]


def test_an_arrival_starts_beside_the_rows_of_the_step_that_runs() -> None:
    scheduler = made()
    scheduler.add(make_request("a", prompt(6), 5))
    first = scheduler.schedule()
    scheduler.add(make_request("b", prompt(9, 1), 3))
    scheduler.add(make_request("c", prompt(5, 2), 3))
    ahead = scheduler.schedule_ahead()
    assert names(scheduler, ahead) == ["a", "b", "c"]
    assert ahead is not None
    assert ahead.query_lens.tolist() == [1, 9, 5]
    assert [one.request.request_id for one in ahead.admitted] == ["b", "c"]
    slot = int(ahead.slots[0])
    assert scheduler.slots.token_ids[slot, 6] == PENDING
    land(scheduler, first)
    assert scheduler.slots.token_ids[slot, 6] == 7
    after = scheduler.schedule_ahead()
    assert names(scheduler, after) == ["a", "b", "c"]
    land(scheduler, ahead)
    land(scheduler, after)
    while scheduler.has_work:
        land(scheduler, scheduler.schedule())


def test_decodes_come_first_also_beside_chunks_that_start() -> None:
    scheduler = made(max_num_batched_tokens=8)
    scheduler.add(make_request("a", prompt(4), 9))
    first = scheduler.schedule()
    scheduler.add(make_request("one", [40], 3))  # its prompt is one token
    scheduler.add(make_request("long", prompt(30, 1), 3))
    ahead = scheduler.schedule_ahead()
    assert ahead is not None
    assert names(scheduler, ahead) == ["a", "one", "long"]
    assert ahead.query_lens.tolist() == [1, 1, 6]
    land(scheduler, first)
    land(scheduler, ahead)


def test_who_waits_for_blocks_that_a_launched_step_holds_starts_when_they_are_back() -> None:
    scheduler = made(num_blocks=9)
    scheduler.add(make_request("long", prompt(4), 20))
    scheduler.add(make_request("short", prompt(15, 1), 9, stops=(9,)))
    first = scheduler.schedule()
    scheduler.add(make_request("next", prompt(15, 2), 2))
    second = scheduler.schedule_ahead()
    assert names(scheduler, second) == ["long", "short"]
    land(scheduler, first)
    third = scheduler.schedule_ahead()
    assert names(scheduler, third) == ["long", "short"]
    assert land(scheduler, second, token=9) == ["short"]  # whose blocks the third still writes
    fourth = scheduler.schedule_ahead()
    assert names(scheduler, fourth) == ["long"]
    land(scheduler, third)
    fifth = scheduler.schedule_ahead()
    assert names(scheduler, fifth) == ["long", "next"]
    land(scheduler, fourth)
    land(scheduler, fifth)


def test_slots_and_tokens_that_the_running_step_may_free_are_not_counted_on() -> None:
    scheduler = made(max_num_seqs=2)
    for name in ("a", "b", "c"):
        scheduler.add(make_request(name, prompt(5, ord(name)), 2))
    first = scheduler.schedule()
    ahead = scheduler.schedule_ahead()
    assert names(scheduler, ahead) == ["a", "b"]  # their last tokens
    assert land(scheduler, first) == []
    assert scheduler.schedule_ahead() is None
    assert sorted(land(scheduler, ahead)) == ["a", "b"]
    assert names(scheduler, scheduler.schedule()) == ["c"]


def test_nobody_starts_who_would_push_the_running_ones_out() -> None:
    scheduler = made(num_blocks=6)
    scheduler.add(make_request("a", prompt(15), 6))
    first = scheduler.schedule()
    scheduler.add(make_request("b", prompt(12, 1), 2))
    ahead = scheduler.schedule_ahead()
    assert names(scheduler, ahead) == ["a"]
    land(scheduler, first)
    after = scheduler.schedule_ahead()
    assert names(scheduler, after) == ["a"]
    # Looked at beside a decode: until something ends or arrives, nobody asks again.
    assert not scheduler._ahead.may_start
    land(scheduler, ahead)
    later = scheduler.schedule_ahead()
    assert names(scheduler, later) == ["a"]
    scheduler.finish("a", "abort")
    assert scheduler._ahead.may_start
    land(scheduler, after)
    land(scheduler, later)
    assert names(scheduler, scheduler.schedule()) == ["b"]


def test_one_that_was_swapped_out_comes_back_beside_a_running_step() -> None:
    scheduler = made(num_blocks=18, num_cpu_blocks=18, preemption_mode="swap")
    scheduler.add(make_request("a", prompt(40), 12, stops=(9,)))
    scheduler.add(make_request("b", prompt(15, 1), 14))
    while scheduler.num_swapped == 0:
        land(scheduler, scheduler.schedule())
    running = scheduler.schedule()
    assert names(scheduler, running) == ["a"]
    scheduler.add(make_request("c", prompt(3, 2), 9))
    beside = scheduler.schedule_ahead()
    assert names(scheduler, beside) == ["a", "c"]  # the other has no room
    assert land(scheduler, running, token=9) == ["a"]
    ahead = scheduler.schedule_ahead()
    land(scheduler, beside)
    if ahead is None or not ahead.swap_in.size:  # the blocks of "a" have drained by now
        land(scheduler, ahead)
        running = scheduler.schedule()
        ahead = scheduler.schedule_ahead()
    else:
        running = None
    resumed = ahead if ahead is not None and ahead.swap_in.size else running
    assert resumed is not None
    assert resumed.swap_in.size > 0
    assert [one.request.request_id for one in resumed.admitted if one.is_resumed] == ["b"]
    for step in (running, ahead):
        if step is not None:
            land(scheduler, step)
    while scheduler.has_work:
        land(scheduler, scheduler.schedule())


def test_a_slot_is_given_again_while_a_row_of_its_last_owner_still_runs() -> None:
    scheduler = made(max_num_seqs=2)
    scheduler.add(make_request("a", prompt(5), 9, stops=(7,)))
    scheduler.add(make_request("b", prompt(5, 1), 9))
    first = scheduler.schedule()
    ahead = scheduler.schedule_ahead()
    assert names(scheduler, ahead) == ["a", "b"]
    scheduler.finish("a", "abort")
    land(scheduler, first, token=3)
    scheduler.add(make_request("c", prompt(6, 2), 4))
    after = scheduler.schedule_ahead()
    assert after is not None
    assert names(scheduler, after) == ["b", "c"]
    assert int(after.slots[1]) == int(ahead.slots[0]) if ahead is not None else False
    assert land(scheduler, ahead, token=5) == []
    known = scheduler.slots.known_token_ids(int(after.slots[1]))
    assert known.tolist() == prompt(6, 2)  # nothing of the row that ran for "a"
    land(scheduler, after)
    while scheduler.has_work:
        land(scheduler, scheduler.schedule())


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_where_urgency_counts_the_queue_waits_for_a_step_of_its_own(policy: str) -> None:
    scheduler = made(scheduling_policy=policy)
    scheduler.add(make_request("a", prompt(6), 5))
    first = scheduler.schedule()
    scheduler.add(make_request("b", prompt(9, 1), 3))
    ahead = scheduler.schedule_ahead()
    assert (ahead is None) == (policy == "priority")
    land(scheduler, first)
    if ahead is not None:
        land(scheduler, ahead)


def test_a_step_that_fails_takes_nobody_along_who_started_beside_it() -> None:
    scheduler = made()
    scheduler.add(make_request("a", prompt(6), 5))
    first = scheduler.schedule()
    scheduler.add(make_request("b", prompt(9, 1), 1))
    ahead = scheduler.schedule_ahead()
    assert first is not None
    failed = scheduler.fail(first, "injected")
    assert [one.request.request_id for one in failed] == ["a"]
    scheduler.check_invariants()
    assert land(scheduler, ahead) == ["b"]
    assert not scheduler.has_work
