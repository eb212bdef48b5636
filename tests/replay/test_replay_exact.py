"""A recorded run, driven again under its own settings, decides the same in every step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from recorded_runs import RecordedRun, random_run

from pagedkv.replay import first_difference

OPTIONS: list[dict[str, Any]] = [
    {},
    {"keep_token_ids": True},
    {"enable_prefix_caching": False},
    {"scheduling_policy": "priority", "priority_ageing_steps": 4},
    {"swap_space": 1e-6, "preemption_mode": "swap"},
    {"swap_space": 1e-6},
    {"window": 8},
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
