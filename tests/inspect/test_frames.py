"""Frames: what a client knows by them is what the manager and the scheduler have, at every look;
and a frame holds only what has changed.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_model import make_engine
from frame_reader import FrameReader, unpacked

from pagedkv.block_manager import BlockManager
from pagedkv.config import SchedulerConfig
from pagedkv.engine import Engine
from pagedkv.inspect.frames import MAX_EVENTS, MAX_STEPS, FrameEncoder
from pagedkv.request import Request
from pagedkv.sampling_params import SamplingParams
from pagedkv.scheduler import RunView, Scheduler

from recorded_runs import RecordedRun, random_run  # isort: skip - of the replay's tests

OPTIONS: dict[str, dict[str, Any]] = {
    "small pool": {},
    "swapping": {"swap_space": 1e-6, "preemption_mode": "swap"},
    "offloading": {"swap_space": 1e-6, "enable_kv_offloading": True},
    "urgent ones": {"scheduling_policy": "priority", "num_gpu_blocks_override": 24},
    "window": {"window": 6},
}


class Watching:
    """Looks at an engine behind its steps, and checks what two clients know then: one that was
    there from the start, and one that has only just come.
    """

    def __init__(self, engine: Engine, *, every: int = 1) -> None:
        self.engine = engine
        self.view = engine.open_view()
        self.encoder = FrameEncoder()
        self.reader = FrameReader(engine.statistics().num_blocks)
        self.frames: list[dict[str, Any]] = []
        step, counter = engine.step, itertools.count(1)

        def watched() -> Any:
            result = step()
            if next(counter) % every == 0:
                self.look()
            return result

        engine.step = watched  # type: ignore[method-assign]

    def look(self) -> None:
        snapshot, queues, activity = self.view.take()
        frame = self.encoder.next(snapshot, queues, activity)
        if frame is not None:
            self.frames.append(frame)
            self.reader.apply(json.loads(json.dumps(frame)))
        newcomer = FrameReader(self.reader.num_blocks)
        newcomer.apply(json.loads(json.dumps(self.encoder.full())))
        names = self.engine.cache_view().names
        for reader in (self.reader, newcomer):
            reader.check(snapshot, queues, names)

    def all_of(self, name: str) -> list[Any]:
        return [one for frame in self.frames for one in frame.get(name, [])]


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("every", [1, 5])
def test_frames_tell_of_all_that_the_manager_and_the_queues_have(
    tokenizer_folder: Path, tmp_path: Path, name: str, every: int
) -> None:
    run = RecordedRun(tokenizer_folder, tmp_path / "run.jsonl", **OPTIONS[name])
    watching = Watching(run.engine, every=every)
    random_run(run, 7 + every)
    watching.look()
    statistics = run.engine.statistics()
    recorded = run.recording().steps
    steps = watching.all_of("steps")
    assert [row[0] for row in steps] == [one.line["step"]["step_id"] for one in recorded]
    assert [(row[3], row[4]) for row in steps] == [
        (one.work.num_prefill_tokens, one.work.num_decode_rows) for one in recorded
    ]
    assert len(watching.all_of("copies")) == sum(one.work.num_copies for one in recorded)
    if name != "offloading":  # which gives up what the CPU holds, too
        assert len(watching.all_of("evicted")) == statistics.num_evictions
    ended = [one for one in watching.all_of("ended") if one["reason"] != "abort"]
    assert len(ended) == sum(len(one.ends) for one in recorded)
    preempted = [one for step in recorded for one in step.line["step"]["preempted"]]
    assert [one["id"] for one in watching.all_of("preempted")] == [
        one["request_id"] for one in preempted
    ]
    if name == "swapping":
        assert len(watching.all_of("swap_out")) == statistics.num_swapped_out > 0
        assert len(watching.all_of("swap_in")) == statistics.num_swapped_in
        assert any(one.get("state") == "swapped" for one in watching.all_of("requests"))


def test_nothing_new_is_no_frame_and_a_reset_is_one(tokenizer_folder: Path) -> None:
    engine = make_engine(tokenizer_folder, num_gpu_blocks_override=30, block_size=4)
    watching = Watching(engine)
    engine.add_request("a", "x" * 20, SamplingParams(max_tokens=2))
    while engine.has_work:
        engine.step()
    number = len(watching.frames)
    watching.look()
    assert len(watching.frames) == number
    assert engine.reset_prefix_cache() > 0
    watching.look()
    assert len(watching.frames) == number + 1
    assert watching.reader.states.sum() == 0


def test_each_wait_has_its_reason_and_forks_their_root(tokenizer_folder: Path) -> None:
    engine = make_engine(
        tokenizer_folder, num_gpu_blocks_override=10, block_size=4, max_num_seqs=3, watermark=0.0
    )
    watching = Watching(engine)
    params = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)
    for name in "abcd":
        engine.add_request(name, name * 15, params)
    engine.step()
    engine.step()
    (fork,) = engine.fork("a")
    watching.look()
    known = {one["id"]: one for one in watching.reader.requests.values()}
    assert known[fork]["forked_from"] == "a"
    assert known["a"]["forked_from"] is None
    for name in "cd":
        assert known[name]["why"].startswith("waits for 4 blocks; 2 can be taken")
    assert (known["a"]["prompt_len"], known["a"]["max_tokens"]) == (15, 9)


@pytest.mark.parametrize("shows_text", [True, False])
def test_a_prompt_is_shown_only_where_that_is_allowed(
    tokenizer_folder: Path, shows_text: bool
) -> None:
    engine = make_engine(tokenizer_folder, num_gpu_blocks_override=400, max_model_len=1000)
    view = engine.open_view()
    encoder = FrameEncoder((lambda request: str(request.prompt)) if shows_text else None)
    engine.add_request("a", "secret" * 100, SamplingParams(max_tokens=5))
    engine.step()
    frames = json.dumps([encoder.next(*view.take()), encoder.full()])
    assert ("secret" in frames) == shows_text
    assert frames.count("secret") <= 2 * 67  # 400 characters of it


class Large:
    """100,000 blocks, 1,024 sequences that run and as many that wait, without a model."""

    def __init__(self) -> None:
        self.source = np.random.default_rng(0)
        self.manager = BlockManager(100_000, 16, shuffle_seed=0)
        config = SchedulerConfig(max_num_seqs=1024, max_num_batched_tokens=2_000_000)
        self.scheduler = Scheduler(self.manager, config, max_model_len=4096)
        self.view = RunView(self.manager, self.scheduler)
        for i in range(2048):
            length = 1200 + int(self.source.integers(64))
            prompt = self.source.integers(0, 30_000, length, dtype=np.int32)
            self.scheduler.add(Request(f"request {i}", prompt, 1000))

    def step(self) -> None:
        step = self.scheduler.schedule()
        assert step is not None
        token_ids = self.source.integers(0, 30_000, step.sample_rows.size)
        self.view.landed(step, self.scheduler.update(step, token_ids), 0.0, 0.01)


def test_a_frame_of_a_large_pool_holds_what_has_changed_and_no_more() -> None:
    large = Large()
    encoder = FrameEncoder()
    large.step()
    first = encoder.next(*large.view.take())
    assert first is not None
    assert len(first["requests"]) == 2048
    before = large.manager.statistics()
    for _ in range(10):
        large.step()
    frame = encoder.next(*large.view.take())
    assert frame is not None
    taken = large.manager.statistics().num_referenced - before.num_referenced
    assert 500 < taken < 1000
    for name in ("entries", "blocks"):
        assert len(unpacked(frame[name])) == taken
    assert len(unpacked(frame["sequences"])) == 1024
    assert len(frame.get("requests", [])) <= 1  # the first that waits, whose numbers changed
    assert len(json.dumps(frame)) < 50_000 < len(json.dumps(first)) // 50
    reader = FrameReader(100_000)
    reader.apply(first)
    reader.apply(frame)
    look = large.view.take()
    reader.check(look[0], look[1], {})


def test_what_happened_long_ago_is_left_out() -> None:
    manager = BlockManager(4000, 4)
    scheduler = Scheduler(manager, SchedulerConfig(max_num_seqs=4), max_model_len=8000)
    view = RunView(manager, scheduler)
    encoder = FrameEncoder()
    scheduler.add(Request("a", np.arange(4, dtype=np.int32), 7000))
    for _ in range(5000):
        step = scheduler.schedule()
        assert step is not None
        view.landed(step, scheduler.update(step, np.array([7])), 0.0, 0.0)
    look = view.take()
    assert (len(look[2].steps), look[2].num_lost) == (4096, 904)
    frame = encoder.next(*look)
    assert frame is not None
    assert [row[0] for row in frame["steps"]] == list(range(5001 - MAX_STEPS, 5001))
    for i in range(MAX_EVENTS + 10):
        request = Request(f"b{i}", np.arange(1, 3, dtype=np.int32), 1)
        scheduler.add(request)
        view.aborted(scheduler.finish(f"b{i}", "abort"), 0.0)
    frame = encoder.next(*view.take())
    assert frame is not None
    assert [one["id"] for one in frame["ended"]] == [f"b{i}" for i in range(10, MAX_EVENTS + 10)]
