"""Why: every decision about a request is kept with its numbers, in bounded memory."""

from __future__ import annotations

import numpy as np
from simulation import Simulation, make_request, prompt_of

from pagedkv.records import Decision, Explanation, counted
from pagedkv.scheduler.decision_log import (
    MAX_FINISHED,
    MAX_NAMES,
    MAX_PER_REQUEST,
    DecisionLog,
)
from pagedkv.scheduler.eviction_log import MAX_EVICTIONS, EvictionLog


def why(simulation: Simulation, name: str) -> Explanation:
    (one,) = simulation.scheduler.log.explain(name)
    return one


def kinds(explanation: Explanation) -> list[str]:
    return [one.kind for one in explanation.decisions]


def test_a_request_that_runs_at_once_is_queued_admitted_and_ends() -> None:
    simulation = Simulation()
    simulation.add(make_request("a", prompt_of(9), 3))
    simulation.run_all()
    explanation = why(simulation, "a")
    assert kinds(explanation) == ["queued", "admitted", "finished"]
    queued, admitted, finished = explanation.decisions
    assert queued.numbers["prompt_len"] == 9
    assert admitted.numbers["query_len"] == 9
    assert finished.numbers["num_generated"] == 3
    assert explanation.text.splitlines() == [
        "step 0: queued with 9 prompt tokens, at most 3 to generate, priority 0; 0 requests wait, "
        "0 run",
        "step 1: starts with a chunk of 9 tokens; 0 of its 9 tokens are in the prefix cache, "
        "block 0 is not and, as far as remembered, never was",
        "step 3: ends: length, 3 tokens generated, preempted 0 times",
    ]


def admitted(simulation: Simulation, name: str) -> Decision:
    return next(one for one in why(simulation, name).decisions if one.kind == "admitted")


def test_a_miss_names_the_block_and_why() -> None:
    simulation = Simulation()
    simulation.add(make_request("warm", prompt_of(9), 2))
    simulation.run_all()
    for name, prompt, salt, block, reason, words in (
        ("part", [*prompt_of(8), *prompt_of(8, 5)], None, 2, "never_cached",
         "8 of its 16 tokens are in the prefix cache, block 2 is not and, as far as remembered, "
         "never was"),
        ("whole", prompt_of(9), None, 2, "none",
         "8 of its 9 tokens are in the prefix cache, all its full blocks"),
        ("exact", prompt_of(8), None, 1, "none",
         "4 of its 8 tokens are in the prefix cache, and the last token must be computed, so its "
         "block is too"),
        ("short", prompt_of(4), None, 0, "none",
         "where only full blocks of 4 before the last token are"),
        ("other", prompt_of(9), "tenant", 0, "never_cached", "block 0 is not and, as far as"),
    ):  # fmt: skip
        simulation.add(make_request(name, prompt, 2, salt=salt))
        simulation.run_all()
        decision = admitted(simulation, name)
        assert words in decision.text, name
        assert decision.numbers["missed_block"] == block
        assert decision.numbers["miss_reason"] == reason
        assert decision.numbers["evicted_in"] is None
    simulation = Simulation(enable_prefix_caching=False)
    simulation.add(make_request("off", prompt_of(9), 2))
    simulation.run_all()
    assert "0 of its 9 tokens are in the prefix cache, which is off" in why(simulation, "off").text
    assert admitted(simulation, "off").numbers["miss_reason"] == "caching_off"


def test_a_miss_by_eviction_says_when_and_for_whom() -> None:
    simulation = Simulation(num_blocks=8, watermark=0.0)
    for name, seed in (("a", 0), ("b", 1)):
        simulation.add(make_request(name, prompt_of(22, seed), 2))
        simulation.run_all()
    simulation.add(make_request("salted", prompt_of(22), 2, salt="tenant"))
    simulation.add(make_request("again", prompt_of(22), 2))
    simulation.run_all()
    # "b" took the three free blocks and then, from the end, three of the five that "a" had filled.
    (evicted,) = [one for one in why(simulation, "b").decisions if one.kind == "evicted"]
    assert evicted.numbers["num_tokens"] == 12
    assert len(evicted.numbers["block_ids"]) == 3  # type: ignore[arg-type]
    assert evicted.step == 3
    assert evicted.numbers["idle_steps"] == (0, 0, 0)
    assert "step 3: takes 3 blocks out of the prefix cache, whose 12 tokens are given up, idle" in (
        why(simulation, "b").text
    )
    # Of another tenant's prompt nothing is told.
    numbers = admitted(simulation, "salted").numbers
    assert (numbers["miss_reason"], numbers["evicted_for"]) == ("never_cached", None)
    numbers = admitted(simulation, "again").numbers
    assert (numbers["miss_reason"], numbers["missed_block"]) == ("evicted", 0)
    assert (numbers["evicted_in"], numbers["evicted_for"]) == (5, "salted")
    statistics = simulation.manager.statistics()
    assert statistics.prefix_cache_evictions == 4 * statistics.num_evictions
    assert statistics.prefix_cache_hits + statistics.prefix_cache_misses == 4 * 22


