"""The pace of prompts beside decodes: full steps while somebody may be the last to end, else as
many tokens as max_num_paced_tokens leaves them."""

from __future__ import annotations

import numpy as np
import pytest
from simulation import make_request

from pagedkv.config import CacheConfig, SchedulerConfig
from pagedkv.records import RunFacts, ScheduledStep
from pagedkv.scheduler import Scheduler, build_scheduler


def made(paced: int) -> Scheduler:
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, max_num_paced_tokens=paced)
    facts = RunFacts("none", "float32", 1, 1, 1, 8, 256, 200, 0)
    return build_scheduler(CacheConfig(block_size=4), config, facts)[1]


def prompt(length: int, first: int = 0) -> list[int]:
    return [(first + 3 * i) % 50 for i in range(length)]


def land(scheduler: Scheduler, step: ScheduledStep) -> None:
    scheduler.update(step, np.full(step.sample_rows.size, 7, dtype=np.int64))
    scheduler.check_invariants()


def run(scheduler: Scheduler, *, pipelined: bool) -> list[list[int]]:
    """Tokens of the rows of each step."""
    lens = []
    flight: ScheduledStep | None = None
    while scheduler.has_work:
        if flight is None:
            flight = scheduler.schedule()
            assert flight is not None
            lens.append(flight.query_lens.tolist())
        following = scheduler.schedule_ahead() if pipelined else None
        if following is not None:
            lens.append(following.query_lens.tolist())
        land(scheduler, flight)
        flight = following
    return lens


@pytest.mark.parametrize("pipelined", [False, True])
def test_who_will_end_before_others_gets_what_fills_a_step_to_the_pace(pipelined: bool) -> None:
    scheduler = made(paced=10)
    scheduler.add(make_request("long", prompt(20), 30))
    scheduler.add(make_request("short", prompt(60, 1), 4))
    lens = run(scheduler, pipelined=pipelined)
    # Nothing decodes at first: a full step. Then the rest of the prompt beside a decode.
    assert lens[:4] == [[20, 44], [1, 9], [1, 7], [1, 1]]
    assert len(lens) == 30


@pytest.mark.parametrize("pipelined", [False, True])
@pytest.mark.parametrize(("paced", "max_tokens"), [(10, 30), (0, 4)])
def test_who_may_be_the_last_to_end_gets_all_there_is(
    pipelined: bool, paced: int, max_tokens: int
) -> None:
    scheduler = made(paced)
    scheduler.add(make_request("first", prompt(40), 30))
    scheduler.add(make_request("second", prompt(70, 1), max_tokens))
    assert run(scheduler, pipelined=pipelined)[:3] == [[40, 24], [1, 46], [1, 1]]


def test_those_that_wait_are_in_a_hurry_as_soon_as_the_longest_has_ended() -> None:
    scheduler = made(paced=6)
    scheduler.add(make_request("long", prompt(64), 40))
    scheduler.add(make_request("next", prompt(60, 1), 20))
    assert [run_one(scheduler), run_one(scheduler), run_one(scheduler)] == [[64], [1, 5], [1, 5]]
    scheduler.finish("long", "stop")
    assert run_one(scheduler) == [50]


def run_one(scheduler: Scheduler) -> list[int]:
    step = scheduler.schedule()
    assert step is not None
    land(scheduler, step)
    return step.query_lens.tolist()


def test_who_waits_is_told_what_for() -> None:
    scheduler = made(paced=5)
    scheduler.add(make_request("long", prompt(60), 40))
    scheduler.add(make_request("next", prompt(60, 1), 20))
    scheduler.add(make_request("last", prompt(60, 2), 10))
    run_one(scheduler)
    assert "waits, the step's 64 tokens are used up (max_num_batched_tokens)" in told(scheduler)
    run_one(scheduler)
    words = "others will run for longer than it can: the step's 5 tokens are used up"
    assert words in told(scheduler)


def told(scheduler: Scheduler) -> str:
    return scheduler.log.explain("last")[0].decisions[-1].text
