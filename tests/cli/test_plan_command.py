"""`pagedkv plan`: from config.json alone to text, JSON and a picture; its exit codes."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return path


def test_a_file_and_its_folder_are_the_same_plan(run: Any, config: Path) -> None:
    by_file = run("plan", str(config), "--gpu", "h200")
    by_folder = run("plan", str(config.parent), "--gpu", "H200")
    assert (by_file.code, by_file.err) == (0, "")
    body = by_file.out.split("\n", 1)[1]
    assert body == by_folder.out.split("\n", 1)[1]
    assert "768 bytes a token, 12,288 a block of 16" in body


OPTIONS: list[tuple[list[str], str, Any]] = [
    (["--num-gpu-blocks-override", "77"], "fit.memory.num_blocks", 77),
    (["--kv-cache-memory-bytes", "122881"], "fit.memory.num_blocks", 10),
    (["--kv-cache-dtype", "fp8"], "fit.bytes_per_token", 384),
    (["--dtype", "float32"], "fit.bytes_per_token", 1536),
    (["--block-size", "32"], "block_size", 32),
    (["--max-model-len", "100"], "max_model_len", 100),
    (["--max-num-seqs", "7"], "max_num_seqs", 7),
    (["--enforce-eager"], "fit.memory.graphs_bytes", 0),
    (["--swap-space", "0.001"], "fit.memory.num_cpu_blocks", 87),
    (["--tensor-parallel-size", "2"], "fit.bytes_per_token", 384),
    (["--length", "10", "--length", "20"], "lengths", [10, 20]),
    (["--bandwidth", "4.5"], "gpu.bandwidth", 4.5e12),
    (["--flops", "500"], "gpu.flops", 5e14),
    (["--memory", "100"], "gpu.memory_bytes", 100 * 2**30),
]


@pytest.mark.parametrize(("options", "name", "value"), OPTIONS, ids=lambda one: str(one))
def test_every_option_reaches_the_plan(
    run: Any, config: Path, options: list[str], name: str, value: Any
) -> None:
    result = run("plan", str(config), "--gpu", "h200", "--json", *options)
    assert result.code == 0, result.err
    found = json.loads(result.out)
    for key in name.split("."):
        found = found[key]
    assert found == value


def test_a_step_and_a_utilization_leave_less_for_the_pool(run: Any, config: Path) -> None:
    def pool(*options: str) -> int:
        result = run("plan", str(config), "--gpu", "l4", "--json", *options)
        return int(json.loads(result.out)["fit"]["memory"]["pool_bytes"])

    assert pool("--gpu-memory-utilization", "0.5") < pool()
    assert pool("--max-num-batched-tokens", "16384") < pool()


def test_fewer_tokens_in_graphs_take_less_for_them(run: Any, config: Path) -> None:
    def graphs(size: int) -> int:
        options = ["--gpu", "h200", "--json", "--max-cudagraph-capture-size", str(size)]
        result = run("plan", str(config), *options)
        return int(json.loads(result.out)["fit"]["memory"]["graphs_bytes"])

    assert 0 < graphs(0) < graphs(64) < graphs(256)


def test_what_does_not_fit_is_planned_and_exits_with_1(run: Any, config: Path) -> None:
    result = run("plan", str(config), "--memory", "0.5")
    assert result.code == 1
    assert "It does not fit: 0.8" in result.out
    assert "GiB are needed before there is a pool, and gpu_memory_utilization allows" in result.out
    found = run("plan", str(config), "--memory", "0.5", "--json")
    assert (found.code, json.loads(found.out)["fits"]) == (1, False)


def test_a_picture_is_written_beside_the_text(run: Any, config: Path, tmp_path: Path) -> None:
    target = tmp_path / "plan.svg"
    result = run("plan", str(config), "--gpu", "h200", "--plot", str(target))
    assert result.code == 0
    assert target.read_text().startswith("<?xml")
    refused = run("plan", str(config), "--gpu", "h200", "--plot", str(tmp_path / "plan.txt"))
    assert (refused.code, refused.out) == (1, "")
    assert "a plot is one of .svg, .png, .pdf" in refused.err


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["--gpu", "h2000"], 2, ["no GPU 'h2000'", "h200", "rtx-4090", "--memory"]),
        ([], 2, ["give a GPU"]),
        (["--gpu", "h200", "--tensor-parallel-size", "3"], 1, ["cannot be divided among 3 ranks"]),
        (["--gpu", "h200", "--length", "5000"], 1, ["max_model_len allows 1 to 4096"]),
        (["--gpu", "h200", "--max-model-len", "5000"], 1, ["the model allows 1 to 4096"]),
        (["--gpu", "h200", "--kv-cache-dtype", "int8"], 1, ["kv_cache_dtype must be one of auto"]),
        (["--gpu", "h200", "--memory", "x"], 2, ["Invalid value for '--memory'"]),
    ],
)
def test_errors_have_their_exit_codes(
    run: Any, config: Path, args: list[str], code: int, words: list[str]
) -> None:
    result = run("plan", str(config), *args)
    assert (result.code, result.out) == (code, "")
    told = " ".join(result.err.replace("│", " ").split())
    for word in words:
        assert word in told


def test_a_model_that_is_not_there_or_not_known_is_named(run: Any, tmp_path: Path) -> None:
    for name, words in (
        ("none.json", "a path of that name does not exist"),
        ("model.bin", "is neither a .gguf nor a .json file"),
        ("other.json", "the architecture NoSuch is not supported; supported are LlamaForCausalLM"),
    ):
        if name != "none.json":
            (tmp_path / name).write_text('{"architectures": ["NoSuch"]}')
        result = run("plan", str(tmp_path / name), "--gpu", "h200")
        assert result.code == 1
        assert words in result.err


@pytest.mark.model
def test_a_gguf_file_is_planned_from_its_header(run: Any) -> None:
    result = run("plan", "smollm2", "--gpu", "cpu", "--json")
    found = json.loads(result.out)
    assert (found["num_layers"], found["num_heads"], found["num_kv_heads"]) == (30, 9, 3)
    assert found["fit"]["memory"]["num_blocks"] == 2**30 // (16 * 46080)


def test_help_shows_an_example(run: Any) -> None:
    result = run("plan", "--help")
    assert result.code == 0
    assert "Example: pagedkv plan config.json --gpu h200" in result.out


def test_the_readme_commands_run(
    run: Any, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.write_text(json.dumps({**CONFIG, "max_position_embeddings": 8192}))
    monkeypatch.chdir(tmp_path)
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    section = readme.split("## Plan")[1].split("\n## ")[0]
    commands = re.findall(r"^\$ pagedkv (.*)$", section, flags=re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        result = run(*shlex.split(command, comments=True))
        assert result.code == 0, (command, result.err)
    assert Path("plan.svg").exists()
