"""How many bytes of tensors are alive at once while code runs on a device, real or meta: what its
allocator would be asked for, without an allocator.
"""

from __future__ import annotations

import weakref
from types import TracebackType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_ROUNDING = 512  # bytes: torch's allocator gives tensors on a GPU multiples of it


class LiveMemory(TorchDispatchMode):
    """Within it, every storage that an operator returns on the device counts until it is freed.

    now, peak: bytes. What was there before is not counted.

    Example: of two temporaries after each other, one counts at a time:

    >>> with LiveMemory("meta") as memory:
    ...     x = torch.empty(1024, device="meta")
    ...     y = (x + 1) * 2
    >>> memory.now, memory.peak  # x and y; while y is made, x + 1 is alive too
    (8192, 12288)
    """

    def __init__(self, device: torch.device | str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device_type = torch.device(device).type
        self._known: set[int] = set()
        self.now = 0
        self.peak = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch's hook: keeping its compiler out of here would first import that, for seconds."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(one, torch.Tensor) and one.device.type == self._device_type:
                self._count(one.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known:
            return
        size = -(-storage.nbytes() // _ROUNDING) * _ROUNDING
        self._known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        super().__exit__(exc_type, exc_value, traceback)  # type: ignore[no-untyped-call]
