"""Arrays of a step to the device, one behind the other in one piece of memory, so that one copy
takes all of them. On a CPU the memory that is written is the memory that is read.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

_ALIGNMENT = 8  # bytes
_TORCH: dict[np.dtype[np.generic], torch.dtype] = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
}


class _Piece(NamedTuple):
    """Memory that is written and memory that is read, each as a whole of every type: a slice of one
    of them is all that an array costs."""

    host: torch.Tensor
    there: torch.Tensor
    arrays: dict[np.dtype[np.generic], NDArray[np.generic]]
    tensors: dict[np.dtype[np.generic], torch.Tensor]

    @staticmethod
    def of(host: torch.Tensor, there: torch.Tensor) -> _Piece:
        memory = host.numpy()
        return _Piece(
            host,
            there,
            {kind: memory.view(kind) for kind in _TORCH},
            {kind: there.view(type_) for kind, type_ in _TORCH.items()},
        )


class PackedCopy:
    """Owner of the memory. What send() returned is valid until the next send().

    Two pinned pieces are used alternately: while the copy of one step may still read the first, the
    next step is written into the second. REQUIRES that a step's copy has ended before the next but
    one is sent.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        """num_bytes: of a usual step. A larger one takes memory of its own."""
        self._on_gpu = device.type == "cuda"
        self._device = device
        self._num_bytes = num_bytes
        self._usual = self._pieces(num_bytes, 2 if self._on_gpu else 1)
        self._turn = 0
        self.num_bytes_sent = 0

    def _pieces(self, num_bytes: int, count: int) -> list[_Piece]:
        num_bytes = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        hosts = [
            torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._on_gpu) for _ in range(count)
        ]
        if not self._on_gpu:
            return [_Piece.of(host, host) for host in hosts]
        # The copies run in the order of the stream, so one piece there is enough.
        there = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        return [_Piece.of(host, there) for host in hosts]

    def usual(self, dtype: torch.dtype, size: int) -> torch.Tensor:
        """Where the first array of a usual step is on the device."""
        return self._usual[0].there.view(dtype)[:size]

    def send(self, *arrays: NDArray[np.generic]) -> list[torch.Tensor] | None:
        """The arrays, of int32 or int64, on the device; None: all are empty, and nothing is
        copied.
        """
        places, end = [], 0
        for array in arrays:
            begin = -(-end // _ALIGNMENT) * _ALIGNMENT
            places.append(begin // array.itemsize)
            end = begin + array.nbytes if array.size else end
        if end == 0:
            return None
        self._turn = (self._turn + 1) % len(self._usual)
        piece = self._usual[self._turn]
        if end > self._num_bytes:
            (piece,) = self._pieces(end, 1)
        sent = []
        for array, begin in zip(arrays, places, strict=True):
            piece.arrays[array.dtype][begin : begin + array.size] = array
            sent.append(piece.tensors[array.dtype][begin : begin + array.size])
        if self._on_gpu:
            piece.there[:end].copy_(piece.host[:end], non_blocking=True)
        self.num_bytes_sent += end
        return sent
