"""Every type of tensor that the `gguf` package can dequantise is read as it reads it."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from pagedkv.weights import open_checkpoint

ROWS, COLUMNS = 32, 512  # whole blocks of every type


def is_readable(kind: GGMLQuantizationType) -> bool:
    try:
        gguf.dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), dtype=np.uint8), kind)
    except NotImplementedError:
        return False
    return True


READABLE = [kind for kind in GGML_QUANT_SIZES if is_readable(kind)]
OTHERS = [kind for kind in GGML_QUANT_SIZES if not is_readable(kind)]


def file_with(path: Path, kind: GGMLQuantizationType, raw: np.ndarray) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in {
        "block_count": 1,
        "context_length": 64,
        "embedding_length": COLUMNS,
        "feed_forward_length": ROWS,
        "attention.head_count": 4,
        "vocab_size": ROWS,
    }.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_tensor("blk.0.ffn_gate.weight", raw, raw_dtype=kind)
    writer.add_tensor("output_norm.weight", np.ones(COLUMNS, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def raw_bytes(kind: GGMLQuantizationType) -> np.ndarray:
    block_size, type_size = GGML_QUANT_SIZES[kind]
    shape = ROWS, COLUMNS // block_size * type_size
    return np.random.default_rng(kind.value).integers(0, 256, shape, dtype=np.uint8)


def test_the_quantised_types_are_all_there() -> None:
    names = {kind.name for kind in READABLE}
    assert names > {"F16", "BF16", "Q4_0", "Q8_0", "Q2_K", "Q4_K", "Q6_K", "IQ1_S", "IQ4_XS"}
    assert names > {"TQ1_0", "TQ2_0", "MXFP4"}
    assert {kind.name for kind in OTHERS} >= {"Q8_K", "I32"}


@pytest.mark.parametrize("kind", READABLE, ids=lambda kind: kind.name)
def test_random_blocks_are_read_as_the_package_reads_them(
    tmp_path: Path, kind: GGMLQuantizationType
) -> None:
    raw = raw_bytes(kind)
    stored = raw.view(np.float32) if kind.name == "F32" else raw
    stored = raw.view(np.float16) if kind.name == "F16" else stored
    path = file_with(tmp_path / "m.gguf", kind, stored)
    with np.errstate(all="ignore"):  # scales of random bytes
        expected = torch.from_numpy(gguf.dequantize(raw, kind).copy())
        found = dict(open_checkpoint(path).tensors())["model.layers.0.mlp.gate_proj.weight"]
    assert found.dtype == torch.float32
    assert found.shape == (ROWS, COLUMNS)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", OTHERS, ids=lambda kind: kind.name)
def test_a_type_that_it_cannot_read_is_named(tmp_path: Path, kind: GGMLQuantizationType) -> None:
    path = file_with(tmp_path / "m.gguf", kind, raw_bytes(kind))
    with pytest.raises(ValueError, match=rf"ffn_gate.weight' has the type {kind.name}, which"):
        list(open_checkpoint(path).tensors())
