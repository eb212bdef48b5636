"""Every refusal of paged_attention and merge_attention_states, by its message, and the check of
devices, which all operators share."""

from __future__ import annotations

import math

import pytest
import torch
from calls import CALLS
from refusing import Refusal, assert_refused, int32_like, repeated, transposed_rows

HALF = torch.Tensor.half
CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
QUERY = "[num_tokens, num_heads, head_dim]"
CACHE = "[num_blocks, num_kv_heads, block_size, head_dim]"
EVERYTHING = "paged_attention, everything"


def attention(changes: dict, message: str) -> Refusal:
    return Refusal("paged_attention", changes, message)


def everything(changes: dict, message: str) -> Refusal:
    return Refusal(EVERYTHING, changes, message)


def groups(*rows: list[int]) -> dict:
    return {"prefix_groups": int32_like(*rows)}


DTYPES = [
    attention(
        {"query": torch.Tensor.double},
        "query has dtype float64, expected float32, bfloat16 or float16",
    ),
    attention({"out": HALF}, "out has dtype float16, expected float32 as query"),
    attention({"lse": HALF}, "lse has dtype float16, expected float32"),
    attention(
        {"key_cache": HALF, "value_cache": HALF},
        "key_cache has dtype float16, expected float32 as query, or a float8",
    ),
    attention(
        {"value_cache": HALF}, "value_cache has dtype float16, expected float32 as key_cache"
    ),
    attention(
        {"v_scale": torch.ones(1)}, "v_scale is given, expected none with a cache of dtype float32"
    ),
    attention({"block_tables": torch.Tensor.long}, "block_tables has dtype int64, expected int32"),
    attention({"seq_lens": torch.Tensor.long}, "seq_lens has dtype int64, expected int32"),
    attention(
        {"query_start_loc": torch.Tensor.long}, "query_start_loc has dtype int64, expected int32"
    ),
    everything({"alibi_slopes": HALF}, "alibi_slopes has dtype float16, expected float32"),
    everything(
        {"prefix_groups": torch.Tensor.long}, "prefix_groups has dtype int64, expected int32"
    ),
    everything({"workspace": torch.Tensor.int}, "workspace has dtype int32, expected uint8"),
    everything(
        {"k_scale": None},
        "k_scale is missing, expected a scale with a cache of dtype float8_e4m3fn",
    ),
]

LAYOUTS = [
    attention({"out": lambda t: t[0]}, f"out has shape [4, 8], expected {QUERY}"),
    attention(
        {"query": transposed_rows},
        "query has strides [32, 1, 4], expected a contiguous last dimension",
    ),
    attention(
        {"out": repeated},
        "out has strides [0, 8, 1], expected no overlap in a tensor that is written",
    ),
    attention(
        {"lse": repeated}, "lse has strides [0, 1], expected no overlap in a tensor that is written"
    ),
    attention({"lse": lambda t: t[0]}, "lse has shape [4], expected [num_tokens, num_heads]"),
    attention(
        {"key_cache": transposed_rows},
        "key_cache has strides [32, 16, 1, 2], expected a contiguous last dimension",
    ),
    attention(
        {"block_tables": transposed_rows},
        "block_tables has strides [1, 3], expected a contiguous last dimension",
    ),
    attention(
        {"seq_lens": lambda t: t.repeat_interleave(2)[::2]},
        "seq_lens has strides [2], expected a contiguous last dimension",
    ),
    attention(
        {"query_start_loc": lambda t: t.repeat_interleave(2)[::2]},
        "query_start_loc has strides [2], expected a contiguous last dimension",
    ),
    everything(
        {"alibi_slopes": lambda t: t.view(2, 2)},
        "alibi_slopes has shape [2, 2], expected [num_heads]",
    ),
    everything(
        {"prefix_groups": lambda t: t.flatten()},
        "prefix_groups has shape [6], expected [num_groups, 3]",
    ),
    everything(
        {"prefix_groups": transposed_rows},
        "prefix_groups has strides [1, 2], expected a contiguous tensor",
    ),
    everything(
        {"workspace": lambda t: t[::2]}, "workspace has strides [2], expected a contiguous tensor"
    ),
]

