"""The recorded requests under other settings and another clock: they answer the same."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from recorded_runs import RecordedRun, random_run

from pagedkv.replay import Recording, changed_settings, settings_of
from pagedkv.replay.driving import Drive
from pagedkv.replay.metrics import measure
from pagedkv.replay.modelled import AsModelled
from pagedkv.replay.recording import Abort, Arrival, Fork, Step
from pagedkv.replay.scripts import Scripts
from pagedkv.replay.step_times import FitError, StepTimes
from pagedkv.sampling_params import SamplingParams
from pagedkv.scheduler import Rates

LONG = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


def times(step_s: float = 0.01, token_s: float = 0.0) -> StepTimes:
    return StepTimes(
        coefficients_s=(step_s, token_s, 0.0, token_s, 0.0, 0.0, 0.0),
        gap_s=0.0,
        error=FitError(0.0, 0.0, 0.0, 1),
        unseen=(),
        largest=1000,
        bytes_per_block=1,
    )


def drive_of(recording: Recording, clock: StepTimes | None = None, **options: Any) -> Drive:
    settings = changed_settings(settings_of(recording), **options)
    has_priorities = settings.scheduler.scheduling_policy == "priority"
    source = AsModelled(recording, clock or times(), has_priorities=has_priorities)
    return Drive(source, settings.cache, settings.scheduler, settings.facts)


def tokens_of(steps: list[Step]) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = defaultdict(list)
    for step in steps:
        for i, (key, token_id) in enumerate(zip(step.samples, step.token_ids, strict=True)):
            if i not in step.failed:
                tokens[key].append(token_id)
    return tokens


def check_whole(drive: Drive) -> None:
    drive._manager.check_invariants()
    statistics = drive._manager.statistics()
    assert statistics.num_sequences == 0
    assert statistics.num_free + statistics.num_cached_idle == statistics.num_blocks


OTHER_SETTINGS: list[dict[str, Any]] = [
    {},
    {"block_size": 7},
    {"block_size": 1},
    {"num_gpu_blocks_override": 45, "max_num_seqs": 3},
    {"max_num_batched_tokens": 9},
    {"enable_prefix_caching": False},
    {"swap_space": 1e-6, "preemption_mode": "swap"},
    {"scheduling_policy": "fcfs", "watermark": 0.2},
    {"swap_space": 1e-6, "enable_kv_offloading": True, "num_gpu_blocks_override": 45},
]


@pytest.mark.parametrize("options", OTHER_SETTINGS, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_every_request_answers_as_it_did(
    tokenizer_folder: Path, tmp_path: Path, seed: int, options: dict[str, Any]
) -> None:
    run = RecordedRun(
        tokenizer_folder,
        tmp_path / "run.jsonl",
        scheduling_policy="priority",
        keep_token_ids=seed == 0,
        num_gpu_blocks_override=48,
    )
    random_run(run, 10 + seed)
    recording = run.recording()
    drive = drive_of(recording, **options)
    steps = list(drive.steps())
    check_whole(drive)
    assert drive.refused == []
    ends = {key: (reason, num) for step in steps for key, reason, num in step.ends}
    aborted = {event.key for event in recording.events if isinstance(event, Abort)}
    beams = {
        f"{event.key}-{k}"
        for event in recording.events
        if isinstance(event, Arrival) and event.request.num_candidates
        for k in range(event.request.num_forks)
    }
    scripts, tokens = Scripts(recording), tokens_of(steps)
    num_compared = 0
    for step in recording.steps:
        for key, reason, num_generated in step.ends:
            if reason == "error" or key in aborted or key.rsplit("-", 1)[0] in aborted:
                continue
            assert ends[key] == (reason, num_generated), key
            if key not in beams:
                inherited = num_generated - len(tokens[key])
                assert scripts.of(key).token_ids[inherited:] == tokens[key]
            num_compared += 1
    assert num_compared > 3


def test_without_arrivals_in_between_other_times_change_no_decision(
    tokenizer_folder: Path, tmp_path: Path
) -> None:
    run = RecordedRun(tokenizer_folder, tmp_path / "run.jsonl")
    for i in range(9):
        params = SamplingParams(seed=i, max_tokens=5 + 3 * i, n=1 + i % 2)
        run.engine.add_request(str(i), "ab" * (3 + 4 * (i % 3)), params)
    recording = run.recording()
    assert sum(len(step.line["step"]["preempted"]) for step in recording.steps) > 0
    for clock in (times(1e-6), times(5.0), times(0.0, 0.3)):
        replayed = list(drive_of(recording, clock).steps())
        assert [step.line for step in replayed] == [
            {"step": step.line["step"], "ended": step.line["ended"]} for step in recording.steps
        ]


def test_time_passes_as_modelled_and_waits_for_the_next_arrival(
    tokenizer_folder: Path, tmp_path: Path
) -> None:
    run = RecordedRun(tokenizer_folder, tmp_path / "run.jsonl")
    for at_s, prompt in ((0.25, "0123456789"), (9.0, "abcdefghij")):
        run.clock.now_s = 100.0 + at_s
        run.engine.add_request(prompt, prompt, SamplingParams(max_tokens=3, ignore_eos=True))
        run.finish()
    steps = list(drive_of(run.recording(), times(1.0, 0.1)).steps())
    assert [step.start_s for step in steps] == pytest.approx([0.25, 2.25, 3.35, 9.0, 11.0, 12.1])
    assert [step.end_s for step in steps][2::3] == pytest.approx([4.45, 13.2])


@pytest.mark.parametrize("gap_s", [0.0, 0.02])
def test_requests_that_came_before_the_first_step_are_all_there_for_it(
    tokenizer_folder: Path, tmp_path: Path, gap_s: float
) -> None:
    run = RecordedRun(tokenizer_folder, tmp_path / "run.jsonl")
    for round_ in range(2):
        for prompt in ("01234", "abcde", "vwxyz"):
            run.clock.now_s += 0.125  # to make the request
            run.engine.add_request(f"{prompt} {round_}", prompt, SamplingParams(max_tokens=3))
        run.clock.now_s += 0.125
        run.finish()
        run.clock.now_s += 50.0
    recording = run.recording()
    clock = dataclasses.replace(times(1.0), gap_s=gap_s)
    steps = list(drive_of(recording, clock).steps())
    assert len(steps) == len(recording.steps)
    firsts = [
        k for k, step in enumerate(recording.steps) if len(step.line["step"]["admitted"]) == 3
    ]
    assert len(firsts) == 2
    for k in firsts:
        assert len(steps[k].line["step"]["admitted"]) == 3
        assert steps[k].start_s == pytest.approx(recording.steps[k].start_s)


def test_swapping_is_weighed_by_the_rates_of_that_time(
    tokenizer_folder: Path, tmp_path: Path
) -> None:
    run = RecordedRun(tokenizer_folder, tmp_path / "run.jsonl")
    run.engine.add_request("a", "x" * 10, SamplingParams(max_tokens=3, ignore_eos=True))
    recording = run.recording()
    steps = [
        dataclasses.replace(step, start_s=10.0 * k, rates=Rates(prefill_tokens_per_s=k + 1.0))
        for k, step in enumerate(recording.steps)
    ]
    source = AsModelled(dataclasses.replace(recording, steps=steps), times(), has_priorities=False)
    assert [source.rates(at_s).prefill_tokens_per_s for at_s in (0.0, 9.9, 10.0, 99.0)] == [
        *(1.0, 1.0),
        *(2.0, 3.0),
    ]
    nothing = AsModelled(dataclasses.replace(recording, steps=[]), times(), has_priorities=False)
    assert nothing.rates(5.0) == Rates()


def aborted_after(folder: Path, path: Path, num_steps: int) -> Recording:
    run = RecordedRun(folder, path)
    run.engine.add_request("a", "x" * 10, LONG)
    for _ in range(num_steps):
        run.engine.step()
    run.engine.abort("a")
    return run.recording()


def test_an_abort_comes_at_its_time_or_when_no_token_is_left(
    tokenizer_folder: Path, tmp_path: Path
) -> None:
    recording = aborted_after(tokenizer_folder, tmp_path / "run.jsonl", 8)
    (abort,) = [event for event in recording.events if isinstance(event, Abort)]
    slow = drive_of(recording, times(abort.time_s / 2.5))
    assert len(list(slow.steps())) == 3
    check_whole(slow)
    slow_steps = list(drive_of(recording, times(abort.time_s / 2.5)).steps())
    assert measure(recording.events, slow_steps, 4).e2e.num == 0
    fast = drive_of(recording, times(abort.time_s / 1000))
    steps = list(fast.steps())
    assert steps[-1].ends == [("a", "abort", 8)]
    check_whole(fast)


def test_a_request_aborted_before_its_first_token_ends_at_that_token(
    tokenizer_folder: Path, tmp_path: Path
) -> None:
    recording = aborted_after(tokenizer_folder, tmp_path / "run.jsonl", 0)
    assert list(drive_of(recording).steps()) == []
    run = RecordedRun(tokenizer_folder, tmp_path / "second.jsonl")
    run.engine.add_request("first", "y" * 20, SamplingParams(max_tokens=8, ignore_eos=True))
    run.engine.step()
    run.engine.add_request("a", "x" * 20, LONG)
    run.engine.step()
    run.engine.abort("a")
    steps = list(drive_of(run.recording(), times(1e-5), max_num_batched_tokens=64).steps())
    assert ("a", "abort", 1) in [end for step in steps for end in step.ends]


def test_a_fork_happens_when_its_parent_has_as_many_tokens(
    tokenizer_folder: Path, tmp_path: Path
) -> None:
    run = RecordedRun(tokenizer_folder, tmp_path / "run.jsonl")
    run.engine.add_request("a", "x" * 10, LONG)
    for _ in range(6):
        run.engine.step()
    run.engine.fork("a", 2)
    run.engine.fork("a-2", 1, dataclasses.replace(LONG, max_tokens=25))
    recording = run.recording()
    forks = [event for event in recording.events if isinstance(event, Fork)]
    assert [(fork.key, fork.num_generated) for fork in forks] == [("a", 6), ("a-2", 6)]
    for clock in (times(1e-6), times(10.0)):
        steps = list(drive_of(recording, clock, block_size=3).steps())
        assert {end for step in steps for end in step.ends} == {
            *((key, "length", 40) for key in ("a", "a-1", "a-2")),
            ("a-3", "length", 25),
        }
        assert {key: len(ids) for key, ids in tokens_of(steps).items()} == {
            "a": 40,
            "a-1": 34,
            "a-2": 34,
            "a-3": 19,
        }


def test_a_run_whose_recording_ends_early_ends_where_its_tokens_do(
    tokenizer_folder: Path, tmp_path: Path
) -> None:
    run = RecordedRun(tokenizer_folder, tmp_path / "run.jsonl")
    run.engine.add_request("a", "x" * 10, LONG)
    beams = SamplingParams(temperature=0, max_tokens=8, beam_width=2)
    run.engine.add_request("b", "y" * 10, beams)
    for _ in range(4):
        run.engine.step()
    run.recorder.close()
    recording = run.recording()
    drive = drive_of(recording)
    ends = {key: reason for step in drive.steps() for key, reason, _ in step.ends}
    assert ends == {"a": "abort", "b-0": "error"}
    check_whole(drive)


def test_what_other_settings_do_not_admit_is_refused_and_the_rest_goes_on(
    tokenizer_folder: Path, tmp_path: Path
) -> None:
    run = RecordedRun(tokenizer_folder, tmp_path / "run.jsonl")
    run.engine.add_request("large", "x" * 50, LONG)
    run.engine.add_request("small", "x" * 5, SamplingParams(max_tokens=5, ignore_eos=True))
    for _ in range(6):
        run.engine.step()
    run.engine.fork("large", 1)
    drive = drive_of(run.recording(), num_gpu_blocks_override=10)
    ends = [end for step in drive.steps() for end in step.ends]
    assert ends == [("small", "length", 5)]
    ((key, why),) = drive.refused
    assert key == "large"
    assert "need 23 blocks of 4 tokens, but the pool has 10" in why


def test_the_same_id_may_overlap_in_a_slower_run(tokenizer_folder: Path, tmp_path: Path) -> None:
    run = RecordedRun(tokenizer_folder, tmp_path / "run.jsonl")
    for _ in range(3):
        run.engine.add_request("again", "x" * 10, SamplingParams(max_tokens=6, ignore_eos=True))
        run.finish()
    drive = drive_of(run.recording(), times(50.0))
    steps = list(drive.steps())
    assert drive.refused == []
    assert sorted(key for step in steps for key, _, _ in step.ends) == [
        "again",
        "again (2)",
        "again (3)",
    ]


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
def test_pseudonyms_share_what_the_ids_share_at_any_block_size(
    tokenizer_folder: Path, tmp_path: Path, block_size: int
) -> None:
    decided = []
    for keep_token_ids in (False, True):
        path = tmp_path / f"ids-{keep_token_ids}.jsonl"
        run = RecordedRun(
            tokenizer_folder, path, keep_token_ids=keep_token_ids, num_gpu_blocks_override=60
        )
        random_run(run, 3)
        steps = list(drive_of(run.recording(), block_size=block_size).steps())
        assert steps[-1].statistics["prefix_cache_hits"] > 0
        decided.append([(step.line, step.statistics) for step in steps])
    assert decided[0] == decided[1]


def test_a_fork_whose_name_is_still_in_use_is_left_out(
    tokenizer_folder: Path, tmp_path: Path
) -> None:
    run = RecordedRun(tokenizer_folder, tmp_path / "run.jsonl")
    run.engine.add_request("a", "x" * 10, LONG)
    run.engine.add_request("a-1", "y" * 10, SamplingParams(max_tokens=2, ignore_eos=True))
    for _ in range(4):
        run.engine.step()
    assert run.engine.fork("a", 1) == ["a-1"]
    recording = run.recording()
    in_turns = drive_of(recording, max_num_seqs=1)
    ends = [end for step in in_turns.steps() for end in step.ends]
    assert ends == [("a", "length", 40), ("a-1", "length", 2)]
    assert in_turns.refused == [("a-1 (2)", "request id 'a-1' is in use by an unfinished request")]
    beside = drive_of(recording)
    assert ("a-1 (2)", "length", 40) in [end for step in beside.steps() for end in step.ends]
    assert beside.refused == []
