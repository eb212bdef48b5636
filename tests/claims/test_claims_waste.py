"""Waste, counted by hand on small cases and in a small run against the formula."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from claims import figures, measure_waste, tables
from claims.simulated import Setting, open_run, simulate
from claims.systems import MAX, ORACLE, PAGED, POW2, STATIC, SYSTEMS, System
from claims.tables import select, value
from claims.waste import Waste, Wasted, tail_tokens
from claims.workloads import LENGTHS, MAX_MODEL_LEN, Job, jobs_of, lengths_of
from rows import RESULTS, Row, report


def job(prompt_len: int, output_len: int, time_s: float = 0.0) -> Job:
    return Job(time_s, np.arange(prompt_len, dtype=np.int32), output_len)


@pytest.fixture(scope="module")
def quick() -> list[Row]:
    return measure_waste.measure(quick=True)


def test_each_token_of_room_is_counted_once() -> None:
    # 10 + 7 tokens, the last of which is never stored: 16 at the end. One step has 10 to 16.
    means = {}
    for system in (PAGED, ORACLE, POW2, MAX):
        setting = Setting(64, block_size=4, max_model_len=40)
        waste = simulate(system, [job(10, 7)], setting).waste
        assert waste.taken + waste.free == pytest.approx(64)
        means[system.name] = waste
    oracle, pow2, most = (means[one.name] for one in (ORACLE, POW2, MAX))
    # After the last step nothing is held; before it 10, 11, .. 15 tokens, in equal times but for
    # the first step.
    assert oracle.used == pow2.used == most.used
    assert oracle.internal == 0
    assert pow2.internal / oracle.taken == pytest.approx(4 / 16)  # 10 + 8 - 1 is 17: 20 of room
    assert most.internal / oracle.taken == pytest.approx(24 / 16)
    assert means["paged"].reserved < oracle.reserved == pow2.reserved == most.reserved


@pytest.mark.parametrize("system", SYSTEMS, ids=lambda one: one.name)
def test_what_is_taken_is_what_the_manager_holds(system: System) -> None:
    jobs, setting = jobs_of("ShareGPT-like", 20), Setting(6000)
    drive, _, manager, scheduler = open_run(system, jobs, setting)
    totals = {str(i): job.prompt.size + job.output_len - 1 for i, job in enumerate(jobs)}
    watch = Waste(manager, scheduler, totals, is_paged=system is PAGED)
    most = 0
    for step in drive.steps():
        watch.look(step.end_s, step.seconds)
        seen = watch._seen[-1][2]
        held = manager.statistics().num_referenced * setting.block_size
        assert seen.taken - seen.external == held
        most = max(most, held)
    assert most > 0.6 * setting.pool_tokens


def test_a_hole_counts_as_external_only_while_somebody_waits_who_would_fit_into_all_of_them() -> (
    None
):
    # Rooms of 19, 9, 19 tokens in a pool of 48, all taken: when the second has gone, the fourth
    # waits for 11 and finds 9 and 1.
    jobs = [job(10, 10), job(8, 2), job(10, 10), job(8, 4)]
    setting = Setting(48, block_size=1, max_model_len=40)
    outcome = simulate(ORACLE, jobs, setting)
    assert outcome.waste.external == 0
    jobs[3] = job(7, 4)  # 10 tokens: 9 + 1 would do
    outcome = simulate(ORACLE, jobs, setting)
    assert outcome.waste.external > 5


def test_a_paged_cache_wastes_what_the_formula_says(quick: list[Row]) -> None:
    assert [tail_tokens(size) for size in (1, 16, 256)] == [0, 7.5, 127.5]
    for row in select(quick, name="paged, unused tokens"):
        assert value(row, "measured") == pytest.approx(7.5, abs=0.6), row


def test_the_allocators_waste_in_the_order_of_what_they_know(quick: list[Row]) -> None:
    for workload in ("ShareGPT-like, ", "Alpaca-like, ", "mixed256, "):
        wasted = {row.name: value(row, "wasted") for row in select(quick, shape=workload)}
        paged, oracle, pow2, most = (wasted[one.name] for one in (PAGED, ORACLE, POW2, MAX))
        assert paged < oracle < pow2 < most
    assert value(select(quick, name="paged", shape="ShareGPT")[0], "wasted") < 4


def test_static_batches_wait_for_each_other() -> None:
    jobs = [job(10, 10), job(10, 50), job(10, 10, time_s=1e-3)]
    setting = Setting(400, block_size=4, max_model_len=64)
    together, waiting = (simulate(one, jobs, setting) for one in (MAX, STATIC))
    assert waiting.metrics.duration_s > 1.15 * together.metrics.duration_s
    assert waiting.metrics.num_generated == together.metrics.num_generated == 70


def test_lengths_are_what_their_parameters_say() -> None:
    for name, lengths in LENGTHS.items():
        drawn = lengths_of(name, 4000)
        assert drawn == lengths_of(name, 4000)
        assert drawn != lengths_of(name, 4000, seed=1)
        assert max(map(sum, drawn)) <= MAX_MODEL_LEN
        prompts, outputs = np.array(drawn).T
        # Rounded up, and a little cut at the context.
        assert np.mean(prompts) == pytest.approx(lengths.prompt_mean, rel=0.08)
        assert np.mean(outputs) == pytest.approx(lengths.output_mean, rel=0.08)
    assert sum(output for _, output in lengths_of("mixed256", 256)) == 133_966
    with pytest.raises(
        ValueError, match="workload must be one of ShareGPT-like, Alpaca-like, mixe"
    ):
        lengths_of("chat", 1)
    times = [one.time_s for one in jobs_of("Alpaca-like", 1000, rate=5.0)]
    assert times == sorted(times)
    assert 1000 / times[-1] == pytest.approx(5, rel=0.1)


def test_a_table_is_read_back_as_it_was_made(
    quick: list[Row], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rows.RESULTS", tmp_path)
    report("claims-waste", quick, save=True)
    assert tables.read(tables.newest("claims-waste", tmp_path)) == quick
    with pytest.raises(FileNotFoundError, match="python -m claims nothing"):
        tables.newest("nothing", tmp_path)


def test_a_figure_comes_out_the_same_each_time(quick: list[Row], tmp_path: Path) -> None:
    texts = [
        figures.save(measure_waste.draw(quick), "waste", tmp_path / str(i)).read_text()
        for i in range(2)
    ]
    assert texts[0] == texts[1]
    assert "ShareGPT-like" in texts[0]


def test_the_kept_figure_shows_the_kept_table() -> None:
    table = tables.read(tables.newest("claims-waste", RESULTS))
    kept = (figures.FOLDER / "waste.svg").read_text()
    for row in select(table, name="contiguous, max", shape="ShareGPT-like, "):
        assert f">{value(row, 'wasted'):.0f}<" in kept


def test_wasted_of_nothing_is_nothing() -> None:
    assert Wasted().wasted == 0
