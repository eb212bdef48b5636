"""Every refusal of the operators on the cache and on whole blocks, by its message."""

from __future__ import annotations

import math

import pytest
import torch
from refusing import Refusal, assert_refused, int32_like, repeated, transposed_rows

HALF = torch.Tensor.half
FLOAT8 = torch.float8_e4m3fn
CACHE = "[num_blocks, num_kv_heads, block_size, head_dim]"
POOL = "[num_layers, 2, num_blocks, num_kv_heads, block_size, head_dim]"
TOKENS = "[num_tokens, num_kv_heads, head_dim]"


def both(change):
    return {"key_cache": change, "value_cache": change}


def shared(op: str) -> list[Refusal]:
    """What reshape_and_cache and gather_blocks check alike."""
    return [
        Refusal(
            op,
            {"key": torch.Tensor.double},
            "key has dtype float64, expected float32, bfloat16 or float16",
        ),
        Refusal(op, {"value": HALF}, "value has dtype float16, expected float32 as key"),
        Refusal(
            op,
            both(torch.Tensor.long),
            "key_cache has dtype int64, expected float32, bfloat16, float16, float8_e4m3fn or "
            "float8_e5m2",
        ),
        Refusal(
            op,
            {"value_cache": HALF},
            "value_cache has dtype float16, expected float32 as key_cache",
        ),
        Refusal(
            op, both(HALF), "key_cache has dtype float16, expected float32 as key, or a float8"
        ),
        Refusal(
            op,
            both(lambda t: t.to(FLOAT8)),
            "k_scale is missing, expected a scale with a cache of dtype float8_e4m3fn",
        ),
        Refusal(
            f"{op}, fp8",
            {"v_scale": None},
            "v_scale is missing, expected a scale with a cache of dtype float8_e4m3fn",
        ),
        Refusal(
            op,
            {"k_scale": torch.ones(1)},
            "k_scale is given, expected none with a cache of dtype float32",
        ),
        Refusal(f"{op}, fp8", {"k_scale": HALF}, "k_scale has dtype float16, expected float32"),
        Refusal(
            f"{op}, fp8",
            {"k_scale": torch.ones(3)},
            "k_scale has shape [3], expected [1] or [2] (num_kv_heads)",
        ),
        Refusal(
            f"{op}, fp8",
            {"v_scale": torch.tensor(1.0)},
            "v_scale has shape [], expected [1 or num_kv_heads]",
        ),
        Refusal(
            f"{op}, fp8",
            {"k_scale": torch.tensor([0.0])},
            "k_scale[0] is 0, expected a finite number above 0",
        ),
        Refusal(
            f"{op}, fp8",
            {"v_scale": torch.tensor([1.0, math.nan])},
            "v_scale[1] is nan, expected a finite number above 0",
        ),
        Refusal(op, {"key": lambda t: t[0]}, f"key has shape [2, 4], expected {TOKENS}"),
        Refusal(
            op,
            {"value": transposed_rows},
            "value has strides [8, 1, 2], expected a contiguous last dimension",
        ),
        Refusal(
            op,
            {"key_cache": transposed_rows},
            "key_cache has strides [16, 8, 1, 2], expected a contiguous last dimension",
        ),
        Refusal(op, both(lambda t: t[0]), f"key_cache has shape [2, 2, 4], expected {CACHE}"),
        Refusal(
            op,
            {"value_cache": lambda t: t[:3]},
            f"value_cache has shape [3, 2, 2, 4], expected {CACHE} = [4, 2, 2, 4]",
        ),
        Refusal(op, both(lambda t: t[:, :, :0]), "block_size is 0, expected at least 1"),
        Refusal(op, both(lambda t: t[:, :0]), "num_kv_heads is 0, expected at least 1"),
        Refusal(op, both(lambda t: t[..., :0]), "head_dim is 0, expected at least 1"),
        Refusal(
            op,
            {"key": lambda t: t[:, :1]},
            f"key has shape [{'3' if op == 'reshape_and_cache' else '4'}, 1, 4], "
            f"expected {TOKENS} = [*, 2, 4]",
        ),
    ]