SHAPES = [
    attention(
        {"query": lambda t: t[..., :4]}, f"query has shape [5, 4, 4], expected {QUERY} = [5, 4, 8]"
    ),
    attention(
        {"out": lambda t: t[:, :3]}, f"out has shape [5, 3, 8], expected {QUERY} = [5, 4, 8]"
    ),
    attention(
        {"query": lambda t: t[:, :3]}, "query has 3 heads, expected a multiple of the cache's 2"
    ),
    attention(
        {"query": lambda t: t[:, :0]}, "query has 0 heads, expected a multiple of the cache's 2"
    ),
    attention(
        {"lse": lambda t: t[:4]},
        "lse has shape [4, 4], expected [num_tokens, num_heads] = [5, 4]",
    ),
    attention(
        {"value_cache": lambda t: t[:5]},
        f"value_cache has shape [5, 2, 2, 8], expected {CACHE} = [6, 2, 2, 8]",
    ),
    attention(
        {"key_cache": lambda t: t[:, :, :0], "value_cache": lambda t: t[:, :, :0]},
        "block_size is 0, expected at least 1",
    ),
    attention(
        {
            "key_cache": lambda _: torch.zeros(1, 2, 257, 8),
            "value_cache": lambda _: torch.zeros(1, 2, 257, 8),
        },
        "block_size is 257, expected 1 to 256",
    ),
    attention(
        {name: (lambda _: torch.zeros(6, 2, 2, 264)) for name in ("key_cache", "value_cache")},
        "head_dim is 264, expected 1 to 256",
    ),
    attention(
        {"block_tables": lambda t: t[:2]},
        "block_tables has shape [2, 3], expected [num_seqs, max_num_blocks] = [3, *]",
    ),
    attention(
        {"query_start_loc": lambda t: t[:3]},
        "query_start_loc has shape [3], expected [num_seqs + 1] = [4]",
    ),
    everything(
        {"alibi_slopes": lambda t: t[:3]}, "alibi_slopes has shape [3], expected [num_heads] = [4]"
    ),
    everything(
        {"prefix_groups": lambda t: t[:, :2].contiguous()},
        "prefix_groups has shape [2, 2], expected [num_groups, 3] = [*, 3]",
    ),
    everything(
        {"v_scale": torch.ones(4)}, "v_scale has shape [4], expected [1] or [2] (num_kv_heads)"
    ),
]

NUMBERS = [
    attention({"max_query_len": -1}, "max_query_len is -1, expected at least 0"),
    attention({"window": -1}, "window is -1, expected at least 0"),
    attention(
        {"window": 2, "causal": False}, "window is 2, expected 0 (none) when causal is false"
    ),
    attention({"num_splits": -1}, "num_splits is -1, expected 0 to 256"),
    attention({"num_splits": 257}, "num_splits is 257, expected 0 to 256"),
    attention({"scale": math.nan}, "scale is nan, expected a finite float32"),
    attention({"scale": 1e39}, "scale is 1e+39, expected a finite float32"),
    attention({"soft_cap": math.inf}, "soft_cap is inf, expected a finite float32 of at least 0"),
    attention({"soft_cap": -1.0}, "soft_cap is -1, expected a finite float32 of at least 0"),
    everything(
        {"workspace": lambda t: t[:64]}, "workspace has 64 bytes, expected at least 13536 (paged_"
    ),
    everything(
        {"workspace": lambda t: t[8:]},
        "workspace starts 8 bytes after a multiple of 16, expected an aligned tensor",
    ),
]

LENGTHS = [
    attention({"query_start_loc": int32_like(1, 3, 4, 5)}, "query_start_loc[0] is 1, expected 0"),
    attention(
        {"query_start_loc": int32_like(0, 3, 2, 5)},
        "query_start_loc[2] is 2, expected at least 3, the entry before",
    ),
    attention(
        {"query_start_loc": int32_like(0, 3, 4, 6)},
        "query_start_loc[3] is 6, expected at most the 5 tokens there are",
    ),
    attention({"seq_lens": int32_like(3, 5, -1)}, "seq_lens[2] is -1, expected at least 0"),
    attention(
        {"max_query_len": 2},
        "sequence 0 has 3 query tokens, expected at most max_query_len = 2",
    ),
    attention(
        {"seq_lens": int32_like(2, 5, 0)},
        "sequence 0 has 3 query tokens, expected at most its length 2 (seq_lens counts this",
    ),
    attention(
        {"seq_lens": int32_like(3, 7, 0)},
        "sequence 1 has 7 tokens in 4 blocks, expected at most the 3 columns of block_tables",
    ),
    attention(
        {"seq_lens": int32_like(3, 2**31 - 1, 0)},
        "sequence 1 has 2147483647 tokens in 1073741824 blocks, expected at most the 3 columns",
    ),
    attention(
        {"block_tables": int32_like([5, 2, 9], [5, 2, 6], [9, 9, 9])},
        "block_tables[1, 2] is 6, expected 0 to 5",
    ),
    attention(
        {"block_tables": int32_like([5, -1, 9], [5, 2, 3], [9, 9, 9])},
        "block_tables[0, 1] is -1, expected 0 to 5",
    ),
    everything(
        {"k_scale": torch.tensor([-1.0])}, "k_scale[0] is -1, expected a finite number above 0"
    ),
]

