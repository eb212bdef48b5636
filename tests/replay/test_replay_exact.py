"""A recorded run, driven again under its own settings, decides the same in every step."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from recorded_runs import RecordedRun, random_run

from pagedkv.replay import first_difference
from pagedkv.sampling_params import SamplingParams

OPTIONS: list[dict[str, Any]] = [
    {},
    {"keep_token_ids": True},
    {"enable_prefix_caching": False},
    {"scheduling_policy": "priority", "priority_ageing_steps": 4},
    {"swap_space": 1e-6, "preemption_mode": "swap"},
    {"swap_space": 1e-6},
    {"window": 8},
    {"swap_space": 1e-6, "enable_kv_offloading": True},
    {"block_size": 1, "num_gpu_blocks_override": 100, "watermark": 0.1},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_the_same_settings_decide_the_same(
    tokenizer_folder: Path, tmp_path: Path, seed: int, options: dict[str, Any]
) -> None:
    run = RecordedRun(tokenizer_folder, tmp_path / "run.jsonl", **options)
    random_run(run, seed)
    recording = run.recording()
    assert len(recording.steps) > 10
    assert first_difference(recording) is None


def test_what_is_decided_otherwise_is_told(tokenizer_folder: Path, tmp_path: Path) -> None:
    run = RecordedRun(tokenizer_folder, tmp_path / "run.jsonl")
    for name in ("a", "b"):
        run.engine.add_request(name, "hello", SamplingParams(max_tokens=3, ignore_eos=True))
    recording = run.recording()
    first, second, *rest = recording.steps

    def told(*steps: Any, **changes: Any) -> str:
        return str(first_difference(dataclasses.replace(recording, steps=list(steps), **changes)))

    assert told(first, second, *rest) == "None"
    assert told(first, second, *rest, events=[]) == (
        "step 1 was recorded, but there is nothing left to run"
    )
    fewer = dataclasses.replace(first, notes=first.notes[:-1])
    assert told(fewer, second, *rest).startswith("step 1 differs in reasons: recorded None, got {")
    counted = dataclasses.replace(second, statistics=dict(second.statistics, num_copies=9))
    assert told(first, counted, *rest).startswith("step 2 differs in statistics")
    longer = dataclasses.replace(second, line=dict(second.line, ended=[{"request_id": "a"}]))
    assert told(first, longer, *rest).startswith("step 2 differs in what ended")
    assert told(first, *rest).startswith("step 2 differs in ")
    twice = [*recording.events, recording.events[0]]
    assert told(first, second, *rest, events=twice).startswith("step 1 differs in reasons")
