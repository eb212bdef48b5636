"""Recording and replaying: what a recorded step costs the CPU, what a replayed one costs, and how
well step times fitted to a recorded run of SmolLM2 predict the steps that the fit has not seen.

The model's steps are timed in CPU seconds of the process, so that neighbours on the machine count
as little as possible; requests come at given steps, so that a second run does exactly the same, and
says how far the machine is from repeating itself. Of every four runs of 8 consecutive steps one is
held out.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import rows
from pagedkv import SamplingParams
from pagedkv.config import CacheConfig, EngineConfig, SchedulerConfig
from pagedkv.engine import Engine
from pagedkv.engine.loading import LoadedModel, load
from pagedkv.engine.observer import NoObserver, RunObserver
from pagedkv.records import RunFacts
from pagedkv.replay import Recorder, Recording, compare, settings_of
from pagedkv.replay import load as load_recording
from pagedkv.request import Request
from pagedkv.scheduler import Rates, build_scheduler

MAX_ERROR = 0.10
FACTS = RunFacts("none", "bfloat16", 1, 1, 64, 256, 2048, 40_000, 0)
MIXES: dict[str, dict[str, Any]] = {
    "a pool of 120 blocks, recompute": {"num_gpu_blocks_override": 120, "max_num_seqs": 32},
    "a pool of 90 blocks, swap": {
        "num_gpu_blocks_override": 90,
        "max_num_seqs": 16,
        "swap_space": 0.05,
        "preemption_mode": "swap",
    },
}


def observed_steps(
    observer: RunObserver | NoObserver, num_seqs: int, num_steps: int
) -> list[float]:
    """Microseconds that an observer takes of each decode step of num_seqs sequences."""
    config = SchedulerConfig(max_num_seqs=num_seqs, max_num_batched_tokens=num_seqs * 128)
    manager, scheduler = build_scheduler(CacheConfig(), config, FACTS)
    rng = np.random.default_rng(0)
    if not isinstance(observer, NoObserver):
        engine_config = EngineConfig("none", scheduler=config)
        observer.begins(engine_config, FACTS, 0.0)
    for i in range(num_seqs):
        prompt = rng.integers(0, 50_000, 100).astype(np.int32)
        request = Request(str(i), prompt, max_tokens=1000)
        scheduler.add(request)
        observer.added(request, 0.0)
    taken = []
    for _ in range(num_steps):
        step = scheduler.schedule()
        assert step is not None
        token_ids = rng.integers(0, 50_000, step.sample_rows.size)
        failed = np.zeros(token_ids.size, dtype=np.bool_)
        begin = time.perf_counter()
        observer.sampled(step, scheduler.slots, Rates(), token_ids, failed, None)
        middle = time.perf_counter()
        ended = scheduler.update(step, token_ids, failed)
        after = time.perf_counter()
        observer.step_ended(manager, [], ended, 0.0, 1.0)
        taken.append((middle - begin + time.perf_counter() - after) * 1e6)
    return taken[num_steps // 4 :]


def recorder_rows(folder: Path) -> list[rows.Row]:
    made = []
    for name, observer, limit in (
        ("no recorder", NoObserver(), 5.0),
        ("recorder", Recorder(folder / "pseudonyms"), 4000.0),
        ("recorder, token ids", Recorder(folder / "ids", keep_token_ids=True), 4000.0),
    ):
        taken = observed_steps(observer, 256, 80)
        us = min(taken)  # the quietest: what is above it is the machine's
        made.append(
            rows.Row(
                name,
                "256 decode rows",
                us,
                rate=f"median {statistics.median(taken):.0f} us",
                limit=f"<= {limit:g} us",
                holds=us <= limit,
            )
        )
    return made


def record_run(loaded: LoadedModel, path: Path, seed: int, options: dict[str, Any]) -> None:
    """36 requests of 4 to 450 tokens, some with shared beginnings, one after the other."""
    config = EngineConfig.from_options(
        "smollm2", max_model_len=1024, max_num_batched_tokens=256, **options
    )
    engine = Engine(
        dataclasses.replace(loaded, max_model_len=1024), config, clock=time.process_time
    )
    engine.observe(Recorder(path))
    rng = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(3, 40_000) for _ in range(count)]

    shared = [tokens(rng.randint(16, 200)) for _ in range(4)]
    arrivals, at_step = [], 0
    for i in range(36):
        at_step += rng.randint(0, 5)
        prompt = (rng.choice(shared) if rng.random() < 0.5 else []) + tokens(rng.randint(4, 250))
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=rng.randint(4, 60))
        arrivals.append((at_step, str(i), prompt, params))
    num_steps = 0
    while arrivals or engine.has_work:
        while arrivals and (arrivals[0][0] <= num_steps or not engine.has_work):
            _, name, prompt, params = arrivals.pop(0)
            engine.add_request(name, prompt, params)
        engine.step()
        num_steps += 1


def noise_between(one: Recording, other: Recording) -> float:
    """Mean relative difference of the same steps in two runs: no model of times can be nearer to
    both than half of it.
    """
    assert [a.work for a in one.steps] == [b.work for b in other.steps]
    pairs = [(a.seconds, b.seconds) for a, b in zip(one.steps, other.steps, strict=True)]
    return statistics.mean(abs(a - b) * 2 / (a + b) for a, b in pairs)


def replay_rows(folder: Path) -> list[rows.Row]:
    made = []
    loaded = load(EngineConfig.from_options("smollm2"))
    for seed, (mix, options) in enumerate(MIXES.items()):
        paths = [folder / f"run-{seed}", folder / f"again-{seed}"]
        for path in paths:
            record_run(loaded, path, seed, options)
        recording, again = map(load_recording, paths)
        noise = noise_between(recording, again)
        begin = time.perf_counter()
        comparison = compare(recording, settings_of(recording))
        seconds = time.perf_counter() - begin
        num_steps = len(recording.steps)
        assert comparison.difference is None, comparison.difference
        made.append(
            rows.Row(
                "replay, check and model",
                f"{num_steps} steps, {mix}",
                seconds / (2 * num_steps) * 1e6,
                rate=f"{recording.steps[-1].end_s / seconds * 2:.0f} x real time",
            )
        )
        error = comparison.times.error
        median_us = statistics.median(step.seconds for step in recording.steps) * 1e6
        made.append(
            rows.Row(
                "step times, held out",
                f"{error.num_steps} of {num_steps} steps, {mix}",
                median_us,
                rate=f"error: mean {error.mean:.1%}, median {error.median:.1%}, of the sum "
                f"{error.total:+.1%}; two equal runs: {noise:.1%}",
                limit=f"mean <= {MAX_ERROR:.0%}",
                holds=error.mean <= MAX_ERROR,
            )
        )
    return made


def main() -> int:
    options = rows.parser(__doc__.splitlines()[0]).parse_args()
    with tempfile.TemporaryDirectory() as name:
        made = [*recorder_rows(Path(name)), *replay_rows(Path(name))]
    return rows.report("replay", made, save=options.save)


if __name__ == "__main__":
    sys.exit(main())
