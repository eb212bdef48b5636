"""The engine on a contiguous manager: the same model and kernels, and the same tokens."""

from __future__ import annotations

import dataclasses
import json

import pytest

from claims import measure_gpu
from claims.contiguous import ContiguousManager
from claims.engines import make_engine, run_window
from claims.simulated import Setting
from claims.systems import MAX, ORACLE, PAGED, STATIC, System
from claims.tables import value
from claims.workloads import Job, jobs_of
from pagedkv.config import EngineConfig
from pagedkv.engine.loading import LoadedModel, load

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32_000,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return EngineConfig.from_options(
        str(folder),
        load_format="dummy",
        device="cpu",
        num_gpu_blocks_override=40,
        block_size=4,
        enable_prefix_caching=False,
    )


@pytest.fixture(scope="module")
def loaded(config: EngineConfig) -> LoadedModel:
    return load(config)


def short_jobs(count: int) -> list[Job]:
    jobs = jobs_of("ShareGPT-like", count)
    return [Job(0.0, job.prompt[:30], min(job.output_len, 20)) for job in jobs]


@pytest.mark.parametrize("is_pipelined", [False, True])
@pytest.mark.parametrize("system", [MAX, ORACLE, STATIC], ids=lambda one: one.name)
def test_answers_are_those_of_the_paged_engine(
    system: System, is_pipelined: bool, config: EngineConfig, loaded: LoadedModel
) -> None:
    config = dataclasses.replace(config, async_scheduling=is_pipelined)
    jobs = short_jobs(12)
    answers = []
    for one in (PAGED, system):
        engine = make_engine(one, loaded, config)
        assert isinstance(engine._manager, ContiguousManager) == (one is system)
        found = {}
        run = engine.step

        def step(run=run, found=found):  # type: ignore[no-untyped-def]
            result = run()
            found.update((o.request_id, o.outputs[0].token_ids) for o in result.finished)
            return result

        engine.step = step  # type: ignore[method-assign]
        window = run_window(engine, one, jobs, 1e9)
        assert window.num_ended == len(jobs)
        assert window.num_tokens == sum(job.output_len for job in jobs)
        engine.check_invariants()
        answers.append(found)
    assert answers[0] == answers[1]


def test_a_window_ends_in_time_and_counts_what_was_begun(
    config: EngineConfig, loaded: LoadedModel
) -> None:
    engine = make_engine(MAX, loaded, config)
    ticks = iter(range(1000))
    window = run_window(engine, MAX, short_jobs(12), 6.0, clock=lambda: float(next(ticks)))
    assert window.num_steps == 6
    assert window.seconds == 6
    # A region of 63 tokens takes 16 of 40 blocks: two run at once.
    assert window.mean_running == 2
    assert window.num_tokens == 2 * 6
    assert not engine.has_work


def test_systems_are_compared_beside_what_the_simulator_says(
    config: EngineConfig, loaded: LoadedModel
) -> None:
    setting = Setting(160, block_size=4, max_model_len=64)
    rows = measure_gpu.compare(loaded, config, setting, short_jobs(12), 1e9)
    assert [row.name for row in rows] == [one.name for one in measure_gpu.SYSTEMS]
    assert rows[0].baseline == 1
    for row in rows:
        assert value(row, "sequences at once") <= 40
        # The same scheduler on the same manager: as many at once, whatever the steps took.
        assert value(row, "sequences at once") == value(row, "at a time")
