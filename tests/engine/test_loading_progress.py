"""The bar and the line about loading weights."""

from __future__ import annotations

import io
import logging

import pytest
import torch
from rich.console import Console

from pagedkv.engine.loading_progress import shown

TENSORS = [(str(i), torch.zeros(1000, dtype=torch.float32)) for i in range(5)]


def test_tensors_pass_and_the_log_has_their_bytes(caplog: pytest.LogCaptureFixture) -> None:
    times = iter([10.0, 11.0, 11.0, 11.0, 11.0, 12.0, 12.0])
    console = Console(file=io.StringIO(), force_terminal=False)
    with caplog.at_level(logging.INFO):
        passed = list(shown(iter(TENSORS), 5, console=console, clock=lambda: next(times)))
    assert [name for name, _ in passed] == list("01234")
    assert "5 tensors of 0.00 GB in 2.00 s: 0.00 GB/s" in caplog.text
    assert console.file.getvalue().strip() == ""  # type: ignore[attr-defined]


def test_a_terminal_shows_a_bar() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    list(shown(iter(TENSORS), 5, console=console))
    assert "Loading weights: 100%" in console.file.getvalue()  # type: ignore[attr-defined]
    assert "5/5" in console.file.getvalue()  # type: ignore[attr-defined]


def test_an_error_in_the_middle_is_passed_on() -> None:
    def failing():  # type: ignore[no-untyped-def]
        yield TENSORS[0]
        raise ValueError("cut short")

    console = Console(file=io.StringIO(), force_terminal=True)
    with pytest.raises(ValueError, match="cut short"):
        list(shown(failing(), 5, console=console))
