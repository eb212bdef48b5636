"""Fixtures of the engine's tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_model import make_tokenizer_folder


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer_folder(tmp_path_factory.mktemp("tokenizer"))
