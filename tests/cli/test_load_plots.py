"""The pictures of a run: their numbers."""

from __future__ import annotations

import io
from typing import Any

import pytest

from pagedkv.cli.load import Outcome, summarise

pytest.importorskip("matplotlib")

from pagedkv.cli.load.plots import load_figure


def panels(outcomes: list[Outcome]) -> tuple[dict[str, Any], str]:
    figure = load_figure("run", outcomes, summarise(outcomes))
    figure.savefig(io.BytesIO(), format="svg")  # it can be drawn
    return {axes.get_title(): axes for axes in figure.axes}, figure.get_suptitle()


def test_a_run_has_a_dot_for_each_answer_and_lines_for_distributions() -> None:
    outcomes = [Outcome(i, i + 0.1, (i + 0.5, i + 1.0), i + 1.5, 3, 2) for i in range(7)]
    outcomes.append(Outcome(7, 7, (), 8, 0, 0, "timeout"))
    found, title = panels(outcomes)
    assert title == "run\n7 completed, 1 failed in 8.0 s; 1.8 tok/s out"
    (dots,) = found["Whole answer, by arrival"].lines
    assert list(dots.get_xdata()) == list(range(7))
    assert list(dots.get_ydata()) == [1500] * 7
    sent, arrived = found["Time to first token"].lines
    assert list(sent.get_xdata()) == pytest.approx([400] * 7)
    assert list(arrived.get_xdata()) == pytest.approx([500] * 7)
    assert list(sent.get_ydata()) == pytest.approx([100 * i / 7 for i in range(1, 8)])
    assert [text.get_text() for text in found["Whole answer"].get_legend().get_texts()] == [
        "from sending",
        "from arrival",
    ]
    (between,) = found["Between two pieces"].lines
    assert list(between.get_xdata()) == pytest.approx([500] * 7)
    (levels,) = found["Requests at once"].lines
    assert max(levels.get_ydata()) == 2
    assert levels.get_ydata()[-1] == 0
    (rate,) = found["Pieces of answers"].lines
    assert sum(rate.get_ydata()) * 7 / 60 == pytest.approx(14)  # bins of 7 s / 60, two a request
    assert all(axes.get_xlim()[0] == 0 and axes.get_ylim()[0] == 0 for axes in found.values())


def test_a_run_without_any_answer_is_drawn_too() -> None:
    found, _ = panels([Outcome(0, 0, (), 0, 0, 0, "cannot connect")])
    assert len(found) == 6
