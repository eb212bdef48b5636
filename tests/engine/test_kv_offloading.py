"""Offloading through the engine: real tensors move out and back, and the answers stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fake_model import make_engine
from harness import answer, run

from pagedkv.engine import Engine
from pagedkv.engine.rate_meter import RateMeter
from pagedkv.kv_cache import KVCache
from pagedkv.records import RequestOutput
from pagedkv.sampling_params import SamplingParams
from pagedkv.scheduler import Rates

ONE_BLOCK = 4 * 2 * 4 / 2**30  # GiB: 4 tokens, K and V, float32
PROMPTS = [f"{letter * 15} {i}" for i, letter in enumerate("abcdef")]  # 17 tokens: 4 full blocks
PARAMS = SamplingParams(temperature=0, max_tokens=3)


class CheapMoves(RateMeter):
    """Rates that do not depend on how busy this machine is, and how much was moved."""

    num_bytes = 0

    @property
    def rates(self) -> Rates:
        return Rates(link_bytes_per_s=1e12, prefill_tokens_per_s=1.0)

    def swapped(self, num_bytes: int, seconds: float) -> None:
        self.num_bytes += num_bytes


def make(folder: Path, **options: Any) -> Engine:
    engine = make_engine(
        folder,
        **{
            "block_size": 4,
            "num_gpu_blocks_override": 8,
            "swap_space": 16 * ONE_BLOCK * 1.001,
            "enable_kv_offloading": True,
            "watermark": 0.0,
            **options,
        },
    )
    engine._runner.meter = CheapMoves()
    return engine


def ask(engine: Engine, name: str, prompt: str) -> RequestOutput:
    engine.add_request(name, prompt, PARAMS)
    outputs, _ = run(engine)
    return outputs[name]


def test_a_working_set_three_times_the_pool_comes_back_from_the_cpu(tokenizer_folder: Path) -> None:
    engine = make(tokenizer_folder)
    solo = [answer(tokenizer_folder, prompt, PARAMS) for prompt in PROMPTS]
    for i in range(36):
        which = (i * 5 + i // 6) % 6
        output = ask(engine, str(i), PROMPTS[which])
        assert output.outputs == solo[which].outputs
    statistics = engine.statistics()
    assert statistics.prefix_cache_cpu_hits > 150
    assert statistics.num_cpu_free + statistics.num_cpu_cached_idle == 16
    num_moved = statistics.num_offloaded + statistics.num_onloaded
    meter = engine._runner.meter
    assert isinstance(meter, CheapMoves)
    assert meter.num_bytes == num_moved * 4 * 2 * 4  # the link's rate is measured on these too


@pytest.mark.parametrize("where", ["swap_out", "swap_in"])
def test_moves_that_fail_spoil_no_later_answer(tokenizer_folder: Path, where: str) -> None:
    engine = make(tokenizer_folder)
    solo = [answer(tokenizer_folder, prompt, PARAMS) for prompt in PROMPTS]
    cache, failed = engine._runner._kv_cache, []

    def broken(pairs: torch.Tensor) -> None:
        if not failed:
            failed.append(pairs.shape[0])
            raise RuntimeError("the link is down")
        getattr(KVCache, where)(cache, pairs)

    num_errors = 0
    for i in range(24):
        if i == 12:
            setattr(cache, where, broken)
        output = ask(engine, str(i), PROMPTS[i % 6])
        num_errors += output.error is not None
        if output.error is None:
            assert output.outputs == solo[i % 6].outputs
        else:
            assert "the link is down" in output.error
    assert num_errors == len(failed) == 1


def test_off_by_default_and_with_other_options_answers_stay(tokenizer_folder: Path) -> None:
    texts = {}
    for name, options in {
        "off": {"enable_kv_offloading": False},
        "on": {},
        "crowded": {"max_num_seqs": 3, "preemption_mode": "swap"},
        "small": {"swap_space": 3 * ONE_BLOCK * 1.001},
    }.items():
        engine = make(tokenizer_folder, **options)
        for i in range(18):
            params = SamplingParams(temperature=0, max_tokens=12)
            engine.add_request(str(i), PROMPTS[i * 5 % 6][: 9 + i % 8], params)
        outputs, _ = run(engine)
        texts[name] = [outputs[str(i)].outputs[0].text for i in range(18)]
        assert (engine.statistics().num_offloaded > 0) == (name != "off")
    assert texts["on"] == texts["off"] == texts["crowded"] == texts["small"]
