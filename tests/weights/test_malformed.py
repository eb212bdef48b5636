"""Malformed weight files: one clear error, nothing read outside the file, nothing large taken."""

from __future__ import annotations

import json
import random
import resource
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf_files import tiny_llama, write_gguf
from safetensors.torch import save_file

from pagedkv.weights import open_checkpoint

HUGE = (2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def gguf_bytes(
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    num_tensors: int = 0,
    num_pairs: int = 0,
    body: bytes = b"",
) -> bytes:
    return magic + struct.pack("<IQQ", version, num_tensors, num_pairs) + body


def tensor_info(
    name: str = "t",
    dims: tuple[int, ...] = (32,),
    kind: int = 0,
    offset: int = 0,
    num_dims: int | None = None,
) -> bytes:
    return (
        text(name)
        + struct.pack("<I", len(dims) if num_dims is None else num_dims)
        + b"".join(struct.pack("<Q", dim) for dim in dims)
        + struct.pack("<IQ", kind, offset)
    )


def one_tensor(data: int = 128, **info: object) -> bytes:
    body = tensor_info(**info)  # type: ignore[arg-type]
    begin = -(-(24 + len(body)) // 32) * 32
    return gguf_bytes(num_tensors=1, body=body).ljust(begin, b"\0") + bytes(data)


def pair(key: str, kind: int, value: bytes) -> bytes:
    return gguf_bytes(num_pairs=1, body=text(key) + struct.pack("<I", kind) + value)


STRING, ARRAY = 8, 9
GGUF_CASES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "it is empty"),
    "foreign": (b"PK\x03\x04" + bytes(64), r"begins with b'PK\\x03\\x04', not with b'GGUF'"),
    "only the magic": (b"GGUF", "the version needs 4 bytes at 4, but the file ends at 4"),
    "version": (gguf_bytes(version=4), "version 4 is not supported"),
    "big-endian": (gguf_bytes(version=3 << 24), "is not supported, only .* little-endian"),
    "no counts": (b"GGUF" + struct.pack("<I", 3), "the number of tensors needs 8 bytes"),
    **{
        f"{count} tensors": (
            gguf_bytes(num_tensors=count),
            f"number of tensors is {count}, more than",
        )
        for count in HUGE
    },
    **{
        f"{count} entries": (
            gguf_bytes(num_pairs=count),
            f"metadata entries is {count}, more than",
        )
        for count in HUGE
    },
    **{
        f"string of {length}": (
            pair("k", STRING, struct.pack("<Q", length)),
            f"length of k is {length}, more than",
        )
        for length in HUGE
    },
    **{
        f"list of {count} strings": (
            pair("k", ARRAY, struct.pack("<IQ", STRING, count)),
            f"length of k is {count}, more than",
        )
        for count in HUGE
    },
    **{
        f"list of {count} numbers": (
            pair("k", ARRAY, struct.pack("<IQ", 4, count)),
            f"length of k is {count}, more than",
        )
        for count in HUGE
    },
    "long string in a list": (
        pair("k", ARRAY, struct.pack("<IQQ", STRING, 1, 2**63)),
        "an entry of k at .* ends at .*, behind the file's",
    ),
    "list in a list": (pair("k", ARRAY, struct.pack("<IQ", ARRAY, 0)), "list of the value type 9"),
    "unknown value type": (pair("k", 99, bytes(8)), "k has the unknown value type 99"),
    "unknown element type": (pair("k", ARRAY, struct.pack("<IQ", 77, 0)), "value type 77"),
    "key not UTF-8": (
        gguf_bytes(num_pairs=1, body=struct.pack("<Q", 2) + b"\xff\xfe" + bytes(16)),
        "a metadata key is not UTF-8",
    ),
    "entry not UTF-8": (
        pair("k", ARRAY, struct.pack("<IQQ", STRING, 1, 1) + b"\xff"),
        "an entry of k is not UTF-8",
    ),
    "key twice": (
        gguf_bytes(num_pairs=2, body=2 * (text("k") + struct.pack("<II", 4, 1))),
        "metadata key 'k' appears twice",
    ),
    "alignment 0": (
        pair("general.alignment", 4, struct.pack("<I", 0)),
        "general.alignment is 0, not a power of two",
    ),
    "alignment 24": (
        pair("general.alignment", 4, struct.pack("<I", 24)),
        "general.alignment is 24, not a power of two",
    ),
    "alignment of text": (
        pair("general.alignment", STRING, text("32")),
        "general.alignment is '32', not a power of two",
    ),
    "no dimensions": (one_tensor(dims=()), "'t' has 0 dimensions; 1 to 4 are possible"),
    "many dimensions": (one_tensor(num_dims=2**32 - 1), "'t' has 4294967295 dimensions"),
    "unknown tensor type": (one_tensor(kind=999), "'t' has the unknown type 999"),
    "removed tensor type": (one_tensor(kind=4), "'t' has the unknown type 4"),
    "empty dimension": (one_tensor(dims=(32, 0)), r"'t' has the shape \(0, 32\), which is empty"),
    "half a block": (one_tensor(dims=(31,), kind=8), "rows of 31 elements, not a multiple of 32"),
    "huge shape": (one_tensor(dims=(2**32, 2**32)), "tensor 't' ends at .*, but the file ends"),
    "shape beyond 64 bits": (
        one_tensor(dims=(2**63, 2**63, 2**63, 2**63)),
        "tensor 't' ends at .*, but the file ends",
    ),
    **{
        f"offset {offset}": (one_tensor(offset=offset), "tensor 't' (ends at|is at offset)")
        for offset in HUGE
    },
    "offset not aligned": (one_tensor(data=256, offset=4), "at offset 4, not a multiple of 32"),
    "data cut short": (one_tensor(data=127), "it may be cut short"),
    "same name": (
        gguf_bytes(num_tensors=2, body=2 * tensor_info()) + bytes(256),
        "tensor 't' appears twice",
    ),
    "overlap": (
        gguf_bytes(num_tensors=2, body=tensor_info("a") + tensor_info("b", offset=96)) + bytes(512),
        "tensors 'a' and 'b' overlap",
    ),
    "no architecture": (one_tensor(), "architecture None is not supported"),
}


