"""Fixtures of the server's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from serving import Served, serving

from fake_model import make_tokenizer_folder  # isort: skip - serving puts it on the path


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer_folder(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def module_server(tokenizer_folder: Path) -> Iterator[Served]:
    with serving(tokenizer_folder) as served:
        yield served


@pytest.fixture
def served(module_server: Served) -> Iterator[Served]:
    """A server with default options, idle and with an empty prefix cache before each test, and idle
    after it.
    """
    module_server.wait_idle()
    module_server.ok("/reset_prefix_cache")
    yield module_server
    module_server.wait_idle()