RESHAPE = [
    Refusal(
        "reshape_and_cache",
        {"key_cache": repeated},
        "key_cache has strides [0, 8, 4, 1], expected no overlap in a tensor that is written",
    ),
    Refusal(
        "reshape_and_cache",
        {"value": lambda t: t[:2]},
        f"value has shape [2, 2, 4], expected {TOKENS} = [3, 2, 4]",
    ),
    Refusal(
        "reshape_and_cache",
        {"slot_mapping": torch.Tensor.int},
        "slot_mapping has dtype int32, expected int64",
    ),
    Refusal(
        "reshape_and_cache",
        {"slot_mapping": lambda t: t.view(1, 3)},
        "slot_mapping has shape [1, 3], expected [num_tokens]",
    ),
    Refusal(
        "reshape_and_cache",
        {"slot_mapping": lambda t: t.repeat_interleave(2)[::2]},
        "slot_mapping has strides [2], expected a contiguous last dimension",
    ),
    Refusal(
        "reshape_and_cache",
        {"slot_mapping": torch.tensor([0, 1, 2, 3])},
        "slot_mapping has shape [4], expected at most the 3 tokens of key",
    ),
    Refusal(
        "reshape_and_cache",
        {"slot_mapping": torch.tensor([0, 1, 8])},
        "slot_mapping[2] is 8, expected below 8 (num_blocks * block_size)",
    ),
    Refusal(
        "reshape_and_cache",
        {"slot_mapping": torch.tensor([2**62, 1, 2])},
        "slot_mapping[0] is 4611686018427387904, expected below 8 (num_blocks * block_size)",
    ),
]

GATHER = [
    Refusal(
        "gather_blocks",
        {"key": repeated},
        "key has strides [0, 4, 1], expected no overlap in a tensor that is written",
    ),
    Refusal(
        "gather_blocks",
        {"block_tables": torch.Tensor.long},
        "block_tables has dtype int64, expected int32",
    ),
    Refusal(
        "gather_blocks",
        {"seq_start_loc": torch.Tensor.long},
        "seq_start_loc has dtype int64, expected int32",
    ),
    Refusal(
        "gather_blocks",
        {"block_tables": lambda t: t[0]},
        "block_tables has shape [2], expected [num_seqs, max_num_blocks]",
    ),
    Refusal(
        "gather_blocks",
        {"block_tables": transposed_rows},
        "block_tables has strides [1, 2], expected a contiguous last dimension",
    ),
    Refusal(
        "gather_blocks",
        {"seq_start_loc": int32_like(0, 4)},
        "seq_start_loc has shape [2], expected [num_seqs + 1] = [3]",
    ),
    Refusal(
        "gather_blocks",
        {"seq_start_loc": int32_like(1, 3, 4)},
        "seq_start_loc[0] is 1, expected 0",
    ),
    Refusal(
        "gather_blocks",
        {"seq_start_loc": int32_like(0, 3, 2)},
        "seq_start_loc[2] is 2, expected at least 3, the entry before",
    ),
    Refusal(
        "gather_blocks",
        {"seq_start_loc": int32_like(0, 3, 5)},
        "seq_start_loc[2] is 5, expected at most the 4 tokens there are",
    ),
    Refusal(
        "gather_blocks",
        {"block_tables": lambda t: t[:, :1]},
        "sequence 0 has 3 tokens in 2 blocks, expected at most the 1 columns of block_tables",
    ),
    Refusal(
        "gather_blocks",
        {"block_tables": int32_like([3, 4], [1, 99])},
        "block_tables[0, 1] is 4, expected 0 to 3",
    ),
    Refusal(
        "gather_blocks",
        {"block_tables": int32_like([3, 0], [-1, 99])},
        "block_tables[1, 0] is -1, expected 0 to 3",
    ),
]

