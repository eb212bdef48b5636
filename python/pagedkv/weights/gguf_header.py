"""The header of a GGUF file: metadata and the place of every tensor, each count and offset checked
against the size of the file before it is used.

The `gguf` package's own reader trusts counts and takes seconds over a vocabulary; this one reads
nothing outside the file, allocates nothing that the file does not hold, and leaves the tensors'
formats (sizes, dequantising) to that package. Used by gguf_checkpoint.py.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMS = 4
DEFAULT_ALIGNMENT = 32

# GGUF's value types: struct code, or what is read by its own rule.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
_BOOL, _STRING, _ARRAY = 7, 8, 9
# Least bytes of one entry, to refuse a count that cannot fit before looping over it.
_MIN_KEY_VALUE = 8 + 4 + 1
_MIN_TENSOR = 8 + 4 + 4 + 8


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where a tensor lies. shape is in torch's order, rows first; offset from the file's begin."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """Metadata by key (scalars, strings, lists of strings, NumPy arrays) and tensors by name."""

    metadata: dict[str, object]
    tensors: dict[str, TensorPlace]


class _Reader:
    """A cursor over the file that never leaves it."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self.size = len(data)
        self.at = 0

    def fail(self, what: str) -> NoReturn:
        raise ValueError(f"{self._path}: not a valid GGUF file: {what}")

    def skip(self, num_bytes: int, what: str) -> int:
        """Step over num_bytes; returns where they begin."""
        begin = self.at
        if num_bytes > self.size - begin:
            self.fail(
                f"{what} needs {num_bytes} bytes at {begin}, but the file ends at {self.size}"
            )
        self.at = begin + num_bytes
        return begin

    def number(self, code: str, what: str) -> int | float:
        size = struct.calcsize("<" + code)
        begin = self.skip(size, what)
        (value,) = struct.unpack_from("<" + code, self._data, begin)
        assert isinstance(value, int | float)
        return value

    def count(self, code: str, what: str, min_bytes: int) -> int:
        """A count of entries of at least min_bytes each."""
        value = int(self.number(code, what))
        if value * min_bytes > self.size - self.at:
            self.fail(f"{what} is {value}, more than the rest of the file can hold")
        return value

    def string(self, what: str) -> str:
        length = self.count("Q", f"length of {what}", 1)
        begin = self.skip(length, what)
        try:
            return self._data[begin : begin + length].decode()
        except UnicodeDecodeError as error:
            self.fail(f"{what} is not UTF-8: {error}")

    def value(self, what: str) -> object:
        kind = int(self.number("I", f"type of {what}"))
        if kind == _ARRAY:
            return self._array(what)
        return self._scalar(kind, what)

    def _scalar(self, kind: int, what: str) -> object:
        if kind == _STRING:
            return self.string(what)
        if kind == _BOOL:
            return bool(self.number("B", what))
        if kind not in _SCALARS:
            self.fail(f"{what} has the unknown value type {kind}")
        return self.number(_SCALARS[kind], what)

    def _array(self, what: str) -> object:
        kind = int(self.number("I", f"element type of {what}"))
        if kind == _STRING:
            return self._strings(what)
        code = "?" if kind == _BOOL else _SCALARS.get(kind)
        if code is None:
            self.fail(f"{what} is a list of the value type {kind}, which is not supported")
        dtype = np.dtype(code).newbyteorder("<")
        count = self.count("Q", f"length of {what}", dtype.itemsize)
        begin = self.skip(count * dtype.itemsize, what)
        return np.frombuffer(self._data, dtype, count, begin).copy()

    def _strings(self, what: str) -> list[str]:
        # One entry of a vocabulary costs a few operations here, so no call per entry.
        count = self.count("Q", f"length of {what}", 8)
        unpack = struct.Struct("<Q").unpack_from
        data, at, size = self._data, self.at, self.size
        found = []
        for _ in range(count):
            end = at + 8
            if end <= size:
                end += unpack(data, at)[0]
            if end > size:
                self.fail(f"an entry of {what} at {at} ends at {end}, behind the file's {size}")
            found.append(data[at + 8 : end])
            at = end
        self.at = at
        try:
            return [entry.decode() for entry in found]
        except UnicodeDecodeError as error:
            self.fail(f"an entry of {what} is not UTF-8: {error}")


