"""A recorded run of SmolLM2 on the CPU, replayed: the same decisions, and a report of it. How well
its step times are predicted is measured by benchmarks/bench_replay.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from pagedkv import LLM, SamplingParams
from pagedkv.replay import (
    Recorder,
    changed_settings,
    compare,
    explain,
    load,
    settings_of,
    text_report,
)

pytestmark = pytest.mark.model


def test_a_real_run_is_replayed_without_its_model(tmp_path: Path) -> None:
    llm = LLM("smollm2", block_size=4, num_gpu_blocks_override=22, max_model_len=128)
    llm.engine.observe(Recorder(tmp_path / "run.jsonl"))
    prompts = ["Once upon a time, in a village", "Once upon a time, in a city", "Two plus two is"]
    params = SamplingParams(temperature=0.7, seed=1, max_tokens=20, ignore_eos=True, n=2)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    recording = load(tmp_path / "run.jsonl")
    facts = recording.facts
    assert (facts.num_layers, facts.num_kv_heads, facts.head_dim) == (30, 3, 64)
    comparison = compare(recording, changed_settings(settings_of(recording), block_size=16))
    assert comparison.difference is None
    assert comparison.changed is not None
    assert comparison.changed.metrics.num_generated == 120
    assert comparison.recorded.num_recomputed == sum(one.num_preemptions for one in outputs) > 0
    assert all(step.seconds > 0 for step in recording.steps)
    assert "held-out steps" in text_report(comparison)
    assert [one.request_id for one in explain(recording, "0")] == ["0-0", "0-1"]