COPIES = [
    Refusal(
        "copy_blocks",
        {"kv_cache": torch.Tensor.double},
        "kv_cache has dtype float64, expected float32, bfloat16, float16, float8_e4m3fn or "
        "float8_e5m2",
    ),
    Refusal("copy_blocks", {"pairs": torch.Tensor.int}, "pairs has dtype int32, expected int64"),
    Refusal(
        "copy_blocks",
        {"kv_cache": lambda t: t[0]},
        f"kv_cache has shape [2, 4, 2, 2, 4], expected {POOL}",
    ),
    Refusal(
        "copy_blocks",
        {"kv_cache": lambda t: t[:, :1]},
        f"kv_cache has shape [2, 1, 4, 2, 2, 4], expected {POOL} = [*, 2, *, *, *, *]",
    ),
    Refusal(
        "copy_blocks",
        {"kv_cache": transposed_rows},
        "kv_cache has strides [128, 64, 16, 8, 1, 2], expected a contiguous last dimension",
    ),
    Refusal(
        "copy_blocks",
        {"kv_cache": repeated},
        "kv_cache has strides [0, 64, 16, 8, 4, 1], expected no overlap in a tensor that is "
        "written",
    ),
    Refusal(
        "copy_blocks",
        {"pairs": lambda t: t.flatten()},
        "pairs has shape [4], expected [num_pairs, 2]",
    ),
    Refusal(
        "copy_blocks",
        {"pairs": torch.tensor([[0, 1, 2]])},
        "pairs has shape [1, 3], expected [num_pairs, 2] = [*, 2]",
    ),
    Refusal(
        "copy_blocks",
        {"pairs": lambda t: t.t().contiguous().t()},
        "pairs has strides [1, 2], expected a contiguous tensor",
    ),
    Refusal(
        "copy_blocks",
        {"pairs": torch.tensor([[0, 1], [4, 1]])},
        "pairs[1] has source block 4, expected 0 to 3",
    ),
    Refusal(
        "copy_blocks",
        {"pairs": torch.tensor([[0, -1]])},
        "pairs[0] has destination block -1, expected 0 to 3",
    ),
    Refusal(
        "swap_blocks",
        {"destination": HALF},
        "destination has dtype float16, expected float32 as source",
    ),
    Refusal(
        "swap_blocks",
        {"source": torch.Tensor.int},
        "source has dtype int32, expected float32, bfloat16, float16, float8_e4m3fn or float8_e5m2",
    ),
    Refusal("swap_blocks", {"pairs": torch.Tensor.int}, "pairs has dtype int32, expected int64"),
    Refusal(
        "swap_blocks",
        {"source": transposed_rows},
        "source has strides [128, 64, 16, 8, 1, 2], expected a contiguous last dimension",
    ),
    Refusal(
        "swap_blocks",
        {"destination": repeated},
        "destination has strides [0, 48, 16, 8, 4, 1], expected no overlap in a tensor that is "
        "written",
    ),
    Refusal(
        "swap_blocks",
        {"destination": lambda t: t[:1]},
        "destination has shape [1, 2, 3, 2, 2, 4], expected source's shape with any num_blocks = "
        "[2, 2, *, 2, 2, 4]",
    ),
    Refusal(
        "swap_blocks",
        {"source": lambda t: t[:, :1]},
        f"source has shape [2, 1, 4, 2, 2, 4], expected {POOL} = [*, 2, *, *, *, *]",
    ),
    Refusal(
        "swap_blocks",
        {"pairs": torch.tensor([[0, 3]])},
        "pairs[0] has destination block 3, expected 0 to 2",
    ),
    Refusal(
        "swap_blocks",
        {"pairs": torch.tensor([[-5, 0]])},
        "pairs[0] has source block -5, expected 0 to 3",
    ),
]

REFUSALS = [*shared("reshape_and_cache"), *RESHAPE, *shared("gather_blocks"), *GATHER, *COPIES]


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda r: r.name)
def test_it_is_refused(refusal) -> None:
    assert_refused(refusal)
