"""The pictures of a run: their numbers, and that they are SVG."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from pagedkv.cli.load import Outcome, summarise
from pagedkv.cli.load.chart import Panel, Series, render, thinned, ticks
from pagedkv.cli.load.plots import load_svg

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize(
    ("most", "found"),
    [
        (7, [0, 2, 4, 6, 8]),
        (1, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (6, [0, 1, 2, 3, 4, 5, 6]),
        (10.1, [0, 2, 4, 6, 8, 10, 12]),
        (1300, [0, 500, 1000, 1500]),
        (0.03, [0, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03]),
        (0, [0, 1]),
    ],
)
def test_ticks_are_round_and_reach_the_largest_value(most: float, found: list[float]) -> None:
    assert ticks(most) == pytest.approx(found)


def test_a_line_of_many_points_keeps_its_ends() -> None:
    many = [(float(i), float(i)) for i in range(10_000)]
    few = thinned(many)
    assert (len(few), few[0], few[-1]) == (500, many[0], many[-1])
    assert thinned(many[:500]) == many[:500]


def test_a_line_is_where_its_numbers_are() -> None:
    panel = Panel("t", "x", "y", [Series("s", [(0.0, 0.0), (5.0, 10.0)])])
    root = ElementTree.fromstring(render("<&>", "", [panel]))
    (line,) = [one for one in root.iter(f"{SVG}path") if one.get("stroke-width") == "2"]
    assert line.get("d") == "M58.0 208.0L356.0 46.0"  # from corner to corner of the axes
    assert "<&>" in [one.text for one in root.iter(f"{SVG}text")]


def test_a_run_has_a_dot_for_each_answer_and_lines_for_distributions() -> None:
    outcomes = [Outcome(i, i + 0.1, (i + 0.5, i + 1.0), i + 1.5, 3, 2) for i in range(7)]
    outcomes.append(Outcome(7, 7, (), 8, 0, 0, "timeout"))
    root = ElementTree.fromstring(load_svg("run", outcomes, summarise(outcomes)))
    assert len(list(root.iter(f"{SVG}circle"))) == 7
    lines = [one for one in root.iter(f"{SVG}path") if one.get("stroke-width") == "2"]
    assert len(lines) == 7  # two series each of first tokens and answers, and three alone
    texts = [one.text for one in root.iter(f"{SVG}text")]
    assert "7 completed, 1 failed in 8.0 s; 1.8 tok/s out" in texts
    for title in ("Time to first token", "Between two pieces", "Whole answer", "Requests at once"):
        assert title in texts


def test_a_run_without_any_answer_is_drawn_too() -> None:
    outcomes = [Outcome(0, 0, (), 0, 0, 0, "cannot connect")]
    ElementTree.fromstring(load_svg("run", outcomes, summarise(outcomes)))
