"""Seeded runs of the scheduler on a fake model: random arrivals, lengths, pools, chunk sizes,
several answers to a prompt, forks, beams, aborts, failing steps, and blocks that come back late.
One seed again: python tests/scheduler/test_simulation.py SEED
"""

from __future__ import annotations

import dataclasses
import random
import subprocess
import sys
import time
from collections import Counter, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from simulation import GARBAGE, STOP_ID, VOCAB, Simulation, make_request

from pagedkv.records import ScheduledStep
from pagedkv.scheduler import Rates

SEEDS_PER_TEST = 250
NUM_SEEDS = 5000
AGAIN = "python tests/scheduler/test_simulation.py"


def random_simulation(
    rng: random.Random,
    window_rng: random.Random | None = None,
    kind: type[Simulation] = Simulation,
) -> Simulation:
    """window_rng: makes it one of a model with a sliding window."""
    block_size = rng.choice([1, 2, 4, 8])
    max_num_seqs = rng.randint(1, 12)
    max_model_len = rng.randint(8, 64)
    # Around one longest request: the pool is short for almost any two of them.
    size = rng.uniform(0.6, 1.6)
    window = 0
    if window_rng is not None:  # short even for one, of which it holds a part at a time
        window = window_rng.choice([1, window_rng.randint(2, 8), window_rng.randint(2, 24)])
        size = window_rng.uniform(0.2, 1.6)
    num_blocks = max(1, int(max_model_len / block_size * size))
    return kind(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + rng.choice([0, 1, 3, 8, 40]),
        max_model_len=max_model_len,
        enable_prefix_caching=rng.random() < 0.7,
        watermark=rng.choice([0.0, 0.0, 0.01, 0.3]),
        hash_bits=rng.choice([4, 128]),
        shuffle_seed=rng.randrange(2**32),
        scheduling_policy=rng.choice(["fcfs", "priority"]),
        priority_ageing_steps=rng.choice([1, 8, 64]),
        max_num_overtakes=rng.choice([0, 1, 4]),
        reserve_after_preemptions=rng.choice([1, 2, 5]),
        num_cpu_blocks=rng.choice([0, 1, 3, num_blocks, 4 * num_blocks]),
        preemption_mode=rng.choice(["auto", "swap", "swap", "recompute"]),
        window=window,
    )


def with_offloading(simulation: Simulation, rng: random.Random) -> Simulation:
    """Two in three of those that can have it, with moves that are cheap, or not."""
    has_it = simulation.num_cpu_blocks and simulation.enable_prefix_caching and rng.random() < 0.67
    if not has_it:
        return simulation
    made = dataclasses.replace(simulation, enable_kv_offloading=True)
    cost = rng.choice([0.01, 0.01, 0.5, 1.5, 4.0])
    made.scheduler.rates = Rates(
        link_bytes_per_s=1.0, prefill_tokens_per_s=cost * simulation.block_size
    )
    return made


def random_prompt(rng: random.Random, prefixes: list[list[int]], max_len: int) -> list[int]:
    prompt = list(rng.choice(prefixes)) if rng.random() < 0.6 else []
    prompt += [rng.randrange(VOCAB) for _ in range(rng.choice([2, rng.randint(1, 20)]))]
    return prompt[: rng.randint(1, max_len)]


