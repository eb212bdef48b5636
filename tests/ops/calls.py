"""One small valid call of every operator, as keyword arguments by schema name. The tests of the
contract (opcheck, torch.compile, refusals) start from these and change one thing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pagedkv import ops

Call = dict[str, Any]


def int32(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def reshape_and_cache() -> Call:
    """Three tokens, one of them padding, into 4 blocks of 2 tokens, 2 heads of 4."""
    return {
        "key": torch.randn(3, 2, 4),
        "value": torch.randn(3, 2, 4),
        "key_cache": torch.zeros(4, 2, 2, 4),
        "value_cache": torch.zeros(4, 2, 2, 4),
        "slot_mapping": torch.tensor([7, -1, 0]),
        "k_scale": None,
        "v_scale": None,
    }


def fused_rotary_reshape_and_cache() -> Call:
    """Three tokens, one of them padding; 4 query and 2 KV heads of 8, 6 elements rotated."""
    return {
        "positions": torch.tensor([0, 4, 2]),
        "query": torch.randn(3, 4, 8),
        "key": torch.randn(3, 2, 8),
        "value": torch.randn(3, 2, 8),
        "cos_sin_cache": torch.rand(5, 6),
        "key_cache": torch.zeros(4, 2, 2, 8),
        "value_cache": torch.zeros(4, 2, 2, 8),
        "slot_mapping": torch.tensor([7, -1, 0]),
        "is_neox": True,
        "residual": None,
        "residual_epsilon": 0.0,
        "bias": None,
        "k_scale": None,
        "v_scale": None,
    }


def fused_norm_rotary_reshape_and_cache() -> Call:
    call = fused_rotary_reshape_and_cache()
    return call | {"query_norm": torch.rand(8), "key_norm": torch.rand(8), "epsilon": 1e-5}


def gather_blocks() -> Call:
    """Two sequences of 3 and 1 tokens."""
    return {
        "key": torch.zeros(4, 2, 4),
        "value": torch.zeros(4, 2, 4),
        "key_cache": torch.randn(4, 2, 2, 4),
        "value_cache": torch.randn(4, 2, 2, 4),
        "block_tables": int32([3, 0], [1, 99]),
        "seq_start_loc": int32(0, 3, 4),
        "k_scale": None,
        "v_scale": None,
    }


def paged_attention() -> Call:
    """A prefill of 3 tokens, a decode after 4 and a padded row; 4 query and 2 KV heads of 8."""
    return {
        "out": torch.zeros(5, 4, 8),
        "lse": torch.zeros(5, 4),
        "query": torch.randn(5, 4, 8),
        "key_cache": torch.randn(6, 2, 2, 8),
        "value_cache": torch.randn(6, 2, 2, 8),
        "block_tables": int32([5, 2, 99], [5, 2, 3], [99, 99, 99]),
        "seq_lens": int32(3, 5, 0),
        "query_start_loc": int32(0, 3, 4, 5),
        "max_query_len": 3,
        "scale": 0.5,
        "causal": True,
        "window": 0,
        "alibi_slopes": None,
        "soft_cap": 0.0,
        "k_scale": None,
        "v_scale": None,
        "num_splits": 0,
        "prefix_groups": None,
        "workspace": None,
    }


def paged_attention_with_everything() -> Call:
    """Every optional operand there."""
    call = paged_attention()
    call["seq_lens"] = int32(5, 5, 0)
    call["block_tables"] = int32([5, 2, 1], [5, 2, 3], [99, 99, 99])
    call |= {
        "window": 4,
        "alibi_slopes": torch.rand(4),
        "soft_cap": 30.0,
        "k_scale": torch.tensor([0.5]),
        "v_scale": torch.tensor([0.5, 2.0]),
        "num_splits": 2,
        "prefix_groups": int32([0, 2, 1], [0, 0, 0]),
    }
    for cache in ("key_cache", "value_cache"):
        call[cache] = call[cache].to(torch.float8_e4m3fn)
    return call | {"workspace": workspace_of(call, "cpu")}


def workspace_of(call: Call, device: torch.device | str) -> torch.Tensor:
    """Larger than the op wants it there: with prefix groups that depends on the workers."""
    num_tokens, num_heads, head_dim = call["query"].shape
    size = ops.paged_attention_workspace_size(
        num_tokens,
        num_heads,
        head_dim,
        num_splits=call["num_splits"],
        num_prefix_groups=len(call["prefix_groups"]),
        device=device,
    )
    return torch.zeros(size + 64, dtype=torch.uint8, device=device)


def merge_attention_states() -> Call:
    return {
        "out": torch.zeros(3, 2, 4),
        "lse": torch.zeros(3, 2),
        "out_a": torch.randn(3, 2, 4),
        "lse_a": torch.randn(3, 2),
        "out_b": torch.randn(3, 2, 4),
        "lse_b": torch.randn(3, 2),
    }


def copy_blocks() -> Call:
    return {"kv_cache": torch.randn(2, 2, 4, 2, 2, 4), "pairs": torch.tensor([[0, 1], [2, 3]])}


def swap_blocks() -> Call:
    return {
        "source": torch.randn(2, 2, 4, 2, 2, 4),
        "destination": torch.zeros(2, 2, 3, 2, 2, 4),
        "pairs": torch.tensor([[0, 1], [3, 2]]),
    }


def rms_norm() -> Call:
    return {
        "out": torch.zeros(3, 8),
        "input": torch.randn(3, 8),
        "weight": torch.randn(8),
        "epsilon": 1e-5,
    }


def fused_add_rms_norm() -> Call:
    return {
        "input": torch.randn(3, 8),
        "residual": torch.randn(3, 8),
        "weight": torch.randn(8),
        "epsilon": 1e-5,
    }


def rotary_embedding() -> Call:
    return {
        "positions": torch.tensor([0, 4, 2]),
        "query": torch.randn(3, 4, 8),
        "key": torch.randn(3, 2, 8),
        "cos_sin_cache": torch.rand(5, 6),
        "is_neox": True,
    }


def silu_and_mul() -> Call:
    plain = {"out": torch.zeros(3, 4), "input": torch.randn(3, 8)}
    return plain | {"residual": None, "residual_epsilon": 0.0}


def gelu_and_mul() -> Call:
    return silu_and_mul() | {"approximate": "tanh"}


def bare(make: Callable[[], Call]) -> Callable[[], Call]:
    """The call with a projection's bare result, of rows of 6; the bias that of 8 heads of 8."""

    def call() -> Call:
        made = make() | {"residual": torch.randn(3, 6), "residual_epsilon": 1e-5}
        return made | ({"bias": torch.randn(64)} if "bias" in made else {})

    return call


