"""RunView: why those wait who run, which the queue alone does not tell; and that a look is free of
effects.
"""

from __future__ import annotations

from simulation import make_request, prompt_of
from test_urgent_prompts import a_long_prompt_in_progress, ended_well, shares

from pagedkv.scheduler import RunView


def test_a_running_prompt_that_is_passed_says_by_whom_until_it_goes_on() -> None:
    simulation = a_long_prompt_in_progress()
    view = RunView(simulation.manager, simulation.scheduler)
    _, queues, _ = view.take()
    assert (queues.running.tolist(), queues.reasons) == ([0], ())
    simulation.add(make_request("urgent", prompt_of(24, 1), 2, priority=0))
    assert shares(simulation) == {"urgent": 16}
    _, queues, _ = view.take()
    ((seq_id, why),) = queues.reasons
    assert seq_id == 0
    assert why.startswith("waits for a more urgent request's prompt: 'urgent' gets 16 of ")
    assert shares(simulation) == {"urgent": 8, "low": 8}
    _, queues, _ = view.take()
    assert queues.reasons == ((0, ""),)
    assert view.take()[1].reasons == ()
    ended_well(simulation)


def test_a_look_changes_nothing_and_tells_of_everyone_once() -> None:
    simulation = a_long_prompt_in_progress(max_num_seqs=1)
    simulation.add(make_request("later", prompt_of(8, 2), 2, priority=9))
    view = RunView(simulation.manager, simulation.scheduler)
    before = simulation.manager.snapshot()
    snapshot, queues, activity = view.take()
    assert [one.request_id for one in queues.first_seen] == ["low", "later"]
    assert queues.reasons == ((1, "waits its turn behind those before it"),)
    assert (activity.steps, activity.ended) == ((), ())
    assert snapshot.block_ids.tolist() == before.block_ids.tolist()
    assert view.take()[1].first_seen == ()
    ended_well(simulation)
    _, queues, _ = view.take()
    assert queues.running.size == queues.queued.size == 0
