"""Safetensors read by many threads at once, straight to where the tensors are to be.

A tensor is cut into parts. Each thread has one read by `pagedkv.ops.files.read_file`, which on a
GPU goes through pinned memory of the thread's own and its stream: a piece of the part is copied to
the device while the next one is read. So the disk, or the memory that holds the file already, the
processor's copies and the link all work at the same time, on several tensors at once, and the
interpreter, which only one thread can have, is needed a few times a part.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from pagedkv.ops.files import read_file

_PART_BYTES = 32 * 2**20
# Of pinned memory, which takes long to get: a thread's two pieces of a part.
_STAGING_BYTES = 4 * 2**20
# So many fill the link; more take the processor from the one that uses the tensors.
_MAX_THREADS = 12
# Tensors on their way at once; a larger one goes alone.
_AHEAD_BYTES = 2**30
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, slots=True)
class Span:
    """Where a tensor lies: num_bytes from offset in a file."""

    name: str
    file: Path
    offset: int
    num_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]


def spans_in(file: Path, names: Sequence[str]) -> list[Span]:
    """Of these tensors of a file, in the order in which they lie. REQUIRES that the safetensors
    library has checked the header.

    Raises:
        ValueError: a tensor's dtype is not one that torch has.
    """
    with file.open("rb") as source:
        header_len = int.from_bytes(source.read(8), "little")
        header = json.loads(source.read(header_len))
    spans = []
    for name in names:
        one = header[name]
        if one["dtype"] not in _DTYPES:
            raise ValueError(
                f"{file}: tensor {name!r} is of {one['dtype']}; supported are {', '.join(_DTYPES)}"
            )
        begin, end = one["data_offsets"]
        spans.append(
            Span(
                name,
                file,
                8 + header_len + begin,
                end - begin,
                _DTYPES[one["dtype"]],
                tuple(one["shape"]),
            )
        )
    return sorted(spans, key=lambda span: span.offset)


@dataclass(slots=True, eq=False)
class _Flight:
    """A tensor on its way. target: uint8 [num_bytes]. num_waiting and error REQUIRE the lock."""

    span: Span
    target: torch.Tensor
    num_waiting: int  # parts that are not there yet
    # The memory of target may have been another tensor's, which the device still reads.
    ready: torch.cuda.Event | None
    error: BaseException | None = None


_Part = tuple[_Flight, int, int]  # begin and end in its bytes


class _Readers:
    """Threads that read parts. Owner of the queue between them and the one who waits."""

    def __init__(self, device: torch.device, num_threads: int) -> None:
        self._device = device
        self._parts: queue.SimpleQueue[_Part | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._is_stopped = False
        self._threads = [
            threading.Thread(target=self._work, name=f"weights {i}", daemon=True)
            for i in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def start(self, span: Span) -> _Flight:
        target = torch.empty(span.num_bytes, dtype=torch.uint8, device=self._device)
        ready = None
        if self._device.type == "cuda":
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record()
        flight = _Flight(span, target, math.ceil(span.num_bytes / _PART_BYTES), ready)
        for begin in range(0, span.num_bytes, _PART_BYTES):
            self._parts.put((flight, begin, min(begin + _PART_BYTES, span.num_bytes)))
        return flight

    def wait(self, flight: _Flight) -> torch.Tensor:
        """The tensor, all of which is there."""
        with self._changed:
            self._changed.wait_for(lambda: flight.error or not flight.num_waiting)
        if flight.error is not None:
            raise ValueError(f"{flight.span.file}: {_told(flight.error)}") from flight.error
        return flight.target.view(flight.span.dtype).view(flight.span.shape)

    def stop(self) -> None:
        """Also in the middle; the threads have ended when it returns."""
        self._is_stopped = True
        for _ in self._threads:
            self._parts.put(None)
        for thread in self._threads:
            thread.join()

    @torch.inference_mode()  # of each thread its own; targets may be tensors made under it
    def _work(self) -> None:
        with contextlib.ExitStack() as file:
            opened: tuple[Path, int] | None = None
            lane: _Lane | None = None
            while (part := self._parts.get()) is not None:
                if self._is_stopped:
                    continue
                flight, begin, end = part
                error = None
                try:
                    lane = lane or _Lane(self._device)
                    path = flight.span.file
                    # One at a time: checkpoints of some hundred files would have all threads
                    # together open more than a process may.
                    if opened is None or opened[0] != path:
                        file.close()
                        opened = None
                        source = file.enter_context(path.open("rb", buffering=0))
                        opened = path, source.fileno()
                    lane.take(opened[1], flight, begin, end)
                except Exception as caught:
                    error = caught
                with self._changed:
                    flight.num_waiting -= 1
                    flight.error = flight.error or error
                    if flight.error is not None or not flight.num_waiting:
                        self._changed.notify_all()


class _Lane:
    """One thread's way to the device: on a GPU a stream and pinned memory. Made and used by that
    thread, whose current stream it is.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._staging: torch.Tensor | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            torch.cuda.set_stream(self._stream)

    def take(self, fd: int, flight: _Flight, begin: int, end: int) -> None:
        """Bring bytes [begin, end) of a tensor to where they are to be."""
        if self._stream is not None and flight.ready is not None:
            self._stream.wait_event(flight.ready)
            if self._staging is None:
                self._staging = torch.empty(_STAGING_BYTES, dtype=torch.uint8, pin_memory=True)
        offset = flight.span.offset + begin
        read_file(flight.target[begin:end], fd, offset, staging=self._staging)


def _told(error: BaseException) -> str:
    return str(error).removeprefix("pagedkv::read_file: ")


def stream(
    spans: Iterable[Span],
    device: torch.device | str,
    *,
    num_threads: int | None = None,
    ahead_bytes: int = _AHEAD_BYTES,
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor on the device) of each span, in their order. A tensor is the caller's, and its
    bytes are there; its memory is of the stream that is current while the iterator runs.

    Args:
        num_threads: None: one for each processor, at most 12.
        ahead_bytes: of tensors on their way at once, beside the caller's; one at least.

    Raises:
        ValueError: a file cannot be read, or ends too early; it names the file.
    """
    place = torch.device(device)
    readers = _Readers(place, num_threads or min(_MAX_THREADS, os.cpu_count() or 1))
    flights: deque[_Flight] = deque()
    waiting = deque(spans)
    num_bytes = 0

    def start() -> None:
        nonlocal num_bytes
        while waiting and (not flights or num_bytes + waiting[0].num_bytes <= ahead_bytes):
            flights.append(readers.start(waiting.popleft()))
            num_bytes += flights[-1].span.num_bytes

    try:
        start()
        while flights:
            flight = flights.popleft()
            num_bytes -= flight.span.num_bytes
            tensor = readers.wait(flight)
            start()  # before the caller, who may take long, has it
            yield flight.span.name, tensor
            del flight, tensor
    finally:
        readers.stop()