def sample_tokens() -> Call:
    """Three rows of 8 tokens: greedy, drawn, and one that has edits and all filters."""
    return {
        "token_ids": torch.zeros(3, dtype=torch.int64),
        "cuts": torch.zeros(3),
        "logits": torch.randn(3, 8),
        "inverse_temperatures": torch.tensor([0.0, 1.0, 2.0]),
        "top_k": torch.tensor([0, 0, 4]),
        "top_p": torch.tensor([1.0, 1.0, 0.8], dtype=torch.float64),
        "min_p": torch.tensor([0.0, 0.0, 0.05], dtype=torch.float64),
        "seeds": torch.tensor([1, -2, 3]),
        "positions": torch.tensor([0, 7, 2**40]),
        "draws": torch.tensor([0, 1, 2]),
        "edit_start_loc": int32(0, 0, 1, 3),
        "edit_ids": int32(6, 2, 5),
        "edit_values": torch.tensor([[0.5, 1, 0], [0, 1.5, 0.25], [0, 1, 4.0]]),
        "is_limited": int32(0, 0, 0),
    }


def sample_tokens_plainly() -> Call:
    """Without what is optional."""
    names = ("cuts", "edit_start_loc", "edit_ids", "edit_values", "is_limited")
    return sample_tokens() | dict.fromkeys(names)


def streamed_linear() -> Call:
    """Three rows of 8, six columns of which three are gates."""
    return {
        "out": torch.zeros(3, 3),
        "input": torch.randn(3, 8),
        "weight": torch.randn(6, 8),
        "bias": torch.randn(6),
        "norm_weight": torch.randn(8),
        "epsilon": 1e-5,
        "epilogue": "silu_and_mul",
    }


def score_tokens() -> Call:
    """One of 8 tokens in each of 3 rows, and the 3 most likely."""
    return {
        "logprobs": torch.zeros(3, dtype=torch.float64),
        "ranks": torch.zeros(3, dtype=torch.int64),
        "top_ids": torch.zeros(3, 3, dtype=torch.int64),
        "top_logprobs": torch.zeros(3, 3, dtype=torch.float64),
        "logits": torch.randn(3, 8),
        "token_ids": torch.tensor([4, 0, 7]),
    }


def advance_step() -> Call:
    """Blocks of 4, six slots: a decode at 5, a chunk of 3 that ends a prompt with two answers at 2,
    and a row of padding. The decode's token is the latest, the chunk's last one too."""
    return {
        "lens": int32(9, 9, 2, 9, 9, 5),
        "tokens": torch.zeros(3, 6, dtype=torch.int64),
        "block_tables": torch.full((3, 3), 99, dtype=torch.int32),
        "seq_lens": int32(9, 9, 9),
        "samples": torch.full((6, 4), 9),
        "filters": torch.full((2, 4), 0.5, dtype=torch.float64),
        "inverse_temperatures": torch.full((4,), 0.5),
        "counts": int32(2, 1),
        "slots": int32(5, 2, 99),
        "query_start_loc": int32(0, 1, 4, 6),
        "sample_start_loc": int32(0, 1, 3, 4),
        "tables": int32([9] * 3, [9] * 3, [3, 8, 9], [9] * 3, [9] * 3, [1, 0, 9]),
        "draws": int32(9, 9, 0, 9, 9, 2),
        "params": draw_params(),
        "latest": torch.tensor([9, 9, 22, 9, 9, 25, 9]),
        "token_ids": int32(31, 32, -1),
        "block_size": 4,
    }


