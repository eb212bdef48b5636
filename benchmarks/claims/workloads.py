"""Requests of the claims: lengths drawn from stated distributions with stated seeds. Token ids are
random, so that nothing is shared unless it is meant to be.

ShareGPT-like and Alpaca-like: the PagedAttention paper gives means of 161.31 and 337.99 tokens
(prompt, output) for the one and 19.31 and 58.45 for the other (figure 11). Here lengths are
log-normal with these means and a stated sigma, rounded up, drawn again where prompt and output
together are longer than the context of 2,048. mixed256 is the mix of the throughput benchmark,
uniform from 100 to 1,024 each.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MAX_MODEL_LEN = 2048
VOCAB = 32_000


@dataclass(frozen=True, slots=True)
class Lengths:
    """Log-normal with this mean (before the cut at the context) and sigma of the logarithm."""

    prompt_mean: float
    prompt_sigma: float
    output_mean: float
    output_sigma: float

    def draw(self, source: random.Random) -> tuple[int, int]:
        while True:
            prompt = _log_normal(source, self.prompt_mean, self.prompt_sigma)
            output = _log_normal(source, self.output_mean, self.output_sigma)
            if prompt + output <= MAX_MODEL_LEN:
                return prompt, output


def _log_normal(source: random.Random, mean: float, sigma: float) -> int:
    return math.ceil(source.lognormvariate(math.log(mean) - sigma**2 / 2, sigma))


LENGTHS = {
    "ShareGPT-like": Lengths(161.31, 1.2, 337.99, 0.9),
    "Alpaca-like": Lengths(19.31, 0.7, 58.45, 0.9),
}
WORKLOADS = (*LENGTHS, "mixed256")


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """One request: prompt int32 [prompt_len], tokens of output that it gets, when it comes, and how
    many answers it wants: n of them, or a beam search of beam_width.
    """

    time_s: float
    prompt: NDArray[np.int32]
    output_len: int
    n: int = 1
    beam_width: int | None = None


def lengths_of(workload: str, count: int, seed: int = 0) -> list[tuple[int, int]]:
    """(prompt, output) of count requests. mixed256 repeats its 256."""
    if workload == "mixed256":
        once = _mixed256()
        return [once[i % len(once)] for i in range(count)]
    if workload not in LENGTHS:
        raise ValueError(f"workload must be one of {', '.join(WORKLOADS)}, got {workload!r}")
    source = random.Random(seed)
    return [LENGTHS[workload].draw(source) for _ in range(count)]


def _mixed256() -> list[tuple[int, int]]:
    """As bench_throughput.py draws it: each prompt's length, then its tokens, then all outputs."""
    source = random.Random(0)
    prompts = []
    for _ in range(256):
        prompts.append(source.randint(100, 1024))
        for _ in range(prompts[-1]):
            source.randint(0, 10000)
    return [(length, source.randint(100, 1024)) for length in prompts]


def jobs_of(workload: str, count: int, *, rate: float | None = None, seed: int = 0) -> list[Job]:
    """rate: requests a second of a Poisson process; None: all are there from the beginning."""
    tokens, arrivals = np.random.default_rng(seed), random.Random(f"arrivals {seed}")
    made, now_s = [], 0.0
    for prompt_len, output_len in lengths_of(workload, count, seed):
        prompt = tokens.integers(0, VOCAB, prompt_len, dtype=np.int32)
        made.append(Job(now_s, prompt, output_len))
        if rate is not None:
            now_s += arrivals.expovariate(rate)
    return made