def test_decodes_that_evict_are_told_without_an_object_each() -> None:
    simulation = Simulation(num_blocks=12, max_num_seqs=2, watermark=0.0)
    simulation.add(make_request("old", prompt_of(40), 2))
    simulation.run_all()
    for name in "ab":
        simulation.add(make_request(name, prompt_of(3, ord(name)), 20))
    simulation.run_all()
    for name in "ab":
        evicted = [one for one in why(simulation, name).decisions if one.kind == "evicted"]
        steps = [one.step for one in why(simulation, name).decisions]
        assert len(evicted) >= 4
        assert steps == sorted(steps)
        assert [note.kind for note in simulation.scheduler.log._logs[name].notes] == [
            "admitted",
            "finished",
        ]


def test_the_last_evictions_are_kept() -> None:
    log = EvictionLog(block_size=4)
    log.add(1, np.array([[7, 3, 9, -1]]))
    for step in range(2, 12):
        log.add(
            step,
            np.stack([np.arange(1000), *(np.full(1000, one) for one in (5, step, -1))], axis=1),
        )
    assert log.decisions(3) == []
    decisions = log.decisions(5)
    assert [one.step for one in decisions] == list(range(3, 12))
    assert sum(len(one.numbers["block_ids"]) for one in decisions) == MAX_EVICTIONS  # type: ignore[arg-type]
    assert decisions[-1].numbers["idle_steps"] == (11,) * 1000
    log.add(20, np.stack([np.arange(10_000)] * 4, axis=1))
    assert log.decisions(9_999)[0].numbers["block_ids"] == (9_999,)
    assert log.decisions(10_000 - MAX_EVICTIONS - 1) == []


def test_the_names_of_the_last_sequences_are_kept() -> None:
    log = DecisionLog()
    for seq_id in range(MAX_NAMES + 2):
        log.name(seq_id, str(seq_id))
    assert log.name_of(1) is None
    assert log.name_of(2) == "2"


def test_a_wait_names_what_is_lacking_and_lasts_until_it_is_there() -> None:
    simulation = Simulation(num_blocks=12, max_num_seqs=2, watermark=0.0)
    simulation.add(make_request("holds", prompt_of(36), 8))
    simulation.step()
    simulation.add(make_request("large", prompt_of(20, 1), 2))
    simulation.run_all()
    explanation = why(simulation, "large")
    assert [kind for kind in kinds(explanation) if kind != "evicted"] == [
        "queued",
        "waits",
        "admitted",
        "finished",
    ]
    wait = explanation.decisions[1]
    assert (wait.numbers["lacks"], wait.numbers["needed"]) == ("blocks", 5)
    assert wait.step == 2
    assert wait.last_step == 9
    assert "steps 2 to 9: waits for 5 blocks; " in explanation.text


def test_slots_tokens_and_twins_are_waited_for_by_name() -> None:
    simulation = Simulation(max_num_seqs=2, max_num_batched_tokens=8)
    simulation.add(make_request("a", prompt_of(12), 6))
    simulation.add(make_request("b", prompt_of(5, 1), 6))
    simulation.add(make_request("c", prompt_of(5, 2), 6))
    simulation.run_all()
    assert "the step's 8 tokens are used up (max_num_batched_tokens)" in why(simulation, "b").text
    assert "waits for one of 2 slots (max_num_seqs)" in why(simulation, "c").text

    simulation = Simulation()
    for name in ("first", "twin"):
        simulation.add(make_request(name, prompt_of(21), 2))
    simulation.run_all()
    assert "waits, the step computes a prefix" in why(simulation, "twin").text


def test_a_request_behind_one_that_was_passed_often_enough_waits_its_turn() -> None:
    simulation = Simulation(num_blocks=12, max_num_seqs=4, watermark=0.0, max_num_overtakes=0)
    simulation.add(make_request("holds", prompt_of(36), 8))
    simulation.step()
    simulation.add(make_request("large", prompt_of(20, 1), 2))
    simulation.add(make_request("small", prompt_of(3, 2), 2))
    simulation.run_all()
    assert "waits its turn: a request before it waits for blocks and has been passed 0 times" in (
        why(simulation, "small").text
    )


def test_a_preemption_says_for_whom_which_way_and_why() -> None:
    texts = {}
    for mode in ("swap", "recompute"):
        simulation = Simulation(
            num_blocks=12,
            watermark=0.0,
            num_cpu_blocks=20,
            preemption_mode=mode,
            scheduling_policy="priority",
        )
        simulation.add(make_request("low", prompt_of(36), 8, priority=1))
        simulation.step()
        simulation.add(make_request("urgent", prompt_of(20, 1), 2))
        simulation.run_all()
        texts[mode] = why(simulation, "low").text
        preempted = next(one for one in why(simulation, "low").decisions if one.kind == "preempted")
        assert preempted.numbers["num_tokens"] == 32
        assert preempted.numbers["num_blocks"] == 8
        assert preempted.numbers["recompute_us"] == 32 / 2000 * 1e6
    assert "preempted for 'urgent', which has priority 0" in texts["swap"]
    assert "its blocks move to the CPU (preemption_mode is swap)" in texts["swap"]
    assert "resumes: 8 blocks come back from the CPU, 32 tokens need not" in texts["swap"]
    assert "it will be computed again (preemption_mode is recompute)" in texts["recompute"]
    assert "resumes" not in texts["recompute"]


