"""Fixtures of the live view's tests: the engine tests' fake model, and a browser for all pages."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import Page, browsing, chromium

sys.path.insert(0, str(Path(__file__).parent.parent / "engine"))
sys.path.insert(0, str(Path(__file__).parent.parent / "server"))
sys.path.insert(0, str(Path(__file__).parent.parent / "replay"))

from fake_model import make_tokenizer_folder


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer_folder(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def module_browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    if chromium() is None:
        refuse = pytest.fail if os.environ.get("CI") else pytest.skip
        refuse("no Chromium here: apt-get install chromium")
    with browsing(tmp_path_factory.mktemp("browser")) as page:
        yield page


@pytest.fixture
def browser(module_browser: Page) -> Iterator[Page]:
    """An empty page, whose scripts must not have failed when the test ends."""
    yield module_browser
    module_browser.open("about:blank")
    problems, module_browser.problems = module_browser.problems, []
    assert not problems
