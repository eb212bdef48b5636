"""Time to first token against the length of a prefix that is cached or not: SmolLM2-135M on a CPU,
in CPU seconds of the process, 32 tokens behind the prefix. The first request computes the prefix,
the second finds it; the better of two pairs. Nothing else runs.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import torch

from claims.figures import axes
from claims.tables import value
from pagedkv.config import EngineConfig
from pagedkv.engine import Engine
from pagedkv.engine.loading import LoadedModel, load
from pagedkv.sampling_params import SamplingParams
from rows import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LENGTHS = (64, 128, 256, 512, 1024, 1536)
OWN_LEN = 32
OPTIONS = {"device": "cpu", "num_gpu_blocks_override": 400, "max_num_batched_tokens": 2048}


def measure(*, quick: bool) -> list[Row]:
    torch.set_num_threads(1)
    config = EngineConfig.from_options("smollm2", max_model_len=2048, **OPTIONS)
    return rows_of(load(config), config, LENGTHS[:2] if quick else LENGTHS)


def rows_of(loaded: LoadedModel, config: EngineConfig, lengths: tuple[int, ...]) -> list[Row]:
    """x baseline: the time without the cached prefix over the one with it."""
    engine = Engine(loaded, config, clock=time.process_time)
    first_token_s(engine, prompt_of(loaded, 16, 0))  # warm-up
    made = []
    for length in lengths:
        pairs = []
        for seed in (1, 2):
            prompts = [prompt_of(loaded, length, seed, own) for own in (1, 2)]
            pairs.append([first_token_s(engine, prompt) for prompt in prompts])
        (cold, _), (warm, found) = (min(column) for column in zip(*pairs, strict=True))
        made.append(
            Row(
                "SmolLM2-135M, CPU",
                f"prefix of {length} tokens + {OWN_LEN}",
                warm * 1e6,
                f"first token after {1e3 * cold:.1f} ms without, {1e3 * warm:.1f} ms with the "
                f"cached prefix; {found} tokens found",
                baseline=cold / warm,
            )
        )
    return made


def prompt_of(loaded: LoadedModel, length: int, seed: int, own: int = 0) -> list[int]:
    """A prefix of its own for each length and seed, and 32 tokens behind it for each own."""
    high = loaded.vocab_size
    prefix = np.random.default_rng((length, seed)).integers(100, high, length).tolist()
    return prefix + np.random.default_rng((length, seed, own)).integers(100, high, OWN_LEN).tolist()


def first_token_s(engine: Engine, prompt: list[int]) -> tuple[float, int]:
    """Seconds to the first token, and how many tokens the prefix cache had."""
    begin = time.process_time()
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    engine.add_request("one", prompt, params)
    finished = []
    while engine.has_work:
        finished += engine.step().finished
    return time.process_time() - begin, finished[0].num_cached_tokens


def draw(table: list[Row]) -> Figure:
    figure, (panel,) = axes(1, 1, size=(5, 3.2))
    lengths = [float(row.shape.split()[2]) for row in table]
    for word, label, color in (
        ("without", "computed", "#c8553d"),
        ("with the cached prefix", "found in the prefix cache", "#0b6e4f"),
    ):
        values = [value(row, word) for row in table]
        panel.plot(lengths, values, marker="o", markersize=3, color=color, label=label)
    panel.set_xlabel("tokens of the prefix")
    panel.set_ylabel("ms to the first token")
    panel.set_ylim(bottom=0)
    panel.legend(fontsize=8)
    return figure
