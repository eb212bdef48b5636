"""docs/paged-attention.md says what the kept tables say, and its figures are what is drawn."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from claims import figures, measure_sharing, pictures, tables, workloads
from claims.__main__ import ON_CPU, ON_GPU, main
from claims.scenes import SCENES, beams, copy_on_write, shared_prefix, swap
from rows import RESULTS

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "paged-attention.md"
NAMES = re.compile(r"Llama-3\.1-8B|Qwen3-0\.6B|SmolLM2-135M|H200|mixed256|\d{4}-\d\d-\d\d")
NUMBER = re.compile(r"(?<![\w.])[+-]?\d[\d,]*(?:\.\d+)?(?:e\+?\d+)?")
TABLES = {**ON_CPU, **ON_GPU}
DRAWN = {name: draw for name, draw in TABLES.items() if draw is not None}


def numbers_of(text: str) -> set[float]:
    return {float(one.rstrip(",").replace(",", "")) for one in NUMBER.findall(text)}


def page_text() -> str:
    """Without code, addresses and names."""
    text = re.sub(r"^`[^\n]*`\n```.*?```|`[^`\n]*`", "", PAGE.read_text(), flags=re.S | re.M)
    return NAMES.sub("", re.sub(r"\]\([^)]*\)", "]", text))


def parameters() -> set[float]:
    """What is asked for and not measured."""
    known: set[float] = {workloads.MAX_MODEL_LEN, 256, 16, 8, 32, 1.0}
    for one in workloads.LENGTHS.values():
        known |= {one.prompt_mean, one.prompt_sigma, one.output_mean, one.output_sigma}
    known |= {measure_sharing.PREFIX_LEN, measure_sharing.OWN_LEN, measure_sharing.OUTPUT_LEN}
    return known


def test_every_number_stands_in_a_table_that_the_page_links_to_or_is_a_parameter() -> None:
    allowed = parameters()
    linked = set(re.findall(r"\.\./benchmarks/results/([\w-]+\.md)", PAGE.read_text()))
    assert {name[len("2026-11-30-claims-") : -len(".md")] for name in linked} == set(TABLES)
    for name in linked:
        allowed |= numbers_of(NAMES.sub("", (RESULTS / name).read_text()))
    found = numbers_of(page_text())
    assert len(found) > 100
    assert found <= allowed, sorted(found - allowed)


def test_a_changed_number_is_found() -> None:
    assert numbers_of("-0.9 % of 9.753e+04 us, 80,000 tokens, 12.") == {-0.9, 97530, 80000, 12}
    assert 78.8 in numbers_of(page_text())


def test_every_figure_is_on_the_page_and_every_link_leads_somewhere() -> None:
    text = PAGE.read_text()
    shown = set(re.findall(r"!\[[^\]]*\]\(figures/([\w-]+)\.svg\)", text))
    assert shown == {*DRAWN, *(f"picture-{name}" for name in SCENES)}
    for target in re.findall(r"\]\(([^)]+)\)", text):
        assert (PAGE.parent / target).exists(), target
    kept = {path.name for path in figures.FOLDER.iterdir()}
    drawn = {f"picture-{name}.{suffix}" for name in SCENES for suffix in ("svg", "txt")}
    assert {f"{name}.svg" for name in DRAWN} | drawn <= kept


def words_of(svg: str) -> list[str]:
    return re.findall(r"<text [^>]*>([^<]*)</text>", svg)


@pytest.mark.parametrize("name", DRAWN)
def test_a_kept_figure_is_what_its_kept_table_gives(name: str, tmp_path: Path) -> None:
    table = tables.read(tables.newest(f"claims-{name}", RESULTS))
    drawn = figures.save(DRAWN[name](table), name, tmp_path).read_text()
    kept = (figures.FOLDER / f"{name}.svg").read_text()
    assert words_of(drawn)
    assert words_of(drawn) == words_of(kept)
    # Positions are those of this matplotlib; another one may round or place them differently.
    assert drawn.count("<path") == kept.count("<path")


def test_pictures_are_drawn_from_live_managers(tmp_path: Path) -> None:
    for path in pictures.save_all(tmp_path):
        assert path.read_text() == (figures.FOLDER / path.name).read_text(), path.name


def test_the_moments_are_what_their_titles_say() -> None:
    before, after = shared_prefix()
    assert before.snapshot.ref_counts.max() == 1
    assert (after.snapshot.ref_counts == 2).sum() == 2
    before, after = copy_on_write()
    assert (before.snapshot.ref_counts == 2).sum() == 3
    assert (after.snapshot.ref_counts == 2).sum() == 2
    here, gone, back = (moment.snapshot for moment in swap())
    assert here.block_ids.min() >= 0
    assert (gone.block_ids < 0).sum() == 3
    assert back.block_ids.min() >= 0
    assert back.block_ids[:3].tolist() != here.block_ids[:3].tolist()
    (moment,) = beams()
    assert sorted(set(moment.snapshot.ref_counts.tolist())) == [0, 1, 2, 3]


def test_an_unknown_claim_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["wast"])
    assert "unknown claims ['wast']: there are capacity, waste," in capsys.readouterr().err


def test_a_claim_is_measured_saved_and_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("rows.RESULTS", tmp_path)
    monkeypatch.setattr(figures, "FOLDER", tmp_path)
    monkeypatch.setattr(tables.newest, "__defaults__", (tmp_path,))
    monkeypatch.setattr(figures.save, "__defaults__", (tmp_path,))
    monkeypatch.setattr(pictures.save_all, "__defaults__", (tmp_path,))
    assert main(["capacity", "--quick", "--save"]) == 0
    assert len(list(tmp_path.glob("*-claims-capacity.md"))) == 1
    assert (tmp_path / "capacity.svg").exists()
    assert (tmp_path / "picture-beams.svg").exists()
    assert "waits though enough is free | yes" in capsys.readouterr().out
    (tmp_path / "capacity.svg").unlink()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["capacity", "--quick", "--save"]) == 0
    assert "matplotlib is not installed" in capsys.readouterr().out
    assert not (tmp_path / "capacity.svg").exists()
