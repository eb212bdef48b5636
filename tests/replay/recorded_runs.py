"""An engine on the fake model under a clock that each step moves by what it computes, recorded."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fake_model import load_fake
from harness import fake_of

from pagedkv.config import EngineConfig
from pagedkv.engine import Engine
from pagedkv.replay import Recorder, Recording, load
from pagedkv.sampling_params import SamplingParams

SMALL: dict[str, Any] = {
    "block_size": 4,
    "num_gpu_blocks_override": 30,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 24,
    "max_model_len": 96,
}


class Clock:
    """Seconds, moved by hand."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class RecordedRun:
    """engine, clock and recorder of one run; recording() ends it."""

    def __init__(
        self,
        folder: Path,
        path: Path,
        *,
        keep_token_ids: bool = False,
        window: int = 0,
        **options: Any,
    ) -> None:
        """window: what lies behind is freed; the fake reads whatever stands there then."""
        config = EngineConfig.from_options("fake", **(SMALL | options))
        self.clock = Clock()
        loaded = dataclasses.replace(load_fake(folder, config), window=window)
        self.engine = Engine(loaded, config, clock=self.clock)
        self.recorder = Recorder(path, keep_token_ids=keep_token_ids)
        self.engine.observe(self.recorder)
        fake_of(self.engine).before_step = self._pass_time

    def _pass_time(self, input_ids: torch.Tensor) -> None:
        self.clock.now_s += 0.004 + 0.0005 * input_ids.numel()

    def finish(self) -> None:
        while self.engine.has_work:
            self.engine.step()
            self.engine.check_invariants()

    def recording(self) -> Recording:
        self.finish()
        self.recorder.close()
        return load(self.recorder.path)


def random_params(rng: random.Random, max_num_seqs: int) -> SamplingParams:
    max_tokens = rng.randint(1, 30)
    kind = rng.choice(["plain", "plain", "plain", "stop", "group", "best", "beams"])
    if kind == "beams":
        width = rng.randint(2, min(3, max_num_seqs))
        return SamplingParams(
            temperature=0, max_tokens=min(max_tokens, 8), beam_width=width, n=rng.randint(1, width)
        )
    options: dict[str, Any] = {
        "plain": {},
        "stop": {"stop": ["e", "q"], "stop_token_ids": [97, 256]},
        "group": {"n": rng.randint(2, 4)},
        "best": {"n": 1, "best_of": 3},
    }[kind]
    return SamplingParams(
        temperature=1.0,
        seed=rng.randrange(1000),
        max_tokens=max_tokens,
        ignore_eos=rng.random() < 0.5,
        **options,
    )


def random_run(run: RecordedRun, seed: int, *, num_requests: int = 12) -> None:
    """Arrivals, aborts, forks, resets, failing steps and NaN rows at random moments."""
    rng = random.Random(seed)
    engine, fake = run.engine, fake_of(run.engine)
    policy = run.engine._config.scheduler.scheduling_policy
    prefixes = [bytes(rng.choices(range(97, 123), k=n)).decode() for n in (0, 9, 18)]
    is_bad = {rng.randrange(40) for _ in range(2)}
    num_contexts = 0

    def bad(context: np.ndarray) -> bool:
        nonlocal num_contexts
        num_contexts += 1
        return num_contexts in is_bad

    fake.is_bad = bad
    alive: list[str] = []
    number = 0
    while number < num_requests or engine.has_work:
        if number < num_requests and (rng.random() < 0.4 or not engine.has_work):
            number += 1
            prompt = (
                rng.choice(prefixes)
                + bytes(rng.choices(range(97, 123), k=rng.randint(1, 30))).decode()
            )
            with contextlib.suppress(ValueError):  # beams that do not fit into the pool
                engine.add_request(
                    f"r{number}",
                    prompt,
                    random_params(rng, 4),
                    cache_salt=rng.choice([None, None, "tenant"]),
                    priority=rng.randint(-2, 2) if policy == "priority" else 0,
                )
                alive.append(f"r{number}")
            run.clock.now_s += rng.choice([0.0, 0.003, 0.2])
            continue
        if alive and rng.random() < 0.05:
            engine.abort(alive.pop(rng.randrange(len(alive))))
        if alive and rng.random() < 0.08:
            other = SamplingParams(temperature=0.7, max_tokens=rng.randint(2, 40))
            with contextlib.suppress(ValueError):  # one that has ended, or a group, or too short
                alive += engine.fork(
                    rng.choice(alive), rng.randint(1, 2), rng.choice([None, other])
                )
        if rng.random() < 0.02:
            engine.reset_prefix_cache()
        if rng.random() < 0.02:
            _fail_next(run)
        engine.step()
        engine.check_invariants()


def _fail_next(run: RecordedRun) -> None:
    fake = fake_of(run.engine)
    before = fake.before_step

    def fail(input_ids: torch.Tensor) -> None:
        before(input_ids)
        fake.before_step = before
        raise ValueError("injected")

    fake.before_step = fail
