"""docs/paged-attention.md says what the kept tables say, and its figures are what is drawn."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from claims import figures, measure_sharing, pictures, tables, workloads
from claims.__main__ import ON_CPU, ON_GPU, main
from claims.scenes import SCENES, beams, copy_on_write, shared_prefix, swap
from claims.systems import PAGED, SYSTEMS
from claims.tables import select, value
from rows import RESULTS, Row

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


def linked_table(name: str) -> list[Row]:
    (found,) = set(re.findall(rf"results/([\d-]+claims-{name}\.md)", PAGE.read_text()))
    return tables.read(RESULTS / found)


def page_tables() -> list[list[tuple[str, list[float]]]]:
    """Of each table on the page its lines: what stands first, and the numbers behind it."""
    made = []
    for table in re.findall(r"(?:^\|.*\n)+", PAGE.read_text(), re.M):
        lines = [line.strip("|\n").split("|", 1) for line in table.splitlines()[2:]]
        made.append([(first.strip(" *"), in_order(rest)) for first, rest in lines])
    return made


def in_order(text: str) -> list[float]:
    return [float(one.rstrip(",").replace(",", "")) for one in NUMBER.findall(text)]


def test_waste_and_throughput_stand_on_the_page_as_in_their_tables() -> None:
    waste, throughput = map(dict, page_tables()[:2])
    kept = linked_table("waste")
    assert tuple(waste) == workloads.WORKLOADS
    for workload, numbers in waste.items():
        rows = [select(kept, name=one.name, shape=f"{workload}, ") for one in SYSTEMS]
        assert numbers == [value(row, "wasted") for (row,) in rows]
    kept = linked_table("gpu")
    assert list(throughput) == [row.name for row in kept]
    for row in kept:
        words = ("tok/s out", "requests/s", "sequences at once")
        factor = [] if row.name == PAGED.name else [row.baseline]
        expected = [*(value(row, word) for word in words), *factor, value(row, "simulated")]
        assert throughput[row.name] == expected


def test_block_sizes_and_shared_blocks_stand_on_the_page_as_in_their_tables() -> None:
    _, _, sizes, sharing = page_tables()
    kept, kernels = linked_table("block_size"), linked_table("kernels")
    for size, numbers in sizes:
        (row,) = [row for row in kept if row.name == f"block {size}"]
        expected = [value(row, word) for word in ("wasted", "entries a table", "hit rate")]
        timed = [row for row in kernels if row.shape.endswith(f", block {size}")]
        expected += [row.us for row in timed if row.name in ("decode", "prefill")]
        expected += [value(row, "tok/s out") for row in timed if row.name == "whole engine"]
        assert numbers == expected
    assert [size for size, _ in sizes] == ["1", "4", "8", "16", "32", "64", "128", "256"]
    lines = iter(sharing)
    for kind in measure_sharing.KINDS:
        mine = select(linked_table("sharing"), name=kind)
        assert next(lines) == (f"{kind}: saved", [value(row, "saved") for row in mine])
        pairs = [(value(row, "copied"), value(row, "blocks contiguous")) for row in mine]
        assert next(lines)[1] == [number for pair in pairs for number in pair]


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
