"""Why: every decision about a request is kept with its numbers, in bounded memory."""

from __future__ import annotations

from simulation import Simulation, make_request, prompt_of

from pagedkv.records import Explanation
from pagedkv.scheduler.decision_log import MAX_FINISHED, MAX_PER_REQUEST, DecisionLog


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
        "block 0 is not",
        "step 3: ends: length, 3 tokens generated, preempted 0 times",
    ]


def test_the_block_at_which_the_prefix_was_missed_is_named() -> None:
    simulation = Simulation()
    simulation.add(make_request("warm", prompt_of(9), 2))
    simulation.run_all()
    simulation.add(make_request("part", [*prompt_of(8), *prompt_of(8, 5)], 2))
    simulation.add(make_request("whole", prompt_of(9), 2))
    simulation.run_all()
    assert (
        "8 of its 16 tokens are in the prefix cache, block 2 is not" in why(simulation, "part").text
    )
    assert "8 of its 9 tokens are in the prefix cache\n" in why(simulation, "whole").text
    simulation = Simulation(enable_prefix_caching=False)
    simulation.add(make_request("off", prompt_of(9), 2))
    simulation.run_all()
    assert "0 of its 9 tokens are in the prefix cache, which is off" in why(simulation, "off").text


def test_a_wait_names_what_is_lacking_and_lasts_until_it_is_there() -> None:
    simulation = Simulation(num_blocks=12, max_num_seqs=2, watermark=0.0)
    simulation.add(make_request("holds", prompt_of(36), 8))
    simulation.step()
    simulation.add(make_request("large", prompt_of(20, 1), 2))
    simulation.run_all()
    explanation = why(simulation, "large")
    assert kinds(explanation) == ["queued", "waits", "admitted", "finished"]
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
