"""read_file on the CPU: the bytes of the file, its errors in words, and refusals. On a
GPU: tests/cuda/test_cuda_loading.py."""

from __future__ import annotations

import doctest
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pagedkv.ops import files
from pagedkv.ops.files import read_file

NUM_BYTES = 1000


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    """Of a file whose byte i is i % 251."""
    (tmp_path / "file").write_bytes(bytes(i % 251 for i in range(NUM_BYTES)))
    opened = os.open(tmp_path / "file", os.O_RDONLY)
    yield opened
    os.close(opened)


def empty(num_bytes: int) -> torch.Tensor:
    return torch.full((num_bytes,), 255, dtype=torch.uint8)


@pytest.mark.parametrize(("offset", "count"), [(0, 1000), (0, 0), (1000, 0), (3, 500), (999, 1)])
def test_the_bytes_are_the_file_s(fd: int, offset: int, count: int) -> None:
    around = empty(count + 2)
    read_file(around[1:-1], fd, offset)
    want = torch.arange(offset, offset + count) % 251
    assert torch.equal(around[1:-1].long(), want)
    assert around[0] == around[-1] == 255
    assert os.lseek(fd, 0, os.SEEK_CUR) == 0


def test_a_file_that_ends_too_early_is_told(fd: int) -> None:
    with pytest.raises(RuntimeError, match=r"pagedkv::read_file: it ends before byte 1001$"):
        read_file(empty(2), fd, 999)


def test_the_system_s_errors_are_told(fd: int, tmp_path: Path) -> None:
    folder = os.open(tmp_path, os.O_RDONLY)
    with pytest.raises(RuntimeError, match=r"pagedkv::read_file: Is a directory$"):
        read_file(empty(1), folder, 0)
    os.close(folder)
    with pytest.raises(RuntimeError, match=r"pagedkv::read_file: Bad file descriptor$"):
        read_file(empty(1), folder, 0)
    ends = os.pipe()
    with pytest.raises(RuntimeError, match=r"pagedkv::read_file: Illegal seek$"):
        read_file(empty(1), ends[0], 0)
    for end in ends:
        os.close(end)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": empty(4).char()}, "target has dtype .*, expected uint8"),
        ({"target": empty(8)[::2]}, r"target has strides \[2\], expected a contiguous tensor"),
        ({"target": empty(4).view(2, 2)}, r"target has shape \[2, 2\], expected \[num_bytes\]"),
        ({"fd": -1}, "fd is -1, expected 0 to 2147483647"),
        ({"fd": 2**31}, "fd is 2147483648, expected 0 to 2147483647"),
        ({"offset": -1}, "offset is -1, expected at least 0"),
        ({"staging": empty(4)}, "staging is given, expected none for a target on the CPU"),
    ],
)
def test_it_is_refused(fd: int, changes: dict[str, object], message: str) -> None:
    call: dict[str, object] = {"target": empty(4), "fd": fd, "offset": 0} | changes
    with pytest.raises(RuntimeError, match=f"pagedkv::read_file: {message}"):
        read_file(**call)  # type: ignore[arg-type]


def test_the_documented_example_is_true() -> None:
    results = doctest.testmod(files)
    assert results.attempted > 0
    assert results.failed == 0
