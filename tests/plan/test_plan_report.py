"""A plan as text, as JSON and as a picture."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from planned_models import LLAMA, plan_of

from pagedkv.plan import find_gpu
from pagedkv.plan.picture import check_target, draw_plan
from pagedkv.plan.report import json_report, table, text_report


def test_the_text_has_every_number_that_was_asked_for() -> None:
    plan = plan_of(num_gpu_blocks_override=100, swap_space=0.01, lengths=(100, 1000))
    text = text_report(plan)
    for line in (
        "m: LlamaForCausalLM, 3 layers, 8 heads, 2 KV heads of 32, bfloat16",
        "on h200: 139.80 GiB, 4.80 TB/s, 989 TFLOP/s, NVIDIA H200 datasheet (SXM)",
        "768 bytes a token, 12,288 a block of 16",
        "100 blocks: 1,600 tokens",
        "Maximum concurrency for 4096 tokens per request: 0.39x",
        "largest max_model_len that fits: 1,600 (the pool holds no longer one)",
        "max_num_seqs lets 16 of them run at once",
        "on the host: swap space (873 blocks)",
    ):
        assert line in text, line
    rows = {line.split("  ")[1]: line.split() for line in text.splitlines() if "  " in line}
    assert rows["as asked"][-3:] == ["1,600", "14", "1"]
    assert rows["kv_cache_dtype fp8"][-3:] == ["1,600", "14", "1"]  # so many blocks, of half size
    assert rows["MHA: 8 KV heads, not 2"][-3:] == ["1,600", "14", "1"]
    assert rows["32"][1:5] == ["24", "50", "15.5", "12"]
    assert "Decode: sequences x context" in text
    assert "Prefill of one prompt" in text


def test_the_text_says_what_does_not_fit_or_is_not_known() -> None:
    text = text_report(plan_of(gpu=find_gpu(None, memory_bytes=2**29)))
    assert "GiB are needed before there is a pool, and gpu_memory_utilization allows 0.45" in text
    assert "largest max_model_len that fits: 0 (nothing fits)" in text
    assert "does not fit\n" in text.split("Sequences that fit")[1]
    assert "No floors: the rates of memory and products are not known" in text
    known = find_gpu(None, memory_bytes=2**29, bandwidth=1e12, flops=1e14)
    assert "Decode" not in text_report(plan_of(gpu=known))
    own = text_report(plan_of({**LLAMA, "num_key_value_heads": 8}, tensor_parallel_size=2))
    assert "Every head has keys and values of its own (MHA)" in own
    assert "on h200, each of 2: " in own


def test_json_has_the_same_numbers_under_their_names() -> None:
    plan = plan_of(lengths=(100,))
    found = json.loads(json.dumps(json_report(plan)))
    assert found["fits"] is True
    assert found["fit"]["memory"]["num_blocks"] == plan.fit.memory.num_blocks
    assert found["fit"]["memory"]["used_bytes"] == plan.fit.memory.used_bytes
    assert found["fit"]["bytes_per_token"] == 768
    assert [row["name"] for row in found["variants"]] == [one.name for one in plan.variants]
    assert found["decode"][0]["tokens_per_s"] == plan.decode[0].tokens_per_s
    assert found["prefill"][0]["tokens_per_s"] == plan.prefill[0].tokens_per_s
    assert found["gpu"]["memory_bytes"] == plan.gpu.memory_bytes
    assert json_report(plan_of(gpu=find_gpu(None, memory_bytes=2**29)))["fits"] is False


def test_columns_are_as_wide_as_they_need() -> None:
    lines = table(("name", "n"), [("one", "10"), ("longer", "5"), ("short",)]).splitlines()
    assert lines == ["name       n", "  one     10", "  longer   5", "  short"]


@pytest.mark.parametrize(
    ("ending", "begin"), [(".svg", b"<?xml"), (".png", b"\x89PNG"), (".PDF", b"%PDF")]
)
def test_a_plan_is_drawn(tmp_path: Path, ending: str, begin: bytes) -> None:
    path = tmp_path / f"plan{ending}"
    check_target(path)
    draw_plan(plan_of(lengths=(100, 1000)), path)
    assert path.read_bytes().startswith(begin)


def test_a_picture_has_what_the_plan_has(tmp_path: Path) -> None:
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none"}):
        draw_plan(plan_of(lengths=(100, 1000)), tmp_path / "a.svg")
        draw_plan(plan_of(gpu=find_gpu(None, memory_bytes=2**29)), tmp_path / "b.svg")
    whole, none = ((tmp_path / name).read_text() for name in ("a.svg", "b.svg"))
    for word in ("as asked", "kv_cache_dtype fp8", "MHA: 8 KV heads", "block_size 64", "context 1"):
        assert word in whole, word
    assert "Decode: tokens/s at most" in whole
    assert "No floors" in none


def test_what_cannot_be_drawn_is_told_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"a plot is one of .svg, .png, .pdf, got '.*a.bmp'"):
        check_target(tmp_path / "a.bmp")
    with pytest.raises(FileNotFoundError, match=r"no folder .*nowhere"):
        check_target(tmp_path / "nowhere" / "a.svg")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(RuntimeError, match=r"pip install 'pagedkv\[plot\]'"):
        check_target(tmp_path / "a.svg")