@pytest.mark.parametrize("case", GGUF_CASES)
def test_a_malformed_gguf_file_is_refused(tmp_path: Path, case: str) -> None:
    data, message = GGUF_CASES[case]
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=message) as caught:
        open_checkpoint(path)
    assert str(path) in str(caught.value)


def header(tensors: dict[str, object], data: int = 8, length: int | None = None) -> bytes:
    raw = json.dumps(tensors).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + bytes(data)


def entry(
    dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)
) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


SAFETENSORS_CASES: dict[str, bytes] = {
    "empty": b"",
    "four bytes": b"1234",
    "foreign": b"PK\x03\x04" + bytes(64),
    "not JSON": struct.pack("<Q", 4) + b"{{{{",
    "not an object": struct.pack("<Q", 2) + b"[]",
    **{f"header of {length}": header({"a": entry()}, length=length) for length in HUGE},
    "header longer than the file": header({"a": entry()}, length=1000),
    "data cut short": header({"a": entry()}, data=7),
    "data left over": header({"a": entry()}, data=9),
    "reversed offsets": header({"a": entry(offsets=(8, 0))}),
    "negative offset": header({"a": entry(offsets=(-8, 0))}),
    "offset of 2**63": header({"a": entry(offsets=(2**63, 2**63 + 8))}),
    "offset beyond 64 bits": header({"a": entry(offsets=(0, 2**64 + 8))}),
    "one offset": header({"a": entry(offsets=(0,))}),
    "overlap": header({"a": entry(), "b": entry(offsets=(4, 12))}, data=12),
    "hole": header({"a": entry(), "b": entry(offsets=(16, 24))}, data=24),
    "shape too large": header({"a": entry(shape=(3,))}),
    "shape of 2**63": header({"a": entry(shape=(2**63, 2**63))}),
    "shape that wraps to right": header({"a": entry(shape=(2**62 + 2,))}),
    "negative shape": header({"a": entry(shape=(-2,))}),
    "unknown dtype": header({"a": entry(dtype="F33")}),
    "dtype not text": header({"a": entry(dtype=4)}),
    # The library itself would take the last.
    "tensor twice": header({"a": entry(), "b": entry("I32")}).replace(b'"b"', b'"a"'),
    "no dtype": header({"a": {"shape": [2], "data_offsets": [0, 8]}}),
}


