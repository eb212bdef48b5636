"""Weights streamed to a GPU: the bytes of the file, also through parts and pieces that divide
nothing, several tensors and files at once and memory that is used again while the device still
reads it; errors name the file; who stops in the middle leaves nothing behind. And read_file."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from small_llama import CONFIG, seeded_tensors

from pagedkv.models import load_model
from pagedkv.ops.files import read_file
from pagedkv.weights import open_checkpoint, streaming
from pagedkv.weights.streaming import Span, spans_in, stream


def random_files(folder: Path, num_files: int) -> tuple[list[Span], dict[str, torch.Tensor]]:
    """20 tensors, of 1 kB to 3 MB, among the files."""
    tensors = {f"t{i}": torch.randn(300 + 40_001 * i) for i in range(20)}
    spans = []
    for i in range(num_files):
        own = dict(list(tensors.items())[i::num_files])
        save_file(own, folder / f"{i}.safetensors")
        spans += spans_in(folder / f"{i}.safetensors", list(own))
    return spans, tensors


def num_readers() -> int:
    return sum(thread.name.startswith("weights ") for thread in threading.enumerate())


@pytest.mark.parametrize(
    ("part_bytes", "staging_bytes"),
    [(4096, 4096), (2**20, 2**16), (1_000_003, 65_537), (2**24, 2**22), (300_000, 2**22)],
)
@pytest.mark.parametrize("num_files", [1, 3])
def test_tensors_on_the_gpu_are_the_files(
    device: torch.device,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    part_bytes: int,
    staging_bytes: int,
    num_files: int,
) -> None:
    monkeypatch.setattr(streaming, "_PART_BYTES", part_bytes)
    monkeypatch.setattr(streaming, "_STAGING_BYTES", staging_bytes)
    spans, tensors = random_files(tmp_path, num_files)
    sums: dict[str, torch.Tensor] = {}
    scratch = torch.randn(4096, 4096, device=device)
    for name, tensor in stream(spans, device, num_threads=6, ahead_bytes=2**20):
        assert tensor.device == device
        for _ in range(4):
            scratch = scratch @ scratch * 1e-2  # the device is busy when the tensor is freed
        sums[name] = tensor.clone()
        del tensor
    assert list(sums) == [span.name for span in spans]
    for name, right in tensors.items():
        assert torch.equal(sums[name].cpu(), right), name


def test_the_consumer_may_have_a_stream_of_its_own(device: torch.device, tmp_path: Path) -> None:
    spans, tensors = random_files(tmp_path, 2)
    with torch.cuda.stream(torch.cuda.Stream(device)):
        found = {name: one.clone().cpu() for name, one in stream(spans, device, ahead_bytes=2**21)}
    assert all(torch.equal(found[name], right) for name, right in tensors.items())


def test_a_file_that_ends_too_early_is_named(device: torch.device, tmp_path: Path) -> None:
    spans, _ = random_files(tmp_path, 3)
    short = tmp_path / "1.safetensors"
    os.truncate(short, short.stat().st_size - 20)
    with pytest.raises(ValueError, match=r"1\.safetensors: it ends before byte \d+$"):
        list(stream(spans, device))
    assert num_readers() == 0
    short.unlink()
    with pytest.raises(ValueError, match=r"1\.safetensors: .*No such file"):
        list(stream(spans, device))
    assert num_readers() == 0


def test_who_stops_in_the_middle_leaves_nothing_behind(
    device: torch.device, tmp_path: Path
) -> None:
    spans, tensors = random_files(tmp_path, 1)
    held = torch.cuda.memory_allocated(device)
    for num_taken in (1, 7):
        streamed = stream(spans, device, num_threads=4)
        taken = dict(next(streamed) for _ in range(num_taken))
        streamed.close()  # type: ignore[attr-defined]
        assert num_readers() == 0
        assert all(torch.equal(one.cpu(), tensors[name]) for name, one in taken.items())
        del taken
        assert torch.cuda.memory_allocated(device) == held
    assert len(list(stream(spans, device))) == len(spans)


def test_a_model_that_was_streamed_is_that_of_the_tensors(
    device: torch.device, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file(seeded_tensors(), tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    streamed = load_model(
        checkpoint.config, checkpoint.tensors(device), dtype=torch.bfloat16, device=device
    )
    right = load_model(CONFIG, seeded_tensors().items(), dtype=torch.bfloat16, device=device)
    hidden = torch.randn(5, 256, device=device).bfloat16()
    assert torch.equal(streamed.compute_logits(hidden), right.compute_logits(hidden))


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    """Of a file whose byte i is i % 251."""
    (tmp_path / "file").write_bytes((torch.arange(100_000) % 251).byte().numpy().tobytes())
    opened = os.open(tmp_path / "file", os.O_RDONLY)
    yield opened
    os.close(opened)


def pinned(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


@pytest.mark.parametrize("staging_bytes", [2, 3, 1000, 4097, 65_536, 2**20])
def test_read_file_reads_any_bytes_through_any_pieces(
    device: torch.device, fd: int, staging_bytes: int
) -> None:
    staging = pinned(staging_bytes)
    counts = (0, 1, 5, 300) if staging_bytes < 1000 else (0, 1, 999, 4096, 65_536, 99_990)
    for count in counts:
        for offset in (0, 7):
            around = torch.full((count + 2,), 255, dtype=torch.uint8, device=device)
            read_file(around[1:-1], fd, offset, staging=staging)
            got = around.cpu().long()
            assert torch.equal(got[1:-1], torch.arange(offset, offset + count) % 251)
            assert got[0] == got[-1] == 255


def test_read_file_is_in_the_order_of_the_current_stream(device: torch.device, fd: int) -> None:
    target = torch.empty(50_000, dtype=torch.uint8, device=device)
    with torch.cuda.stream(torch.cuda.Stream(device)):
        torch.cuda._sleep(50_000_000)
        target.fill_(255)
        read_file(target, fd, 0, staging=pinned(4096))
    assert torch.equal(target.cpu().long(), torch.arange(50_000) % 251)


def test_read_file_leaves_its_staging_alone_when_it_fails(device: torch.device, fd: int) -> None:
    target, staging = torch.empty(100_001, dtype=torch.uint8, device=device), pinned(20_000)
    with pytest.raises(RuntimeError, match=r"pagedkv::read_file: it ends before byte 100001$"):
        read_file(target, fd, 0, staging=staging)
    staging.fill_(255)  # no copy reads it any more
    assert torch.equal(target[:90_000].cpu().long(), torch.arange(90_000) % 251)


def test_read_file_refuses_what_it_cannot_go_through(device: torch.device, fd: int) -> None:
    target = torch.empty(10, dtype=torch.uint8, device=device)
    for bad, message in (
        (None, "staging is missing, expected pinned memory for a target on cuda:0"),
        (target.clone(), "staging is on cuda:0, expected cpu"),
        (pinned(1), "staging_bytes is 1, expected at least 2"),
        (pinned(8).char(), "staging has dtype .*, expected uint8"),
        (torch.empty(8, dtype=torch.uint8), "staging is in memory that is not pinned"),
    ):
        with pytest.raises(RuntimeError, match=f"pagedkv::read_file: {message}"):
            read_file(target, fd, 0, staging=bad)
    with pytest.raises(RuntimeError, match="target is on cpu, expected a cuda device"):
        read_file(target.cpu(), fd, 0, staging=target)
