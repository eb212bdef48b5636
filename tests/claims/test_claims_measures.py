"""What the measuring modules say of small cases whose numbers are known, and of small runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from claims import (
    h200,
    measure_block_size,
    measure_capacity,
    measure_indirection,
    measure_swap,
    measure_throughput,
)
from claims.measure_prefix import OPTIONS, rows_of
from claims.measure_sharing import contiguous_blocks, group_rows, paged_blocks, prefix_rows
from claims.simulated import Setting, simulate, simulate_window
from claims.systems import MAX, ORACLE, PAGED, STATIC
from claims.tables import select, series, value
from claims.waste import tail_tokens
from claims.workloads import jobs_of
from pagedkv.config import EngineConfig
from pagedkv.engine.loading import LoadedModel, load

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return EngineConfig.from_options(str(folder), load_format="dummy", **OPTIONS)


@pytest.fixture(scope="module")
def loaded(config: EngineConfig) -> LoadedModel:
    return load(config)


# -- capacity --------------------------------------------------------------------------


def test_the_kept_trace_fails_by_fragmentation_and_not_with_pages() -> None:
    paged, contiguous = (measure_capacity.replay(system) for system in (PAGED, ORACLE))
    assert paged.num_steps_waited == 0
    assert contiguous.num_steps_waited > 20
    # Five regions of ten blocks are held, five such holes lie between them.
    assert contiguous.needed == 259
    assert contiguous.free == 800
    assert contiguous.largest_hole == 160
    assert contiguous == measure_capacity.replay(ORACLE), "the same each time"
    table = measure_capacity.measure(quick=False)
    assert all(row.holds for row in table)
    assert series(table[3]).count(-1) == 50
    figure = measure_capacity.draw(table)
    assert "waits 0 steps" in figure.axes[0].get_title(loc="left")


# -- throughput ------------------------------------------------------------------------


def test_throughput_follows_from_what_fits() -> None:
    jobs, setting = jobs_of("ShareGPT-like", 150), Setting(20_000)
    rates = [
        simulate_window(one, jobs, setting, 4.0).tokens_per_s
        for one in (PAGED, ORACLE, MAX, STATIC)
    ]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] > 2 * rates[2]
    assert rates[2] > 1.5 * rates[3]


def test_the_model_of_step_times_is_near_a_run_that_was_measured() -> None:
    times = h200.step_times(16)
    coefficients = dict(zip(("step", "row", "key"), times.coefficients_s, strict=False))
    # The four rows that it is made from.
    assert coefficients["step"] + 32 * coefficients["row"] == pytest.approx(4_885e-6)
    assert coefficients["step"] + 256 * coefficients["row"] == pytest.approx(7_760e-6)
    assert coefficients["key"] * 4.29e12 == pytest.approx(131_072)
    row = measure_throughput._model_row()
    assert value(row, "simulated") == pytest.approx(value(row, "measured"), rel=0.03)


def test_latency_rises_where_the_rate_is_more_than_what_fits() -> None:
    table = measure_throughput._rate_rows((2, 16), quick=True)
    by_name = {
        system.name: [
            value(row, "s a token") for row in table if row.name == system.name and row.us
        ]
        for system in (PAGED, MAX, STATIC)
    }
    assert by_name["paged"][0] == pytest.approx(by_name["contiguous, max"][0], rel=0.1)
    assert by_name["contiguous, max"][1] > 1.5 * by_name["paged"][1]
    assert by_name["contiguous, max, static"][1] > by_name["contiguous, max"][1]
    assert measure_throughput._crossing((2.0, 0.01), (4.0, 0.03)) == 3
    assert measure_throughput._crossing(None, (4.0, 0.03)) == 4


# -- block sizes -----------------------------------------------------------------------


def test_larger_blocks_waste_more_and_find_less() -> None:
    table = measure_block_size.measure(quick=True)
    for row, size in zip(table, (8, 64), strict=True):
        assert value(row, "tokens unused") == pytest.approx(tail_tokens(size), rel=0.2)
    small, large = table
    for word in ("hit rate", "entries a table"):
        assert value(small, word) > value(large, word)
    assert value(small, "wasted") < value(large, "wasted")


def test_prefixes_are_shared_by_several_requests() -> None:
    jobs = measure_block_size.with_prefixes(jobs_of("ShareGPT-like", 40))
    beginnings = {one.prompt[:20].tobytes() for one in jobs}
    assert len(beginnings) == measure_block_size.NUM_PREFIXES
    setting = Setting(40_000, enable_prefix_caching=True)
    assert simulate(PAGED, jobs, setting).metrics.hit_rate > 0.3


# -- sharing ---------------------------------------------------------------------------


def test_two_requests_with_a_common_prefix_hold_its_full_blocks_once() -> None:
    # 1,199 tokens are 75 blocks; 62 of them, 992 tokens, are full and in common.
    assert paged_blocks(1) == contiguous_blocks(ORACLE, 1) == 75
    assert paged_blocks(2) == 2 * 75 - 62
    assert contiguous_blocks(ORACLE, 2) == 2 * 75
    assert contiguous_blocks(MAX, 2) == 2 * 128
    table = prefix_rows()
    two = select(table, shape="2 requests")
    assert [value(row, "blocks") for row in two] == [88, 150, 256]
    assert value(two[0], "GiB") == round(88 * 16 * 131_072 / 2**30, 3)


def test_samples_and_beams_share_blocks_and_copy_few(
    config: EngineConfig, loaded: LoadedModel
) -> None:
    table = group_rows(loaded, config, num_prompts=1, length=6)
    samples, beams = select(table, name="parallel"), select(table, name="beam")
    # A prompt of 150 tokens: its last block is copied for each answer but the last to write.
    assert [value(row, "copied") for row in samples] == [1, 3, 5]
    assert [value(row, "blocks contiguous") for row in samples] == [10, 30, 50]
    saved = [value(row, "saved") for row in samples]
    assert saved == sorted(saved)
    assert saved[0] == pytest.approx(100 * 9 / 20, abs=3)  # 9 of 10 blocks twice, first all
    assert saved[2] == pytest.approx(100 * 45 / 60, abs=3)
    for row in beams:
        assert value(row, "blocks contiguous") > 5 * value(row, "copied") > 0


def test_a_cached_prefix_is_found_whole(config: EngineConfig, loaded: LoadedModel) -> None:
    table = rows_of(loaded, config, (64, 128))
    assert [value(row, "tokens found") for row in table] == [64, 128]
    for row in table:
        assert row.baseline is not None
        assert value(row, "without") > 0


# -- swap against recompute ------------------------------------------------------------


def test_the_choice_is_held_against_the_better_one() -> None:
    lines = [(256, 1000.0, 5000.0), (1024, 4000.0, 5000.0), (2048, 8000.0, 6000.0)]
    times = [measure_swap.Times(length, 16, swap, compute) for length, swap, compute in lines]
    rows = measure_swap.rows_of("a model", 100_000, times)
    # By the rates of these steps the lines cross at 1,280 tokens.
    assert [value(row, "loses") for row in rows[:3]] == [0, 0, 0]
    assert "automatic: swap" in rows[0].rate
    assert "automatic: recompute" in rows[2].rate
    assert value(rows[3], "cross at") == 1024 + 1024 / 3 // 1
    assert value(rows[3], "loses") == 0
    # Steps of many tokens alone do not say what a step costs at least.
    lines = [(600, 2400.0, 2500.0), (700, 2800.0, 2500.0), (2048, 8192.0, 7000.0)]
    times = [measure_swap.Times(length, 16, swap, compute) for length, swap, compute in lines]
    rows = measure_swap.rows_of("a model", 100_000, times)
    assert "automatic: recompute, loses 4.2 %" in rows[0].rate
    never = measure_swap.rows_of("a model", 100_000, [measure_swap.Times(2048, 16, 1.0, 2.0)])
    assert "faster up to 2048 tokens" in never[1].rate
    assert "automatic: swap, loses 0.0 %" in never[0].rate


def test_indirection_is_held_against_the_median_of_contiguous_times() -> None:
    times = {"contiguous": [99.0, 100.0, 110.0], "blocks shuffled": [103.0, 102.0, 90.0]}
    contiguous, shuffled = measure_indirection.rows_of("decode", "2 x 64", times)
    assert contiguous.us == 100
    assert contiguous.rate == "+0.0 % of contiguous, spread of 3 rounds 11.1 %"
    assert shuffled.rate == "+2.0 % of contiguous"
    assert shuffled.baseline == 100 / 102


def test_the_trace_is_a_file_that_anyone_can_read() -> None:
    known = json.loads(Path(measure_capacity.TRACE).read_text())
    assert len(known["requests"]) == 11
    assert known["what"]
