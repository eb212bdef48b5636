"""Blocks kept beyond the end of a request: found again while nobody needs them, given up before
anybody waits or is preempted for them.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "engine"))

from fake_model import make_engine, make_tokenizer_folder
from harness import answer

from pagedkv.engine import Engine
from pagedkv.records import RequestOutput
from pagedkv.sampling_params import SamplingParams


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer_folder(tmp_path_factory.mktemp("tokenizer"))


def params(num_tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, **options)


def finish(engine: Engine) -> dict[str, RequestOutput]:
    outputs: dict[str, RequestOutput] = {}
    while engine.has_work:
        outputs |= {one.request_id: one for one in engine.step().finished}
        engine.check_invariants()
    return outputs


def keep(engine: Engine, name: str, prompt: str, num_tokens: int = 4, **options: Any) -> None:
    engine.add(engine.make_request(name, prompt, params(num_tokens, **options), keeps_blocks=True))
    finish(engine)


def num_held(engine: Engine) -> int:
    return engine.statistics().num_referenced


@pytest.mark.parametrize("pipelined", [True, False])
def test_pinned_blocks_outlive_what_fills_the_pool(folder: Path, pipelined: bool) -> None:
    engine = make_engine(
        folder,
        num_gpu_blocks_override=16,
        block_size=4,
        watermark=0.0,
        async_scheduling=pipelined,
    )
    keep(engine, "kept", "abcdefgh")
    assert num_held(engine) == 3
    for number in range(8):  # 12 other blocks at a time
        engine.add_request(str(number), f"{number}" * 32, params(8))
        finish(engine)
    engine.add_request("again", "abcdefghX", params(1))
    assert finish(engine)["again"].num_cached_tokens == 8
    engine.unpin("kept")
    engine.unpin("kept")
    assert num_held(engine) == 0


def test_whoever_keeps_nothing_is_not_asked_how_much(folder: Path) -> None:
    engine = make_engine(folder)
    tables: list[int] = []

    class Asked:
        """Of the manager, what pins need before they pin."""

        def block_table(self, seq_id: int) -> Any:
            tables.append(seq_id)
            return engine._manager.block_table(seq_id)

        def __getattr__(self, name: str) -> Any:
            return getattr(engine._manager, name)

    engine._scheduler.pins._manager = Asked()  # type: ignore[assignment]
    engine.add_request("ends", "abcdefgh", params(4))
    finish(engine)
    assert tables == []
    keep(engine, "kept", "abcdefgh")
    assert len(tables) == 1


def test_running_requests_take_pinned_blocks_before_anybody_is_preempted(folder: Path) -> None:
    engine = make_engine(folder, num_gpu_blocks_override=16, block_size=4, watermark=0.0)
    keep(engine, "kept", "abcdefgh")
    for name in ("y", "z"):  # 8 blocks each in the end: all
        engine.add_request(name, name * 8, params(24))
    outputs = finish(engine)
    for name in ("y", "z"):
        right = answer(folder, name * 8, params(24))
        assert outputs[name].num_preemptions == 0
        assert outputs[name].outputs[0].token_ids == right.outputs[0].token_ids
    assert num_held(engine) == 0


def test_a_request_that_needs_the_whole_pool_does_not_wait_for_pins(folder: Path) -> None:
    engine = make_engine(folder, num_gpu_blocks_override=16, block_size=4, watermark=0.0)
    keep(engine, "kept", "abcdefgh")
    engine.add_request("large", "z" * 61, params(3))
    assert finish(engine)["large"].outputs[0].finish_reason == "length"
    assert num_held(engine) == 0


def test_pins_are_a_quarter_of_the_pool_at_most_and_the_oldest_go(folder: Path) -> None:
    engine = make_engine(folder, num_gpu_blocks_override=32, block_size=4)
    for number in range(6):
        keep(engine, str(number), f"{number}" * 8)  # 3 blocks each
        assert num_held(engine) == 3 * min(number + 1, 2)
    pins = engine._scheduler.pins
    assert pins.num_blocks == 6
    assert list(pins._held) == ["4", "5"]
    keep(engine, "too large", "x" * 40)
    assert list(pins._held) == ["4", "5"]
    keep(engine, "5", "a name anew"[:8])
    assert len(pins) == 2


def test_each_answer_of_a_group_is_pinned(folder: Path) -> None:
    engine = make_engine(folder, num_gpu_blocks_override=64, block_size=4)
    keep(engine, "kept", "abcdefgh", n=2)
    assert list(engine._scheduler.pins._held) == ["kept-0", "kept-1"]


def test_a_reset_of_the_prefix_cache_gives_pins_up(folder: Path) -> None:
    engine = make_engine(folder)
    keep(engine, "kept", "abcdefgh" * 4)
    assert num_held(engine) > 0
    engine.reset_prefix_cache()
    assert num_held(engine) == 0


def test_nothing_is_pinned_for_aborts_nor_where_it_was_not_asked_for(folder: Path) -> None:
    engine = make_engine(folder)
    engine.add(engine.make_request("a", "abcdefgh" * 4, params(9), keeps_blocks=True))
    engine.step()
    engine.abort("a")
    engine.add_request("b", "abcdefgh" * 4, params(9))
    finish(engine)
    assert num_held(engine) == 0


def test_nothing_is_pinned_in_a_run_that_is_recorded(folder: Path, tmp_path: Path) -> None:
    from pagedkv.replay import Recorder, load
    from pagedkv.replay.checking import first_difference

    engine = make_engine(folder)
    recorder = Recorder(tmp_path / "run.jsonl")
    engine.observe(recorder)
    keep(engine, "kept", "abcdefgh" * 4)
    assert num_held(engine) == 0
    recorder.close()
    assert first_difference(load(tmp_path / "run.jsonl")) is None