def simulate(seed: int, kind: type[Simulation] = Simulation) -> Simulation:
    """kind: of the manager and the scheduler that are driven."""
    rng = random.Random(seed)
    window_rng = random.Random(f"window {seed}") if seed % 2 else None
    simulation = random_simulation(rng, window_rng, kind)
    simulation = with_offloading(simulation, random.Random(f"offloading {seed}"))
    prefixes = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 24))] for _ in range(2)]
    num_left, number = rng.randint(1, 14), 0
    max_num_launched = rng.choice([0, 0, 1, 2])
    progress = Progress(simulation)
    while num_left or simulation.scheduler.has_work:
        while num_left and (rng.random() < 0.4 or not simulation.scheduler.has_work):
            num_left -= 1
            number += 1
            prompt = random_prompt(rng, prefixes, simulation.max_model_len - 1)
            max_tokens = rng.randint(1, min(30, simulation.max_model_len - len(prompt)))
            stops = (STOP_ID, 11) if rng.random() < 0.3 else ()
            salt = rng.choice([None, None, "one", "two"])
            priority = rng.randint(-2, 2) if simulation.scheduling_policy == "priority" else 0
            request = make_request(
                f"r{number}",
                prompt,
                max_tokens,
                stops=stops,
                salt=salt,
                priority=priority,
                **random_answers(rng, simulation.max_num_seqs),
            )
            needed = simulation.most_blocks(len(prompt) + max_tokens - 1)
            if request.num_candidates and needed * request.num_forks > simulation.num_blocks:
                with pytest.raises(ValueError, match=f"need up to {needed * request.num_forks} b"):
                    simulation.add(request)
            elif needed > simulation.num_blocks:
                with pytest.raises(ValueError, match=f"need {needed} blocks"):
                    simulation.add(request)
            else:
                simulation.add(request)
        maybe_abort(rng, simulation)
        maybe_fork(rng, simulation)
        step = simulation.schedule()
        progress.look(step)
        if step is None:
            if simulation.scheduler.has_work:
                simulation.launched.end_oldest()
            continue
        while len(simulation.launched) < max_num_launched and rng.random() < 0.7:
            simulation.launched.launch()
        action = rng.random()
        if action < 0.04:
            if rng.random() < 0.5:  # otherwise it fails before anything has run, swaps included
                simulation.run(step, bad_rows=np.arange(step.slots.size))
            simulation.fail(step)
            continue
        row_failed = np.array([rng.random() < 0.02 for _ in step.slots], dtype=np.bool_)
        failed = row_failed[step.sample_rows]
        token_ids = simulation.run(step, bad_rows=step.sample_rows[failed])
        token_ids[failed] = GARBAGE
        if rng.random() < 0.05:
            maybe_abort(rng, simulation, always=True)  # while the step is in flight
        simulation.update(step, token_ids, failed)
        simulation.launched.end_some(rng)
    while len(simulation.launched):
        simulation.launched.end_oldest()
    return simulation


class Progress:
    """No three steps without progress while work is runnable: of any three in a row, one computes
    something that the step after them has not thrown away to let others grow. (What an urgent
    arrival displaces is another matter: there are only so many of those.)
    """

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._num_thrown_away: Counter[str] = Counter()
        self._rows: deque[dict[str, int]] = deque(maxlen=3)  # that count, of a step's requests
        self._num_steps = 0

    def look(self, step: ScheduledStep | None) -> None:
        self._num_steps += 1
        assert self._num_steps < 3000, "no end in sight"
        scheduler, thrown_away = self._simulation.scheduler, self._num_thrown_away
        if step is None:  # nothing is left, or nothing can run before a launched step has ended
            if not scheduler.has_work:
                self._rows.clear()
            return
        thrown_away.update(one.request_id for one in step.preempted if one.displaced_by is None)
        is_full = len(self._rows) == self._rows.maxlen
        assert not is_full or any(
            name not in scheduler or thrown_away[name] == count
            for rows in self._rows
            for name, count in rows.items()
        ), "three steps without progress"
        rows = [scheduler.request_at(slot) for slot in step.slots]
        names = [one.request_id for one in rows if one is not None]
        self._rows.append({name: thrown_away[name] for name in names})


def maybe_abort(rng: random.Random, simulation: Simulation, *, always: bool = False) -> None:
    unfinished = [
        name
        for name in (*simulation.requests, *simulation.scheduler._forking.groups)
        if name in simulation.scheduler
    ]
    if unfinished and (always or rng.random() < 0.03):
        simulation.abort(rng.choice(unfinished))


def random_answers(rng: random.Random, max_num_seqs: int) -> dict[str, Any]:
    """How many answers to a prompt, and how: mostly one."""
    kind = rng.random()
    if kind < 0.5:
        return {}
    if kind < 0.75 or max_num_seqs < 2:
        return {"n": rng.choice([2, 5])}
    width = rng.randint(2, min(4, max_num_seqs))
    return {
        "n": rng.randint(1, width),
        "beam_width": width,
        "length_penalty": rng.choice([0.0, 1.0, 2.0]),
        "early_stopping": rng.choice([True, False, "never"]),
    }


def maybe_fork(rng: random.Random, simulation: Simulation) -> None:
    names = [name for name, one in simulation.requests.items() if one.parent_id is None]
    names = [name for name in names if name in simulation.scheduler]
    if names and len(names) < 8 and rng.random() < 0.03:
        simulation.fork(rng.choice(names), rng.randint(1, 3))


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, SEEDS_PER_TEST))
def test_every_request_ends_with_its_solo_answer(first: int) -> None:
    for seed in range(first, first + SEEDS_PER_TEST):
        try:
            simulate(seed).check_outcome()
        except Exception as error:
            raise AssertionError(f"seed {seed} fails; again: {AGAIN} {seed}") from error


