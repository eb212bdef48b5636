"""Blocks under the scheduler: prefixes, failures and aborts never mix up a block's content."""

from __future__ import annotations

import pytest
from simulation import VOCAB, Simulation, make_request, prompt_of, solo


@pytest.mark.parametrize("num_full_blocks", [1, 2, 3])
@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_a_fully_cached_prompt_still_computes_its_last_token(
    num_full_blocks: int, chunk: int
) -> None:
    simulation = Simulation(max_num_seqs=1, max_num_batched_tokens=chunk)
    prompt = prompt_of(4 * num_full_blocks)
    for name in ("first", "second"):
        simulation.add(make_request(name, prompt, 6))
        simulation.run_all()
    assert simulation.finished["second"].num_cached_tokens == 4 * (num_full_blocks - 1)
    simulation.check_outcome()


def test_a_block_used_anew_is_not_found_under_its_old_content() -> None:
    simulation = Simulation(num_blocks=4)
    old, new = prompt_of(15, 1), prompt_of(15, 2)
    for name, prompt in (("old", old), ("new", new), ("old again", old)):
        simulation.add(make_request(name, prompt, 2))
        simulation.run_all()
        assert simulation.finished[name].num_cached_tokens == 0
    simulation.check_outcome()


def test_blocks_used_anew_after_a_cache_reset_hold_their_new_content() -> None:
    simulation = Simulation(num_blocks=8)
    for round_ in range(4):
        for kind in ("a", "b"):
            request = make_request(f"{kind}{round_}", prompt_of(20, round_ % 2), 4)
            simulation.add(request)
            simulation.run_all()
        simulation.manager.reset_prefix_cache()
        simulation.check()
    assert simulation.finished["b2"].num_cached_tokens == 16
    assert simulation.finished["a2"].num_cached_tokens == 0
    simulation.check_outcome()


def test_many_requests_with_one_prefix_survive_a_tiny_pool() -> None:
    simulation = Simulation(num_blocks=12, max_num_seqs=6, max_num_batched_tokens=9)
    prefix = prompt_of(11)
    for i in range(512):
        simulation.add(make_request(str(i), prefix + prompt_of(i % 5, i), 12))
    simulation.run_all()
    assert simulation.num_preempted > 0
    simulation.check_outcome()


def test_as_many_requests_as_the_pool_just_cannot_hold_wait_for_each_other() -> None:
    prefix = prompt_of(32)
    simulation = Simulation(
        num_blocks=8 + 256, max_num_seqs=256, max_num_batched_tokens=512, watermark=0.0
    )
    simulation.add(make_request("warm", prefix, 1))
    simulation.run_all()
    for i in range(256):
        simulation.add(make_request(str(i), [*prefix, i % VOCAB], 6))
    simulation.run_all()
    simulation.check_outcome()


@pytest.mark.parametrize("chunk", [4, 7, 64])
def test_equal_cold_prompts_in_one_step_all_get_their_answer(chunk: int) -> None:
    simulation = Simulation(max_num_seqs=4, max_num_batched_tokens=chunk)
    for i in range(6):
        simulation.add(make_request(str(i), prompt_of(21), 8))
    simulation.run_all()
    simulation.check_outcome()


def test_a_prompt_is_not_found_before_its_step_has_ended() -> None:
    simulation = Simulation(max_num_batched_tokens=64)
    simulation.add(make_request("first", prompt_of(21), 8))
    step = simulation.schedule()
    assert step is not None
    assert simulation.manager.match(prompt_of(21)) == 0
    simulation.update(step, simulation.run(step))
    assert simulation.manager.match(prompt_of(21)) == 20


def test_a_failed_step_publishes_nothing_and_frees_everything() -> None:
    simulation = Simulation(max_num_batched_tokens=16, max_num_seqs=4)
    simulation.add(make_request("a", prompt_of(30), 8))
    for _ in range(2):  # two chunks; the second fails
        step = simulation.schedule()
        assert step is not None
        token_ids = simulation.run(step)
        if simulation.num_steps == 2:
            simulation.fail(step)
        else:
            simulation.update(step, token_ids)
    assert simulation.finished["a"].reason == "error"
    assert simulation.finished["a"].error == "injected"
    assert simulation.manager.match(prompt_of(30)) == 16  # the first chunk, no more
    simulation.add(make_request("b", prompt_of(30), 8))
    simulation.run_all()
    simulation.check_outcome()


@pytest.mark.parametrize("num_chunks", range(1, 8))
@pytest.mark.parametrize("way", ["abort", "preemption"])
def test_a_prompt_stopped_after_any_chunk_leaves_a_whole_pool_and_true_content(
    num_chunks: int, way: str
) -> None:
    simulation = Simulation(
        num_blocks=16, max_num_seqs=2, max_num_batched_tokens=6, scheduling_policy="priority"
    )
    simulation.add(make_request("gone", prompt_of(40), 4, priority=1))
    for _ in range(num_chunks):
        simulation.step()
    if way == "abort":
        simulation.abort("gone")
    else:
        simulation.add(make_request("urgent", prompt_of(50, 3), 4))
        simulation.step()
        assert simulation.num_preempted == 1
    for i in range(3):  # churn
        simulation.add(make_request(f"churn{i}", prompt_of(30, i + 7), 3))
    simulation.add(make_request("again", prompt_of(40), 4))
    simulation.run_all()
    simulation.check_outcome()


def test_a_twin_may_end_and_others_allocate_while_the_first_decodes() -> None:
    simulation = Simulation(num_blocks=20, max_num_seqs=4)
    simulation.add(make_request("a", prompt_of(13), 40))
    simulation.add(make_request("twin", prompt_of(13), 3))
    for i in range(8):
        simulation.add(make_request(f"c{i}", prompt_of(9 + i, i + 1), 5))
    simulation.run_all()
    simulation.check_outcome()


def test_warm_and_cold_prompts_in_one_step_keep_their_own_tables() -> None:
    simulation = Simulation(max_num_batched_tokens=64)
    simulation.add(make_request("warm-up", prompt_of(24), 1))
    simulation.run_all()
    simulation.add(make_request("warm", [*prompt_of(24), 1], 8))
    simulation.add(make_request("cold", prompt_of(24, 9), 8))
    simulation.run_all()
    assert simulation.finished["warm"].num_cached_tokens == 24
    assert simulation.finished["cold"].num_cached_tokens == 0
    simulation.check_outcome()


def test_the_fake_model_sees_every_token() -> None:
    one = solo(make_request("x", [1, 2, 3], 8))
    assert one != solo(make_request("x", [1, 3, 2], 8))
    assert one != solo(make_request("x", [0, 2, 3], 8))
    assert len(set(one)) > 3
