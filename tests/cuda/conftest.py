"""What is in this folder needs an NVIDIA GPU and pagedkv's CUDA library, and is skipped without;
RUN_ANYWHERE is the exception."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
sys.path[:0] = [  # calls.py: one valid call of every op; smollm2_questions.py; edits_by_hand.py
    str(HERE.parent / "ops"),
    str(HERE.parent / "models"),
    str(HERE.parent / "sampling"),
]

RUN_ANYWHERE = ("test_pairwise_cover.py",)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE not in item.path.parents or item.path.name in RUN_ANYWHERE:
            continue
        item.add_marker(pytest.mark.cuda)
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
