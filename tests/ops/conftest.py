"""One thread for each test: the machine's cores are shared by the test processes, and idle threads
that spin for work steal from the others. What runs on several threads is tested in
test_threads.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