@pytest.mark.parametrize("seed", [6233, 6781, 7307])
def test_reserved_forks_are_not_preempted_when_their_windows_move_apart(seed: int) -> None:
    """They come back together while they share most of their windows."""
    simulation = simulate(seed)
    simulation.check_outcome()
    assert simulation.window
    assert any(one.num_preemptions for one in simulation.finished.values() if one.request.draw)


def test_the_seeds_reach_preemption_prefix_hits_and_every_end() -> None:
    reasons: set[str] = set()
    num_preempted = num_hits = num_copies = num_preempted_forks = num_swapped = 0
    num_searches = num_preempted_beams = num_held_back = num_beyond_the_pool = 0
    num_swapped_in_units = num_offloaded = num_cpu_hits = num_offload_drops = num_sat_out = 0
    for seed in range(160):
        simulation = simulate(seed)
        reasons |= {one.reason for one in simulation.finished.values()}
        num_preempted += simulation.num_preempted
        num_swapped += simulation.manager.statistics().num_swapped_in
        num_offloaded += simulation.manager.statistics().num_offloaded
        num_offload_drops += simulation.manager.statistics().num_offload_drops
        num_cpu_hits += simulation.manager.statistics().prefix_cache_cpu_hits
        num_swapped_in_units += simulation.num_swapped_in_units
        num_hits += simulation.manager.statistics().prefix_cache_hits
        num_copies += simulation.manager.statistics().num_copies
        num_preempted_forks += sum(
            one.num_preemptions for one in simulation.finished.values() if one.request.draw
        )
        num_held_back += simulation.launched.num_held_back
        num_sat_out += sum(
            decision.numbers.get("lacks") == "urgent"
            for name in simulation.finished
            for one in simulation.scheduler.log.explain(name)
            for decision in one.decisions
        )
        num_beyond_the_pool += sum(
            one.request.prompt_len + one.token_ids.size - 1
            > simulation.num_blocks * simulation.block_size
            for one in simulation.finished.values()
            if one.reason == "length"
        )
        searches = [one for one in simulation.finished.values() if one.request.num_candidates]
        num_searches += sum(one.reason in ("stop", "length") for one in searches)
        num_preempted_beams += sum(one.num_preemptions for one in searches)
    assert num_held_back > 200
    assert num_sat_out > 3
    assert num_beyond_the_pool > 10
    assert num_swapped_in_units > 20
    assert num_offloaded > 100
    assert num_offload_drops > 20
    assert num_cpu_hits > 40
    assert num_searches > 20
    assert num_preempted_beams > 10
    assert num_copies > 50
    assert num_preempted_forks > 20
    assert reasons == {"stop", "length", "abort", "error"}
    assert num_preempted > 50
    assert num_hits > 100
    assert num_swapped > 100


def test_the_same_seed_is_the_same_run() -> None:
    one, other = simulate(7), simulate(7)
    assert one.num_steps == other.num_steps
    for name, finished in one.finished.items():
        assert finished.token_ids.tolist() == other.finished[name].token_ids.tolist()


def test_a_failing_seed_says_so_and_one_command_runs_it_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = simulate(0)

    def broken(seed: int) -> Simulation:
        assert seed != 3
        return whole

    monkeypatch.setattr(sys.modules[__name__], "simulate", broken)
    with pytest.raises(AssertionError, match=rf"seed 3 fails; again: {AGAIN} 3$"):
        test_every_request_ends_with_its_solo_answer(0)
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, *AGAIN.split()[1:], "3"]
    run = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    assert run.stdout.startswith("seed 3: ")


def test_the_scheduler_asks_no_clock_but_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> float:
        raise AssertionError("the scheduler looked at a clock")

    for name in ("time", "monotonic", "perf_counter", "time_ns", "monotonic_ns", "perf_counter_ns"):
        monkeypatch.setattr(time, name, refuse)
    for seed in range(20):
        simulate(seed).check_outcome()


if __name__ == "__main__":
    one = simulate(int(sys.argv[1]))
    one.check_outcome()
    print(f"seed {sys.argv[1]}: {len(one.finished)} requests in {one.num_steps} steps, all well")
