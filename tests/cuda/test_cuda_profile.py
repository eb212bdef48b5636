"""What `pagedkv bench --profile` says of a GPU, and what a steady decode step moves to it and back,
counted on its timeline."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from small_llama import CONFIG, engine_on
from typer.testing import CliRunner

from pagedkv.cli.app import app
from pagedkv.engine.gpu_timeline import record
from pagedkv.sampling_params import SamplingParams

NUM_STEPS = 8


def bench(folder: Path, num_steps: int, *options: str, **config: int) -> str:
    shape = {**CONFIG, "torch_dtype": "bfloat16", **config}
    (folder / "config.json").write_text(json.dumps(shape))
    command = ["bench", str(folder), "--load-format", "dummy", "--device", "cuda"]
    command += ["--profile", str(num_steps), *options]
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_it_says_how_long_the_gpu_is_busy_and_with_what(tmp_path: Path) -> None:
    pool = ["--num-gpu-blocks-override", "400"]
    output = bench(tmp_path, NUM_STEPS, *pool)
    assert f"GPU, {NUM_STEPS} steps: busy " in output
    assert "swaps" not in output
    found = json.loads(bench(tmp_path, NUM_STEPS, *pool, "--json").splitlines()[-1])["gpu"]
    assert found["busy_s"] > 0
    assert found["gap_s"] > 0
    calls = {name: count for name, _, count in found["kernels"]}
    attention = [count for name, count in calls.items() if "::decode_" in name]
    assert attention[0] == NUM_STEPS * CONFIG["num_hidden_layers"], calls
    assert found["swaps"] == []


def test_it_says_what_of_swaps_is_beside_kernels(tmp_path: Path) -> None:
    """16 requests of 9 blocks start; the first swaps are needed at their 33rd token, the next ones
    16 and 32 steps later.
    """
    num_steps, options = 40, ["--num-gpu-blocks-override", "164"]
    options += ["--swap-space", "0.2", "--preemption-mode", "swap"]
    deep = {"num_hidden_layers": 40}  # blocks so large that the copy engines move them
    output = bench(tmp_path, num_steps, *options, "--json", **deep)
    ways = {one["way"]: one for one in json.loads(output.splitlines()[-1])["gpu"]["swaps"]}
    assert "out" in ways
    for one in ways.values():
        assert one["num_copies"] > 0
        assert 0 <= one["beside_s"] <= one["busy_s"]
    assert "% of it beside kernels" in bench(tmp_path, num_steps, *options, **deep)


@pytest.mark.parametrize("num_seqs", [1, 5, 64])
def test_a_steady_decode_step_is_one_copy_there_at_most_and_one_back(device, num_seqs: int) -> None:
    engine = engine_on(device, num_gpu_blocks_override=400)
    params = SamplingParams(temperature=0.7, seed=1, max_tokens=100, ignore_eos=True)
    for i in range(num_seqs):
        engine.add_request(str(i), [5, 6, 7 + i], params)
    for _ in range(6):
        engine.step()
    state = engine._runner._inputs.state

    def run() -> None:
        for _ in range(16):
            engine.step()

    before = state.num_bytes_sent
    activities = record(run)
    # Of each row one block id and where it stands; all get their second block in one step, or in
    # two, as the first request may be a step ahead of the others.
    assert state.num_bytes_sent - before == 12 * num_seqs
    assert 1 <= sum(one.way == "in" for one in activities) <= 2
    assert sum(one.way == "out" for one in activities) == 16
    while engine.has_work:
        engine.step()