PREFIX_GROUPS = [
    everything(
        groups([2, 2, 1]),
        "prefix_groups[0] has the sequences 2 to 3, expected some of 0 to 2",
    ),
    everything(
        groups([0, 0, 0], [-1, 2, 1]),
        "prefix_groups[1] has the sequences -1 to 0, expected some of 0 to 2",
    ),
    everything(
        groups([0, -1, 1]),
        "prefix_groups[0] has the sequences 0 to -2, expected some of 0 to 2",
    ),
    everything(groups([0, 2, -1]), "prefix_groups[0] has -1 blocks, expected at least 0"),
    everything(
        groups([0, 2, 1], [1, 1, 1]),
        "prefix_groups[1] has sequence 1, expected no sequence in two groups",
    ),
    # The first of sequence 0's three queries is at position 2 and sees three tokens.
    everything(
        groups([0, 2, 2]),
        "prefix_groups[0] has a prefix of 4 tokens, expected at most the 3 that the first query "
        "row of sequence 0 sees",
    ),
    everything(
        groups([1, 2, 1]),
        "prefix_groups[0] has a prefix of 2 tokens, expected at most the 0 that the first query "
        "row of sequence 2 sees",
    ),
    # Sequence 2 has no query rows; its table is too short for the prefix all the same.
    everything(
        groups([2, 1, 4])
        | {"seq_lens": int32_like(5, 5, 9), "query_start_loc": int32_like(0, 3, 5, 5)},
        "sequence 2 has 8 tokens in 4 blocks, expected at most the 3 columns of block_tables",
    ),
    everything(
        groups([0, 2, 1]) | {"block_tables": int32_like([5, 2, 1], [4, 2, 3], [9, 9, 9])},
        "prefix_groups[0]: block_tables[1, 0] is 4, expected 5 as in sequence 0",
    ),
]

MERGE = [
    Refusal(
        "merge_attention_states",
        {"out": torch.Tensor.double},
        "out has dtype float64, expected float32, bfloat16 or float16",
    ),
    Refusal(
        "merge_attention_states",
        {"out_b": HALF},
        "out_b has dtype float16, expected float32 as out",
    ),
    Refusal("merge_attention_states", {"lse_a": HALF}, "lse_a has dtype float16, expected float32"),
    Refusal(
        "merge_attention_states",
        {"out_a": transposed_rows},
        "out_a has strides [8, 1, 2], expected a contiguous last dimension",
    ),
    Refusal(
        "merge_attention_states",
        {"out": repeated},
        "out has strides [0, 4, 1], expected no overlap in a tensor that is written",
    ),
    Refusal(
        "merge_attention_states",
        {"lse": repeated},
        "lse has strides [0, 1], expected no overlap in a tensor that is written",
    ),
    Refusal(
        "merge_attention_states",
        {"lse_b": lambda t: t[0]},
        "lse_b has shape [2], expected [num_tokens, num_heads]",
    ),
    Refusal(
        "merge_attention_states",
        {"out_b": lambda t: t[:2]},
        f"out_b has shape [2, 2, 4], expected {QUERY} = [3, 2, 4]",
    ),
    Refusal(
        "merge_attention_states",
        {"lse_a": lambda t: t[:, :1]},
        "lse_a has shape [3, 1], expected [num_tokens, num_heads] = [3, 2]",
    ),
]

REFUSALS = [*DTYPES, *LAYOUTS, *SHAPES, *NUMBERS, *LENGTHS, *PREFIX_GROUPS, *MERGE]


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda r: r.name)
def test_it_is_refused(refusal) -> None:
    assert_refused(refusal)


def tensor_operands() -> list[tuple[str, str]]:
    return [
        (call, name)
        for call, (_, make) in CALLS.items()
        for name, value in make().items()
        if isinstance(value, torch.Tensor)
    ]


@pytest.mark.parametrize(("call", "operand"), tensor_operands())
def test_an_operand_on_another_device_is_refused(call, operand) -> None:
    # With a tensor elsewhere torch would pick another kernel, so the CPU's is called directly.
    op_name, make = CALLS[call]
    op = getattr(torch.ops.pagedkv, op_name).default
    operands = make()
    operands[operand] = operands[operand].to("meta")
    positional = [operands.pop(a.name) for a in op._schema.arguments if not a.kwarg_only]
    # Where the others should be is told by one of them; if that one moved, the others are wrong.
    message = rf"{operand} is on meta, expected cpu|is on cpu, expected meta as {operand}"
    with pytest.raises(RuntimeError, match=rf"pagedkv::{op_name}: (\w+ )?({message})"):
        op.redispatch(CPU, *positional, **operands)
