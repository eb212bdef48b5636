"""Bytes of files to where they are to be, by one thread that lets the others of the interpreter run
meanwhile. Unlike the other operators it waits until all is done, so it is not for graphs, and what
it reads is no tensor: it is none of `pagedkv.ops.__all__`.
"""

from __future__ import annotations

import torch
from torch import Tensor

_read_file = torch.ops.pagedkv.read_file.default


def read_file(target: Tensor, fd: int, offset: int, *, staging: Tensor | None = None) -> None:
    """Read a file's bytes, as many as target has, and return when they are there.

    Args:
        target: [num_bytes] uint8, contiguous. On a GPU it is written in the order of the current
            stream.
        fd: an open file, whose position stays.
        offset: of the first byte.
        staging: [2 or more] uint8 in pinned memory, for a target on a GPU, on whose way there
            pieces of the file are in its halves in turn; of this thread alone meanwhile.

    Returns:
        Nothing.

    Mutates:
        target, staging.

    Raises:
        RuntimeError: dtype, layout or place not as above; or the file cannot be read, or ends
            before the last byte: some of target may be written then.

    Example:
        >>> import tempfile
        >>> target = torch.zeros(3, dtype=torch.uint8)
        >>> with tempfile.TemporaryFile() as file:
        ...     _ = file.write(bytes([7, 8, 9, 10])), file.flush()
        ...     read_file(target, file.fileno(), 1)
        >>> target
        tensor([ 8,  9, 10], dtype=torch.uint8)
    """
    _read_file(target, fd, offset, staging=staging)
