"""Reading safetensors by many threads: every byte where it belongs, in whatever parts and however
many at once; errors name the file and leave no thread behind. On a GPU: tests/cuda."""

from __future__ import annotations

import os
import resource
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pagedkv.weights import open_checkpoint, streaming
from pagedkv.weights.streaming import spans_in, stream

TENSORS = {
    "matrix": torch.randn(37, 53),
    "half": torch.randn(1001).half(),
    "brain": torch.randn(3, 5, 7).bfloat16(),
    "scalar": torch.tensor(4.5),
    "nothing": torch.empty(0, 4),
    "scale": torch.randn(9).to(torch.float8_e4m3fn),
    "wide": torch.randn(11).to(torch.float8_e5m2),
    "ids": torch.arange(70_000),
    "flags": torch.tensor([True, False, True]),
    "bytes": torch.arange(200).to(torch.uint8),
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def assert_same(found: dict[str, torch.Tensor]) -> None:
    assert found.keys() == TENSORS.keys()
    for name, right in TENSORS.items():
        assert found[name].dtype == right.dtype
        assert found[name].shape == right.shape
        assert torch.equal(found[name].view(-1).view(torch.uint8), right.view(-1).view(torch.uint8))


@pytest.mark.parametrize("part_bytes", [16, 1000, 2**20])
@pytest.mark.parametrize("num_threads", [1, 5])
@pytest.mark.parametrize("ahead_bytes", [0, 10_000, 2**30])
def test_tensors_are_the_files_in_any_parts(
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    part_bytes: int,
    num_threads: int,
    ahead_bytes: int,
) -> None:
    monkeypatch.setattr(streaming, "_PART_BYTES", part_bytes)
    spans = spans_in(file, list(TENSORS))
    assert [span.offset for span in spans] == sorted(span.offset for span in spans)
    found = dict(stream(spans, "cpu", num_threads=num_threads, ahead_bytes=ahead_bytes))
    assert list(found) == [span.name for span in spans]
    assert_same(found)


@pytest.mark.parametrize("is_inference", [False, True])
def test_the_caller_may_be_in_inference_mode(file: Path, is_inference: bool) -> None:
    with torch.inference_mode(is_inference):
        found = dict(stream(spans_in(file, list(TENSORS)), "cpu"))
    assert_same(found)
    assert found["matrix"].is_inference() == is_inference


def test_only_some_tensors_are_on_their_way_at_once(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive, most = 0, 0
    start, wait = streaming._Readers.start, streaming._Readers.wait

    def started(self, span):  # type: ignore[no-untyped-def]
        nonlocal alive, most
        alive += span.num_bytes
        most = max(most, alive)
        return start(self, span)

    def waited(self, flight):  # type: ignore[no-untyped-def]
        nonlocal alive
        alive -= flight.span.num_bytes
        return wait(self, flight)

    monkeypatch.setattr(streaming._Readers, "start", started)
    monkeypatch.setattr(streaming._Readers, "wait", waited)
    assert_same(dict(stream(spans_in(file, list(TENSORS)), "cpu", ahead_bytes=12_000)))
    assert most == 560_000  # the largest, alone
    most = 0
    names = [name for name in TENSORS if name != "ids"]
    dict(stream(spans_in(file, names), "cpu", ahead_bytes=9_000))
    assert 7_844 <= most <= 9_000


def num_readers() -> int:
    return sum(thread.name.startswith("weights ") for thread in threading.enumerate())


def test_a_file_that_ends_too_early_is_named_and_no_thread_is_left(file: Path) -> None:
    spans = spans_in(file, list(TENSORS))
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"model\.safetensors: it ends before byte \d+"):
        dict(stream(spans, "cpu"))
    assert num_readers() == 0
    file.unlink()
    with pytest.raises(ValueError, match=r"model\.safetensors: .*No such file"):
        dict(stream(spans, "cpu"))
    assert num_readers() == 0


def test_a_file_that_cannot_be_read_is_named(file: Path) -> None:
    spans = spans_in(file, list(TENSORS))
    file.unlink()
    file.mkdir()
    with pytest.raises(ValueError, match=r"model\.safetensors: .*[Ii]s a directory"):
        dict(stream(spans, "cpu"))
    assert num_readers() == 0


def test_a_thread_has_one_file_open_at_a_time(tmp_path: Path) -> None:
    files = [tmp_path / f"{i}.safetensors" for i in range(40)]
    for i, file in enumerate(files):
        save_file({str(i): torch.full((100,), i)}, file)
    spans = [span for i, file in enumerate(files) for span in spans_in(file, [str(i)])]
    spans += spans[:1]  # a file that was read before
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    others = [os.open(tmp_path, os.O_RDONLY)]
    while others[-1] < 100:  # no number below is free
        others.append(os.open(tmp_path, os.O_RDONLY))
    resource.setrlimit(resource.RLIMIT_NOFILE, (others[-1] + 1 + 8, before[1]))
    try:
        found = list(stream(spans, "cpu", num_threads=3))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for other in others:
            os.close(other)
    assert [name for name, _ in found] == [*map(str, range(40)), "0"]
    assert all(bool((one == int(name)).all()) for name, one in found)


def test_a_thread_that_cannot_begin_tells_why(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(device: torch.device) -> None:
        raise RuntimeError("no stream for it")

    monkeypatch.setattr(streaming, "_Lane", fail)
    with pytest.raises(ValueError, match=r"model\.safetensors: no stream for it"):
        dict(stream(spans_in(file, list(TENSORS)), "cpu"))
    assert num_readers() == 0


def test_who_stops_in_the_middle_leaves_no_thread_behind(file: Path) -> None:
    tensors = stream(spans_in(file, list(TENSORS)), "cpu", ahead_bytes=0)
    next(tensors)
    assert num_readers() > 0
    tensors.close()  # type: ignore[attr-defined]
    assert num_readers() == 0


def test_a_dtype_that_torch_lacks_is_refused_in_words(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data.replace(b'"BF16"', b'"F9QQ"'))
    with pytest.raises(ValueError, match=r"tensor 'brain' is of F9QQ; supported are F64, F32"):
        spans_in(file, ["brain"])


def test_a_checkpoint_streams_to_where_its_tensors_go(file: Path) -> None:
    (file.parent / "config.json").write_text("{}")
    checkpoint = open_checkpoint(file.parent)
    assert checkpoint.stream is not None
    assert_same(dict(checkpoint.stream(torch.device("cpu"))))
    assert_same(dict(checkpoint.tensors()))
    assert {one.device.type for _, one in checkpoint.tensors()} == {"cpu"}