def test_growth_that_preempts_gives_its_numbers() -> None:
    simulation = Simulation(num_blocks=9, max_num_seqs=3, watermark=0.0)
    for name in "abc":
        simulation.add(make_request(name, prompt_of(12, ord(name)), 10))
    simulation.run_all()
    assert (
        "preempted since the step needs 3 blocks and 1 can be taken; it will be computed again "
        "(2 CPU blocks are needed and 0 are free); it held 2 blocks alone and had computed 8 tokens"
    ) in why(simulation, "c").text


def test_a_failed_swap_is_told() -> None:
    simulation = Simulation(num_blocks=9, max_num_seqs=3, num_cpu_blocks=9, preemption_mode="swap")
    for name in "ab":
        simulation.add(make_request(name, prompt_of(15, ord(name)), 10))
    while not (step := simulation.schedule()).preempted:  # type: ignore[union-attr]
        simulation.update(step, simulation.run(step))  # type: ignore[arg-type]
    simulation.fail(step)  # type: ignore[arg-type]
    assert kinds(why(simulation, "b"))[-1] == "swap_dropped"
    assert "given up since the step that moved them failed" in why(simulation, "b").text


def test_memory_is_bounded_per_request_and_over_requests() -> None:
    log = DecisionLog()
    request = make_request("busy", [1], 1)
    for step in range(500):
        log.step = step
        log.note(request, "swap_dropped", reason=str(step))
    (one,) = log.explain("busy")
    assert len(one.decisions) == MAX_PER_REQUEST
    assert one.num_forgotten == 500 - MAX_PER_REQUEST
    assert one.decisions[0].step == 0
    assert one.decisions[-1].step == 499
    assert f"... {500 - MAX_PER_REQUEST} decisions are not kept" in one.text
    for i in range(MAX_FINISHED + 10):
        log.finish(make_request(str(i), [1], 1), reason="stop", num_generated=1, num_preemptions=0)
    assert log.explain("9") == []
    assert len(log.explain("10")) == 1
    assert len(log._logs) == MAX_FINISHED + 1


def test_a_name_used_anew_begins_a_new_log() -> None:
    simulation = Simulation()
    for _ in range(3):
        simulation.add(make_request("a", prompt_of(3), 2))
        simulation.run_all()
        simulation.finished.clear()
    assert kinds(why(simulation, "a")) == ["queued", "admitted", "finished"]


def test_one_of_anything_is_told_as_one() -> None:
    assert counted(1, "token") == "1 token"
    assert counted(0, "token") == "0 tokens"
    assert counted(1, "block is", "blocks are") == "1 block is"
    assert counted(2, "block is", "blocks are") == "2 blocks are"

    simulation = Simulation(num_blocks=9, max_num_seqs=1, watermark=0.0, num_cpu_blocks=1)
    simulation.add(make_request("a", prompt_of(1), 1))
    simulation.add(make_request("b", prompt_of(1, 1), 2))
    simulation.add(make_request("c", prompt_of(1, 2), 2))
    simulation.run_all()
    assert "with 1 prompt token, at most 2 to generate, priority 0; 1 request waits, 0 run" in (
        why(simulation, "b").text
    )
    assert "2 requests wait, 0 run" in why(simulation, "c").text
    assert "waits for one of 1 slot (max_num_seqs)" in why(simulation, "b").text
    text = why(simulation, "a").text
    assert "starts with a chunk of 1 token; 0 of its 1 token is in the prefix cache, " in text
    assert "ends: length, 1 token generated, preempted 0 times" in text

    log = DecisionLog()
    log.note(make_request("d", [1], 1), "waits", lacks="turn", num_overtaken=1)
    log.note(make_request("d", [1], 1), "waits", lacks="blocks", needed=1, available=0, promised=1)
    for i in range(MAX_PER_REQUEST - 2):
        log.note(make_request("d", [1], 1), "swap_dropped", reason=f"in the test {i}")
    (one,) = log.explain("d")
    assert "has been passed 1 time, as often" in one.text
    assert "waits for 1 block; 0 can be taken, 1 of them is promised to" in one.text
    log.note(make_request("d", [1], 1), "swap_dropped", reason="in the test")
    assert "... 1 decision is not kept" in log.explain("d")[0].text

    evictions = EvictionLog(1)
    evictions.add(3, np.array([[5, 1, 1, -1], [-1, 1, 1, -1], [6, 2, 1, 0]], dtype=np.int64))
    in_pool, on_cpu = evictions.decisions(1)
    assert in_pool.text == (
        "takes 1 block out of the prefix cache, whose 1 token is given up, idle for 1 step: 5"
    )
    assert on_cpu.text == "for it 1 cached token on the CPU is given up, idle for 1 step"
    (moved,) = evictions.decisions(2)
    assert "whose 1 token moves to the CPU, idle for 1 step" in moved.text
