"""Safetensors read by many threads at once, straight to where the tensors are to be.

A tensor is cut into chunks. Each thread reads one from the file into pinned memory of its own and
starts its copy to the GPU on a stream of its own; while that copy runs it reads the next into its
other piece. So the disk, or the memory that holds the file already, the processor's copies and the
link all work at the same time, on several tensors at once. On a CPU, for which reading the files'
own pages is better, it is the same without streams.
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
from dataclasses import dataclass, field
from pathlib import Path

import torch

_CHUNK_BYTES = 8 * 2**20
_MAX_THREADS = 16
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
    """A tensor on its way. target: uint8 [num_bytes]. copies: events of copies that were started.
    REQUIRES the lock for all but target and ready.
    """

    span: Span
    target: torch.Tensor
    num_waiting: int  # chunks not read yet
    # The memory of target may have been another tensor's, which the device still reads.
    ready: torch.cuda.Event | None
    copies: list[torch.cuda.Event] = field(default_factory=list)
    error: BaseException | None = None


_Chunk = tuple[_Flight, int, int]  # begin and end in its bytes


class _Readers:
    """Threads that read chunks. Owner of the queue between them and the one who waits."""

    def __init__(self, device: torch.device, num_threads: int) -> None:
        self._device = device
        self._chunks: queue.SimpleQueue[_Chunk | None] = queue.SimpleQueue()
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
        num_chunks = math.ceil(span.num_bytes / _CHUNK_BYTES)
        flight = _Flight(span, target, num_chunks, ready)
        for begin in range(0, span.num_bytes, _CHUNK_BYTES):
            self._chunks.put((flight, begin, min(begin + _CHUNK_BYTES, span.num_bytes)))
        return flight

    def wait(self, flight: _Flight) -> torch.Tensor:
        """The tensor, in the order of the current stream."""
        with self._changed:
            self._changed.wait_for(lambda: flight.error or not flight.num_waiting)
        if flight.error is not None:
            raise ValueError(f"{flight.span.file}: {flight.error}") from flight.error
        for copy in flight.copies:
            torch.cuda.current_stream(self._device).wait_event(copy)
        return flight.target.view(flight.span.dtype).view(flight.span.shape)

    def stop(self) -> None:
        """Also in the middle; the threads have ended when it returns."""
        self._is_stopped = True
        for _ in self._threads:
            self._chunks.put(None)
        for thread in self._threads:
            thread.join()

    @torch.inference_mode()  # of each thread its own; targets may be tensors made under it
    def _work(self) -> None:
        with contextlib.ExitStack() as files:
            opened: dict[Path, int] = {}
            lane = _Lane(self._device)
            while (chunk := self._chunks.get()) is not None:
                if self._is_stopped:
                    continue
                flight, begin, end = chunk
                copy, error = None, None
                try:
                    path = flight.span.file
                    if path not in opened:
                        opened[path] = files.enter_context(path.open("rb", buffering=0)).fileno()
                    copy = lane.take(opened[path], flight, begin, end)
                except Exception as caught:
                    error = caught
                with self._changed:
                    flight.num_waiting -= 1
                    flight.error = flight.error or error
                    if copy is not None:
                        flight.copies.append(copy)
                    if error is not None or not flight.num_waiting:
                        self._changed.notify_all()
            lane.finish()


class _Lane:
    """One thread's way to the device: its stream and two pinned pieces, used alternately. Made and
    used by that thread, whose current stream it is.

    A call that lets other threads run may have to wait for the interpreter afterwards, so a chunk
    makes few of them.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._turn = 0
        self._ends: list[torch.cuda.Event | None] = [None, None]
        self._pieces: list[torch.Tensor | None] = [None, None]
        if self._on_gpu:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            torch.cuda.set_stream(self._stream)

    def take(self, fd: int, flight: _Flight, begin: int, end: int) -> torch.cuda.Event | None:
        """Read bytes [begin, end) of a tensor and start their copy; the event behind it."""
        target, offset = flight.target[begin:end], flight.span.offset + begin
        self._turn = 1 - self._turn
        previous = self._ends[self._turn]
        if previous is not None and not _has_passed(previous):
            previous.synchronize()
        piece = self._piece()[: end - begin]
        _read(fd, piece, offset)
        if flight.ready is None:
            target.copy_(piece)
            return None
        if not _has_passed(flight.ready):
            self._stream.wait_event(flight.ready)
        target.copy_(piece, non_blocking=True)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(self._stream)
        self._ends[self._turn] = done
        return done

    def _piece(self) -> torch.Tensor:
        """The one whose turn it is. Pinned when it is first needed."""
        piece = self._pieces[self._turn]
        if piece is None:
            piece = torch.empty(_CHUNK_BYTES, dtype=torch.uint8, pin_memory=self._on_gpu)
            self._pieces[self._turn] = piece
        return piece

    def finish(self) -> None:
        """Nothing reads the pinned pieces any more."""
        for end in self._ends:
            if end is not None:
                end.synchronize()


def _has_passed(event: torch.cuda.Event) -> bool:
    return bool(event.query())  # type: ignore[no-untyped-call]


def _read(fd: int, target: torch.Tensor, offset: int) -> None:
    memory = target.numpy().data
    while memory:
        count = os.preadv(fd, [memory], offset)
        if count == 0:
            raise OSError(f"it ends before byte {offset + len(memory)}")
        memory, offset = memory[count:], offset + count


def stream(
    spans: Iterable[Span],
    device: torch.device | str,
    *,
    num_threads: int | None = None,
    ahead_bytes: int = _AHEAD_BYTES,
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor on the device) of each span, in their order. A tensor is the caller's, valid in
    the order of the stream that is current when it comes.

    Args:
        num_threads: None: one for each processor, at most 16.
        ahead_bytes: of tensors on their way at once; one at least.

    Raises:
        ValueError: a file cannot be read, or ends too early; it names the file.
    """
    place = torch.device(device)
    readers = _Readers(place, num_threads or min(_MAX_THREADS, os.cpu_count() or 1))
    flights: deque[_Flight] = deque()
    waiting = deque(spans)
    num_bytes = 0
    try:
        while flights or waiting:
            while waiting and (not flights or num_bytes + waiting[0].num_bytes <= ahead_bytes):
                flights.append(readers.start(waiting.popleft()))
                num_bytes += flights[-1].span.num_bytes
            flight = flights.popleft()
            num_bytes -= flight.span.num_bytes
            yield flight.span.name, readers.wait(flight)
    finally:
        readers.stop()
