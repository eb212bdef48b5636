"""What an observer of a run is told, in which order, and by whose clock."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from fake_model import load_fake, make_engine
from harness import GREEDY, fake_of, run

from pagedkv.config import EngineConfig
from pagedkv.engine import Engine
from pagedkv.sampling_params import SamplingParams


class Listening:
    """Writes down every call: (name, arguments)."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self.calls.append((name, args))

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.calls]

    def of(self, name: str) -> list[tuple[Any, ...]]:
        return [args for one, args in self.calls if one == name]


def watched(folder: Path, **options: Any) -> tuple[Engine, Listening]:
    """An engine whose clock counts its readings: 0, 1, 2, ..."""
    config = EngineConfig.from_options("fake", **options)
    ticks = itertools.count()
    engine = Engine(load_fake(folder, config), config, clock=lambda: float(next(ticks)))
    listening = Listening()
    engine.observe(listening)
    return engine, listening


def test_a_run_is_told_in_its_order_with_times_of_the_given_clock(tokenizer_folder: Path) -> None:
    engine, listening = watched(tokenizer_folder, num_gpu_blocks_override=40)
    engine.add_request("a", "hello", SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    run(engine)
    assert listening.names == [
        *("begins", "noted", "added"),
        *("noted", "sampled", "step_ended"),
        *("sampled", "noted", "step_ended"),
    ]
    ((config, facts, begin_s),) = listening.of("begins")
    assert config.cache.num_gpu_blocks_override == facts.num_blocks == 40
    assert (facts.model, facts.dtype, facts.bytes_per_token) == ("fake", "float32", 8)
    ((request, added_s),) = listening.of("added")
    assert request.request_id == "a"
    times = [begin_s, added_s]
    for _, stopped, _, begin, end in listening.of("step_ended"):
        assert stopped == []
        times += [begin, end]
    assert times == sorted(set(times))
    assert [args[1] for args in listening.of("noted")] == ["queued", "admitted", "finished"]


def test_ends_from_outside_forks_and_resets_are_told(tokenizer_folder: Path) -> None:
    engine, listening = watched(tokenizer_folder)
    engine.add_request("a", "hello", GREEDY)
    for _ in range(3):
        engine.step()
    engine.fork("a", 2)
    engine.abort("a-1")
    assert engine.abort("nobody") is None
    engine.reset_prefix_cache()
    run(engine)
    assert listening.of("forked")[0][:3] == ("a", ["a-1", "a-2"], 3)
    assert [args[0] for args in listening.of("aborted")] == ["a-1"]
    assert len(listening.of("cache_reset")) == 1


def test_a_stop_string_is_told_with_the_step_that_completed_it(tokenizer_folder: Path) -> None:
    engine, listening = watched(tokenizer_folder)
    whole = fake_text(tokenizer_folder, "hello")
    stopping = SamplingParams(temperature=0, max_tokens=24, stop=[whole[3:6]])
    engine.add_request("a", "hello", stopping)
    run(engine)
    assert [args[1] for args in listening.of("step_ended")][-2:] == [[], ["a"]]


def fake_text(folder: Path, prompt: str) -> str:
    engine = make_engine(folder)
    engine.add_request("a", prompt, GREEDY)
    return run(engine)[0]["a"].outputs[0].text


@pytest.mark.parametrize("error", [ValueError("broken"), KeyboardInterrupt()])
def test_a_failed_step_is_told_with_its_reason(
    tokenizer_folder: Path, error: BaseException
) -> None:
    engine, listening = watched(tokenizer_folder)

    def fail(_: object) -> None:
        raise error

    fake_of(engine).before_step = fail
    engine.add_request("a", "hello", GREEDY)
    if isinstance(error, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    else:
        assert engine.step().finished[0].error == "the step failed: ValueError: broken"
    assert listening.names[-3:] == ["step_failed", "noted", "step_ended"]
    text = listening.of("step_failed")[0][3]
    assert text in ("interrupted", "the step failed: ValueError: broken")


def test_an_observer_comes_before_the_first_request_and_alone(tokenizer_folder: Path) -> None:
    engine, _ = watched(tokenizer_folder)
    with pytest.raises(RuntimeError, match="one observer, from before its first request"):
        engine.observe(Listening())
    late = make_engine(tokenizer_folder)
    late.add_request("a", "hello", GREEDY)
    with pytest.raises(RuntimeError, match="before its first request"):
        late.observe(Listening())
