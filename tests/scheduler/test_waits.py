"""Whoever does not run is told why, in every state that a request can be in: behind others in the
queue, left out of a step, forked. (Simulations check it of every request in every step.)
"""

from __future__ import annotations

from simulation import Simulation, make_request, prompt_of
from test_decision_log import kinds, why

from pagedkv.scheduler.decision_log import DecisionLog


def test_those_behind_others_wait_their_turn_from_their_arrival_on() -> None:
    simulation = Simulation(max_num_seqs=1)
    for name in "abc":
        simulation.add(make_request(name, prompt_of(5, ord(name)), 4))
    for _ in range(3):
        simulation.step()
    assert why(simulation, "c").decisions[-1].text == "waits its turn behind those before it"
    assert why(simulation, "c").decisions[-1].last_step == 3
    simulation.run_all()
    assert kinds(why(simulation, "b")) == ["queued", "waits", "admitted", "finished"]
    text = why(simulation, "c").text
    assert "steps 1 to 4: waits its turn behind those before it" in text
    assert "steps 5 to 8: waits for one of 1 slot (max_num_seqs)" in text


def test_a_wait_lasts_while_nobody_looks_again_and_what_runs_sits_out_step_by_step() -> None:
    log = DecisionLog()
    request = make_request("a", [1], 1)
    for step, lacks in ((1, "slot"), (5, "slot"), (9, "room")):
        log.step = step
        log.note(request, "waits", lacks=lacks, max_num_seqs=1)
    log.step = 12
    steps = [(one.step, one.last_step) for one in log.explain("a")[0].decisions]
    assert steps == [(1, 8), (9, 12)]
    runs = make_request("b", [1], 1)
    for step in (1, 2, 5):
        log.step = step
        log.note(runs, "waits", lacks="beams")
    assert log.sitting_out == {"b": None}
    log.step = 12
    steps = [(one.step, one.last_step) for one in log.explain("b")[0].decisions]
    assert steps == [(1, 2), (5, 5)]
    assert log.sitting_out == {}


def test_a_prompt_in_progress_without_a_share_of_the_tokens_sits_out() -> None:
    # Behind a window of 8 a prompt gets 7 tokens a step, so that several are in progress at once.
    simulation = Simulation(window=8, max_num_batched_tokens=16, enable_prefix_caching=False)
    simulation.add(make_request("x", prompt_of(4), 20))
    simulation.step()
    for name in "abc":
        simulation.add(make_request(name, prompt_of(30, ord(name)), 2))
    simulation.step()
    assert simulation.scheduler.num_running == 4
    simulation.fork("x", 3)
    simulation.step()
    last = why(simulation, "c").decisions[-1]
    assert last.text == "sits out, the step's 16 tokens are used up (max_num_batched_tokens)"
    assert (last.step, last.last_step) == (3, 3)
    simulation.run_all()
    simulation.check_outcome()


def test_who_waits_for_launched_steps_sits_out_and_nobody_starts() -> None:
    simulation = Simulation(num_blocks=6, block_size=1, max_num_seqs=3, enable_prefix_caching=False)
    for name, length in (("a", 2), ("b", 1), ("c", 2)):
        simulation.add(make_request(name, prompt_of(length, ord(name)), 3))
    simulation.step()
    simulation.add(make_request("d", prompt_of(1, 9), 2))
    simulation.launched.launch()
    simulation.abort("c")  # its blocks drain beside the launched step
    simulation.add(make_request("e", prompt_of(1, 8), 2))
    step = simulation.schedule()
    assert step is not None
    assert step.preempted == ()
    assert why(simulation, "b").decisions[-1].text == (
        "sits out: the step needs 2 blocks, 1 can be taken, and what launched steps hold back will "
        "be enough"
    )
    assert why(simulation, "d").decisions[-1].text == (
        "waits, as nobody starts while running requests lack blocks"
    )
    assert why(simulation, "e").decisions[-1].text == "waits its turn behind those before it"


def test_a_fork_is_told_what_it_was_made_from_and_whether_it_waits() -> None:
    simulation = Simulation(max_num_seqs=2)
    simulation.add(make_request("a", prompt_of(5), 9))
    simulation.step()
    simulation.fork("a", 2)
    assert (
        why(simulation, "a-1").text == "step 1: forked from 'a' with 6 tokens, and runs beside it"
    )
    assert (
        why(simulation, "a-2").text == "step 1: forked from 'a' with 6 tokens, and waits for a slot"
    )
    simulation.step()
    assert kinds(why(simulation, "a-1")) == ["forked"]
    assert kinds(why(simulation, "a-2")) == ["forked", "waits"]
    simulation.run_all()
    simulation.add(make_request("group", prompt_of(5, 1), 3, n=3))
    simulation.run_all()
    found = simulation.scheduler.log.explain("group")
    assert [kinds(one)[0] for one in found] == ["queued", "forked", "forked"]
    assert "forked from 'group-0' with 5 tokens, and runs beside it" in found[1].text
    assert "forked from 'group-0' with 6 tokens, and waits for a slot" in found[2].text
