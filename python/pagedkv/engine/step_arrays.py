"""The arrays of a step, one behind the other in one piece of memory, so that one copy takes all of
them to the GPU. On a CPU the memory that is written is the memory that is read.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

_ALIGNMENT = 16  # bytes
_TORCH = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float64): torch.float64,
    np.dtype(np.float32): torch.float32,
}


class StepArrays:
    """Owner of the memory. begin(), take() each array and write it, send(); what take() returned
    is valid until the next begin().

    Two pinned pieces are used alternately: while the copy of one step may still read the first, the
    next step is written into the second. REQUIRES that a step's copy has ended before the next but
    one begins.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._device = device
        self._usual = self._pieces(num_bytes, 2 if self._on_gpu else 1)
        self._turn = 0
        self._host, self._there = self._usual[0]
        self._memory: NDArray[np.uint8] = self._host.numpy()
        self._end = 0

    def _pieces(self, num_bytes: int, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        hosts = [
            torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._on_gpu) for _ in range(count)
        ]
        if not self._on_gpu:
            return [(host, host) for host in hosts]
        # The copies run in the order of the stream, so one piece there is enough.
        there = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        return [(host, there) for host in hosts]

    def begin(self, num_bytes: int) -> None:
        """Start a step whose arrays take at most num_bytes, alignment included. One that is larger
        than usual gets memory of its own.
        """
        self._end = 0
        self._turn = (self._turn + 1) % len(self._usual)
        self._host, self._there = self._usual[self._turn]
        if num_bytes > self._host.numel():
            ((self._host, self._there),) = self._pieces(num_bytes, 1)
        self._memory = self._host.numpy()

    def take(self, dtype: type, *shape: int) -> tuple[NDArray[np.generic], torch.Tensor]:
        """An array to write, and the tensor that has its content on the device after send()."""
        kind = np.dtype(dtype)
        begin = self._end
        end = begin + kind.itemsize * int(np.prod(shape))
        self._end = -(-end // _ALIGNMENT) * _ALIGNMENT
        array = self._memory[begin:end].view(kind).reshape(shape)
        return array, self._there[begin:end].view(_TORCH[kind]).view(shape)

    def send(self) -> None:
        if self._on_gpu:
            self._there[: self._end].copy_(self._host[: self._end], non_blocking=True)
