"""The arrays of a step, one behind the other in one piece of memory, so that one copy takes all of
them to the GPU. On a CPU the memory that is written is the memory that is read.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

_ALIGNMENT = 16  # bytes
_TORCH: dict[np.dtype[np.generic], torch.dtype] = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float64): torch.float64,
    np.dtype(np.float32): torch.float32,
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


class StepArrays:
    """Owner of the memory. begin(), take() each array and write it, send(); what take() returned
    is valid until the next begin().

    Two pinned pieces are used alternately: while the copy of one step may still read the first, the
    next step is written into the second. REQUIRES that a step's copy has ended before the next but
    one begins.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self._device = device
        self._num_bytes = num_bytes
        self._usual = self._pieces(num_bytes, 2 if self.on_gpu else 1)
        self._turn = 0
        self._piece = self._usual[0]
        self._end = 0

    def _pieces(self, num_bytes: int, count: int) -> list[_Piece]:
        num_bytes = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        hosts = [
            torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self.on_gpu) for _ in range(count)
        ]
        if not self.on_gpu:
            return [_Piece.of(host, host) for host in hosts]
        # The copies run in the order of the stream, so one piece there is enough.
        there = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        return [_Piece.of(host, there) for host in hosts]

    def begin(self, num_bytes: int) -> None:
        """Start a step whose arrays take at most num_bytes, alignment included. One that is larger
        than usual gets memory of its own.
        """
        self._end = 0
        self._turn = (self._turn + 1) % len(self._usual)
        self._piece = self._usual[self._turn]
        if num_bytes > self._num_bytes:
            (self._piece,) = self._pieces(num_bytes, 1)

    def take(self, dtype: type, *shape: int) -> tuple[NDArray[np.generic], torch.Tensor]:
        """An array to write, and the tensor that has its content on the device after send()."""
        kind = np.dtype(dtype)
        begin = self._end // kind.itemsize
        end = begin + math.prod(shape)
        self._end = -(-end * kind.itemsize // _ALIGNMENT) * _ALIGNMENT
        array, tensor = self._piece.arrays[kind][begin:end], self._piece.tensors[kind][begin:end]
        if len(shape) == 1:
            return array, tensor
        return array.reshape(shape), tensor.view(shape)

    def send(self) -> None:
        if self.on_gpu:
            host, there = self._piece.host, self._piece.there
            there[: self._end].copy_(host[: self._end], non_blocking=True)
