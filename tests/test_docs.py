"""What docs/ quotes from the sources is still there, word for word."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
QUOTED = re.compile(r"^`([\w/]+\.py)`\n```\n(.*?)```", flags=re.DOTALL | re.MULTILINE)
QUOTES = [
    (page, *quote)
    for page in sorted(ROOT.glob("docs/*.md"))
    for quote in QUOTED.findall(page.read_text())
]


def test_every_block_of_code_says_where_it_is_from() -> None:
    for page in ROOT.glob("docs/*.md"):
        quoted = sum(found == page for found, _, _ in QUOTES)
        assert page.read_text().count("```") == 2 * quoted > 0


@pytest.mark.parametrize(("page", "path", "code"), QUOTES)
def test_a_quote_is_in_its_source(page: Path, path: str, code: str) -> None:
    assert code in (ROOT / path).read_text(), page.name