def advance_edits() -> Call:
    """A list of the last step's that gets a new id, one that is sent and gets none, and a limited
    one that counts an id it has; beside them room for more."""
    bias = torch.tensor([0.5, 0.0, -1.0]).view(torch.int32)
    return {
        "ids": torch.full((9,), 7, dtype=torch.int32),
        "counts": torch.full((9,), 7, dtype=torch.int32),
        "values": torch.full((9, 3), 7.0),
        "start_loc": int32(0, 4, 6, 8),
        "is_limited": int32(0, 0, 1),
        "rows": edit_rows_of((0, 3, 2), (-2, 2, -1), (3, 2, 0)),
        "latest": torch.tensor([6, 9, 4]),
        "last_ids": int32(1, 3, 8, 2, 6),
        "last_counts": int32(0, 2, -1, -1, -(2**31)),
        "last_values": torch.tensor([[0.0, 9, 9], [1, 9, 9], [2, 9, 9], [3, 9, 9], [4, 9, 9]]),
        "sent": torch.stack([int32(0, 5, 6), int32(3, -1, 0), bias], dim=1),
    }


def edit_rows_of(*rows: tuple[int, int, int]) -> torch.Tensor:
    """Of each source, length and slot, with penalties of its own."""
    made = torch.zeros(len(rows), 8, dtype=torch.int32)
    made[:, :3] = int32(*rows)
    number = torch.arange(len(rows))
    made[:, 3:4].view(torch.float32)[:] = 1.25 + number[:, None]
    made[:, 4:].view(torch.float64)[:] = torch.stack([number * 0.7 + 0.1, 0.3 - number], dim=1)
    return made


def draw_params() -> torch.Tensor:
    """Of six slots."""
    params = torch.zeros(6, 8, dtype=torch.int32)
    params[:, :1].view(torch.float32)[:] = torch.tensor([0.5, 1, 2, 3, 4, 1.25])[:, None]
    params[:, 1] = torch.arange(6)
    params[:, 2:6].view(torch.float64)[:] = torch.tensor([0.75, 0.125], dtype=torch.float64)
    params[:, 6:].view(torch.int64)[:] = torch.arange(-3, 3)[:, None] * 2**40
    return params


def with_float8(make: Callable[[], Call]) -> Callable[[], Call]:
    def call() -> Call:
        made = make()
        for cache in ("key_cache", "value_cache"):
            made[cache] = made[cache].to(torch.float8_e4m3fn)
        return made | {"k_scale": torch.tensor([0.5]), "v_scale": torch.tensor([0.5, 2.0])}

    return call


CALLS: dict[str, tuple[str, Callable[[], Call]]] = {
    "reshape_and_cache": ("reshape_and_cache", reshape_and_cache),
    "reshape_and_cache, fp8": ("reshape_and_cache", with_float8(reshape_and_cache)),
    "fused_rotary_reshape_and_cache": (
        "fused_rotary_reshape_and_cache",
        fused_rotary_reshape_and_cache,
    ),
    "fused_rotary_reshape_and_cache, fp8": (
        "fused_rotary_reshape_and_cache",
        with_float8(fused_rotary_reshape_and_cache),
    ),
    "fused_norm_rotary_reshape_and_cache": (
        "fused_norm_rotary_reshape_and_cache",
        fused_norm_rotary_reshape_and_cache,
    ),
    "fused_rotary_reshape_and_cache, bare": (
        "fused_rotary_reshape_and_cache",
        bare(fused_rotary_reshape_and_cache),
    ),
    "fused_norm_rotary_reshape_and_cache, bare": (
        "fused_norm_rotary_reshape_and_cache",
        bare(fused_norm_rotary_reshape_and_cache),
    ),
    "gather_blocks": ("gather_blocks", gather_blocks),
    "gather_blocks, fp8": ("gather_blocks", with_float8(gather_blocks)),
    "paged_attention": ("paged_attention", paged_attention),
    "paged_attention, everything": ("paged_attention", paged_attention_with_everything),
    "merge_attention_states": ("merge_attention_states", merge_attention_states),
    "copy_blocks": ("copy_blocks", copy_blocks),
    "swap_blocks": ("swap_blocks", swap_blocks),
    "rms_norm": ("rms_norm", rms_norm),
    "fused_add_rms_norm": ("fused_add_rms_norm", fused_add_rms_norm),
    "rotary_embedding": ("rotary_embedding", rotary_embedding),
    "silu_and_mul": ("silu_and_mul", silu_and_mul),
    "gelu_and_mul": ("gelu_and_mul", gelu_and_mul),
    "silu_and_mul, bare": ("silu_and_mul", bare(silu_and_mul)),
    "gelu_and_mul, bare": ("gelu_and_mul", bare(gelu_and_mul)),
    "sample_tokens": ("sample_tokens", sample_tokens),
    "sample_tokens, plainly": ("sample_tokens", sample_tokens_plainly),
    "streamed_linear": ("streamed_linear", streamed_linear),
    "score_tokens": ("score_tokens", score_tokens),
    "advance_step": ("advance_step", advance_step),
    "advance_edits": ("advance_edits", advance_edits),
}
