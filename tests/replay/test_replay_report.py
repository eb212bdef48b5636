"""The numbers of a run, by hand, and what a comparison says of them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from recorded_runs import RecordedRun

from pagedkv.replay import (
    Recording,
    RecordingError,
    changed_settings,
    compare,
    json_report,
    settings_of,
    text_report,
)
from pagedkv.replay.metrics import measure
from pagedkv.sampling_params import SamplingParams


def crowd(run: RecordedRun) -> Recording:
    """Ten requests that share eight tokens, more than the pool holds."""
    for i in range(10):
        params = SamplingParams(seed=i, max_tokens=10 + 2 * i, ignore_eos=True)
        run.engine.add_request(str(i), "a shared" + f" prompt, number {i}", params)
        run.engine.step()
    return run.recording()


@pytest.fixture(scope="module")
def recording(tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Recording:
    path = tmp_path_factory.mktemp("report") / "run.jsonl"
    return crowd(RecordedRun(tokenizer_folder, path, num_gpu_blocks_override=20))


def test_latencies_and_tokens_by_hand(tokenizer_folder: Path, tmp_path: Path) -> None:
    """Steps take 4 ms and 0.5 ms a token: 10 tokens, then 2 decodes; n=2 decodes two rows."""
    run = RecordedRun(tokenizer_folder, tmp_path / "run.jsonl")
    run.clock.now_s += 1.0
    run.engine.add_request("one", "0123456789", SamplingParams(max_tokens=3, ignore_eos=True))
    run.finish()
    run.engine.add_request("two", "9876543210", SamplingParams(max_tokens=2, n=2, ignore_eos=True))
    run.clock.now_s += 0.5
    run.finish()
    beams = SamplingParams(temperature=0, max_tokens=2, beam_width=2, n=1, ignore_eos=True)
    run.engine.add_request("beams", "abcdefghij", beams)
    run.engine.step()
    run.engine.add_request("gone", "jihgfedcba", SamplingParams(max_tokens=50, ignore_eos=True))
    run.engine.step()
    run.engine.abort("gone")
    recording = run.recording()
    metrics = measure(recording.events, recording.steps, recording.cache.block_size)
    first, one, two = 0.009, 0.0045, 0.005
    assert metrics.num_requests == 4
    assert metrics.num_generated == 3 + 4 + 2 + 1
    assert metrics.ttft.num == 4
    assert metrics.ttft.p50 == pytest.approx((first + 0.004 + 12 * 0.0005) / 2, abs=0.001)
    assert metrics.itl.num == 2 + 2
    assert metrics.itl.p99 == pytest.approx(two, abs=1e-4)
    assert metrics.e2e.num == 3
    assert metrics.e2e.p99 == pytest.approx(0.5 + first + two, rel=0.02)
    assert metrics.duration_s == pytest.approx(
        first + 2 * one + 0.5 + first + two + first + 0.004 + 12 * 0.0005
    )
    assert metrics.tokens_per_s == pytest.approx(10 / metrics.duration_s)


def test_the_pool_by_hand(tokenizer_folder: Path, tmp_path: Path) -> None:
    """10 tokens in 3 blocks of 4, then 11; at its end nothing is held."""
    run = RecordedRun(tokenizer_folder, tmp_path / "run.jsonl")
    run.engine.add_request("one", "0123456789", SamplingParams(max_tokens=3, ignore_eos=True))
    recording = run.recording()
    metrics = measure(recording.events, recording.steps, 4)
    busy_s = 0.009 + 2 * 0.0045
    assert metrics.peak_blocks == 3
    assert metrics.occupancy == pytest.approx((0.009 + 0.0045) * 3 / 30 / busy_s)
    assert metrics.waste == pytest.approx((0.009 * 2 / 12 + 0.0045 * 1 / 12) / busy_s)


def test_nothing_is_a_run_too(tokenizer_folder: Path, tmp_path: Path) -> None:
    recording = RecordedRun(tokenizer_folder, tmp_path / "run.jsonl").recording()
    metrics = measure(recording.events, recording.steps, 4)
    assert (metrics.num_steps, metrics.tokens_per_s, metrics.hit_rate, metrics.waste) == (
        0,
        0,
        0,
        0,
    )


def test_other_settings_change_what_they_should(recording: Recording) -> None:
    def changed(**options: Any) -> Any:
        comparison = compare(recording, changed_settings(settings_of(recording), **options))
        assert comparison.difference is None
        assert comparison.changed is not None
        assert comparison.modelled.metrics.num_generated == comparison.changed.metrics.num_generated
        return comparison.modelled.metrics, comparison.changed.metrics

    was, now = changed(num_gpu_blocks_override=300)
    assert was.num_recomputed > 0 == now.num_recomputed
    assert now.e2e.p99 < was.e2e.p99
    was, now = changed(enable_prefix_caching=False)
    assert was.hit_rate > 0 == now.hit_rate
    was, now = changed(block_size=16)
    assert now.waste > 2 * was.waste
    was, now = changed(swap_space=1e-5, preemption_mode="swap")
    assert now.num_swapped_out > 0 == was.num_swapped_out
    was, now = changed(max_num_seqs=2)
    assert now.num_recomputed == 0
    assert now.ttft.p90 > was.ttft.p90


def test_modelled_times_of_the_same_settings_are_the_recorded_ones(recording: Recording) -> None:
    comparison = compare(recording, settings_of(recording))
    assert comparison.changed is None
    recorded, modelled = comparison.recorded, comparison.modelled.metrics
    assert modelled.duration_s == pytest.approx(recorded.duration_s, rel=0.01)
    assert modelled.num_steps == recorded.num_steps
    assert modelled.num_recomputed == recorded.num_recomputed


def test_the_report_says_what_was_compared_and_how_well(recording: Recording) -> None:
    after = changed_settings(settings_of(recording), block_size=8, max_num_seqs=3)
    comparison = compare(recording, after)
    text = text_report(comparison)
    head, table = text.split("\n\n")
    assert f"10 requests, {len(recording.steps)} steps; 20 blocks of 4 tokens, fcfs" in head
    assert f"decides the same in all {len(recording.steps)} steps" in head
    assert "held-out steps 0.0% in the mean, 0.0% in the median" in head
    assert "not measured: byte copied or swapped" in head
    assert "settings: block_size 4 -> 8, num_blocks 20 -> 10, max_num_seqs 6 -> 3" in head
    titles, *rows = table.splitlines()
    assert titles.split() == ["recorded", "modelled", "changed", "change"]
    assert any(row.startswith("throughput, tokens/s ") for row in rows)
    assert rows[1].split() == ["generated", "tokens", "190", "190", "190", "+0.0%"]
    value = json.loads(json.dumps(json_report(comparison)))
    assert value["difference"] is None
    assert value["changed"]["num_generated"] == 190
    assert value["step_times"]["held_out_error"]["mean"] < 0.01
    assert value["settings"][0] == "block_size 4 -> 8"


def test_the_report_warns_of_what_it_cannot_know(recording: Recording) -> None:
    noisy = [
        dataclasses.replace(step, seconds=step.seconds * (1 + 2 * (k % 2)))
        for k, step in enumerate(recording.steps)
    ]
    odd = dataclasses.replace(recording, steps=noisy, is_cut=True)
    after = changed_settings(
        settings_of(recording), num_gpu_blocks_override=9, max_num_batched_tokens=500
    )
    text = text_report(compare(odd, after))
    assert "(its end is missing)" in text
    assert "above 10%: take what depends on time with care" in text
    assert "changed: its largest step has" in text
    assert "changed: 9 is left out: request '9' can never run" in text
    lines = dict(recording.steps[0].line, step=dict(recording.steps[0].line["step"], slots=[7]))
    wrong = dataclasses.replace(recording.steps[0], line=lines)
    other = dataclasses.replace(recording, steps=[wrong, *recording.steps[1:]])
    text = text_report(compare(other, settings_of(recording)))
    assert "does not decide the same, so take the rest with care: step 1 differs in slots" in text


def test_a_step_without_its_numbers_is_told(recording: Recording) -> None:
    empty = dict(recording.steps[0].statistics, num_blocks=0)
    for statistics, error in (({}, "KeyError"), (empty, "ZeroDivisionError")):
        step = dataclasses.replace(recording.steps[0], statistics=statistics)
        broken = dataclasses.replace(recording, steps=[step, *recording.steps[1:]])
        with pytest.raises(RecordingError, match=f"a step is not whole: {error}"):
            compare(broken, settings_of(recording))


@pytest.mark.parametrize("numbers", [None, 1, [], "x"])
def test_a_decision_whose_numbers_are_none_is_told(recording: Recording, numbers: Any) -> None:
    notes = [note | {"numbers": numbers} for note in recording.steps[0].notes]
    assert notes
    step = dataclasses.replace(recording.steps[0], notes=notes)
    broken = dataclasses.replace(recording, steps=[step, *recording.steps[1:]])
    with pytest.raises(RecordingError, match="numbers must be of type dict"):
        compare(broken, settings_of(recording))


def test_the_pool_keeps_its_bytes_unless_told(recording: Recording) -> None:
    settings = settings_of(recording)
    facts = changed_settings(settings, block_size=7).facts
    assert (facts.num_blocks, facts.num_cpu_blocks) == (11, 0)
    facts = changed_settings(settings, block_size=8, num_gpu_blocks_override=99).facts
    assert facts.num_blocks == 99
    facts = changed_settings(settings, swap_space=1e-6, block_size=2).facts
    assert facts.num_cpu_blocks == int(1e-6 * 2**30) // (8 * 2)
    assert changed_settings(settings, block_size=256).facts.num_blocks == 1


def test_a_cpu_pool_without_room_for_one_block_is_told(recording: Recording) -> None:
    settings = changed_settings(settings_of(recording), swap_space=64 * 8 / 2**30)
    assert settings.facts.num_cpu_blocks == 16
    assert changed_settings(settings, block_size=64).facts.num_cpu_blocks == 1
    with pytest.raises(ValueError, match="16 blocks of 4 tokens holds no block of 65: give a swap"):
        changed_settings(settings, block_size=65)
    other = changed_settings(settings, block_size=65, swap_space=65 * 8 / 2**30)
    assert other.facts.num_cpu_blocks == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_sise": 4}, "unknown option 'block_sise': did you mean block_size"),
        ({"block_size": 0}, "block_size must be at least 1"),
        ({"num_gpu_blocks_override": 0}, "num_gpu_blocks_override must be at least 1"),
        ({"scheduling_policy": "fair"}, "scheduling_policy must be one of"),
        ({"swap_space": 1e-9}, "one block of 4 tokens takes 32 bytes"),
        ({"max_num_seqs": 100}, "below max_num_seqs 100"),
    ],
)
def test_settings_that_cannot_be_are_refused(
    recording: Recording, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        changed_settings(settings_of(recording), **options)
