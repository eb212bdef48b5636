"""The README's picture is the command's own output, word for word."""

from __future__ import annotations

from pathlib import Path

from pagedkv.inspect import copy_on_write_example, draw_cache, example_names

README = Path(__file__).parents[2] / "README.md"


def drawn() -> str:
    """What `pagedkv draw` prints, without colours and trailing blanks."""
    text = "\n".join(
        f"== {stage.title}\n\n{draw_cache(stage.snapshot, example_names()).plain}"
        for stage in copy_on_write_example()
    )
    return "\n".join(line.rstrip() for line in text.splitlines()).strip()


def test_the_readme_shows_what_the_command_draws() -> None:
    text = README.read_text()
    begin, end = "<!-- pagedkv draw: begin -->\n```text\n", "\n```\n<!-- pagedkv draw: end -->"
    assert text.split(begin, 1)[1].split(end, 1)[0] == drawn()