def directory(path: Path, data: bytes) -> Path:
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(data)
    return path


@pytest.mark.parametrize("case", SAFETENSORS_CASES)
def test_a_malformed_safetensors_file_is_refused(tmp_path: Path, case: str) -> None:
    with pytest.raises(ValueError, match="not a valid safetensors file") as caught:
        open_checkpoint(directory(tmp_path, SAFETENSORS_CASES[case]))
    assert str(tmp_path / "model.safetensors") in str(caught.value)


def damaged(whole: bytes, rng: random.Random, head: int) -> bytes:
    """A copy with some damage, mostly in its first head bytes, where the numbers are."""
    data = bytearray(whole)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(min(head, len(data)) - 8)
        kind = rng.randrange(5)
        if kind == 0:
            data[at] = rng.randrange(256)
        elif kind == 1:
            data[at : at + 8] = struct.pack("<Q", rng.choice(HUGE))
        elif kind == 2:
            data[at : at + 4] = struct.pack("<I", rng.choice((0, 1, 2**31, 2**32 - 1)))
        elif kind == 3:
            del data[at : at + rng.randint(1, 16)]
        else:
            del data[rng.randrange(64, len(data)) :]
    return bytes(data)


def open_and_read(path: Path) -> bool:
    """Whether a file was accepted and all its tensors are of sane size; else it was refused."""
    try:
        checkpoint = open_checkpoint(path)
        for _, tensor in checkpoint.tensors():
            assert tensor.numel() < 2**20
    except ValueError:
        return False
    return True


def peak_rss_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def test_damaged_gguf_files_are_read_or_refused_but_nothing_else(tmp_path: Path) -> None:
    metadata = {
        "tokenizer.ggml.tokens": [f"t{i}" for i in range(96)],
        "tokenizer.ggml.scores": [0.5] * 96,
    }
    path = write_gguf(tmp_path / "m.gguf", tiny_llama(num_hidden_layers=1), metadata=metadata)
    whole, rng = path.read_bytes(), random.Random(0)
    outcomes = [0, 0]
    before = peak_rss_kib()
    for _ in range(3000):
        path.write_bytes(damaged(whole, rng, 3600))
        outcomes[open_and_read(path)] += 1
    assert min(outcomes) > 30, outcomes
    assert peak_rss_kib() - before < 64 * 1024


def test_damaged_safetensors_files_are_read_or_refused_but_nothing_else(tmp_path: Path) -> None:
    path = directory(tmp_path, b"")
    file = path / "model.safetensors"
    save_file(
        {
            f"t{i}": torch.ones(i + 1, 3, dtype=(torch.float32, torch.bfloat16)[i % 2])
            for i in range(9)
        },
        file,
    )
    whole, rng = file.read_bytes(), random.Random(0)
    outcomes = [0, 0]
    before = peak_rss_kib()
    for _ in range(3000):
        file.write_bytes(damaged(whole, rng, 700))
        outcomes[open_and_read(path)] += 1
    assert min(outcomes) > 30, outcomes
    assert peak_rss_kib() - before < 64 * 1024


def test_every_cut_of_a_gguf_file_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_llama(num_hidden_layers=1))
    whole = path.read_bytes()
    for size in [*range(0, 2000, 7), *np.linspace(2000, len(whole) - 33, 50, dtype=int).tolist()]:
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="not a valid GGUF file"):
            open_checkpoint(path)