def read_header(path: Path, data: mmap.mmap) -> GGUFHeader:
    """Read and check the header of a mapped file.

    Raises:
        ValueError: naming the file and what is wrong with it.
    """
    reader = _Reader(path, data)
    if data[: len(MAGIC)] != MAGIC:
        reader.fail(f"it begins with {bytes(data[:4])!r}, not with {MAGIC!r}")
    reader.skip(len(MAGIC), "the magic")
    version = int(reader.number("I", "the version"))
    if version not in VERSIONS:
        reader.fail(f"version {version} is not supported, only {VERSIONS} in little-endian order")
    num_tensors = reader.count("Q", "the number of tensors", _MIN_TENSOR)
    num_pairs = reader.count("Q", "the number of metadata entries", _MIN_KEY_VALUE)
    metadata: dict[str, object] = {}
    for _ in range(num_pairs):
        key = reader.string("a metadata key")
        if key in metadata:
            reader.fail(f"the metadata key {key!r:.200} appears twice")
        metadata[key] = reader.value(key)
    return GGUFHeader(metadata, _tensors(reader, num_tensors, _alignment(reader, metadata)))


def _alignment(reader: _Reader, metadata: dict[str, object]) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        reader.fail(f"general.alignment is {alignment!r:.200}, not a power of two")
    return alignment


def _tensors(reader: _Reader, count: int, alignment: int) -> dict[str, TensorPlace]:
    infos = [_tensor_info(reader) for _ in range(count)]
    begin_of_data = -(-reader.at // alignment) * alignment
    places: dict[str, TensorPlace] = {}
    for name, shape, kind, offset in infos:
        num_bytes = _num_bytes(reader, name, shape, kind)
        begin = begin_of_data + offset
        if offset % alignment:
            reader.fail(
                f"tensor {name!r:.200} is at offset {offset}, not a multiple of {alignment}"
            )
        if begin + num_bytes > reader.size:
            reader.fail(
                f"tensor {name!r:.200} ends at {begin + num_bytes}, but the file ends at "
                f"{reader.size}; it may be cut short"
            )
        if name in places:
            reader.fail(f"tensor {name!r:.200} appears twice")
        places[name] = TensorPlace(name, shape, kind, begin, num_bytes)
    _check_overlaps(reader, places)
    return places


def _tensor_info(
    reader: _Reader,
) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
    name = reader.string("a tensor's name")
    num_dims = int(reader.number("I", f"number of dimensions of {name!r:.200}"))
    if not 1 <= num_dims <= MAX_DIMS:
        reader.fail(f"tensor {name!r:.200} has {num_dims} dimensions; 1 to {MAX_DIMS} are possible")
    dims = [int(reader.number("Q", f"shape of {name!r:.200}")) for _ in range(num_dims)]
    code = int(reader.number("I", f"type of {name!r:.200}"))
    offset = int(reader.number("Q", f"offset of {name!r:.200}"))
    try:
        kind = GGMLQuantizationType(code)
        GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError):
        reader.fail(f"tensor {name!r:.200} has the unknown type {code}")
    return name, tuple(reversed(dims)), kind, offset


def _num_bytes(
    reader: _Reader, name: str, shape: tuple[int, ...], kind: GGMLQuantizationType
) -> int:
    """Bytes of a tensor: rows are cut into blocks of block_size elements, type_size bytes each."""
    block_size, type_size = GGML_QUANT_SIZES[kind]
    if min(shape) == 0:
        reader.fail(f"tensor {name!r:.200} has the shape {shape}, which is empty")
    if shape[-1] % block_size:
        reader.fail(
            f"tensor {name!r:.200} has rows of {shape[-1]} elements, "
            f"not a multiple of {block_size} as {kind.name} needs"
        )
    num_elements = 1
    for size in shape:
        num_elements *= size
    return num_elements // block_size * type_size


def _check_overlaps(reader: _Reader, places: dict[str, TensorPlace]) -> None:
    end, last = 0, ""
    for place in sorted(places.values(), key=lambda place: place.offset):
        if place.offset < end:
            reader.fail(f"the tensors {last!r:.200} and {place.name!r:.200} overlap")
        end, last = place.offset + place.num_bytes, place.name
