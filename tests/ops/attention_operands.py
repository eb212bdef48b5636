"""Tensors for an AttentionCase, poisoned: NaN in every cache slot that no sequence owns, absurd ids
in unused table entries, those of blocks behind the window too, NaN in outputs and around every
tensor; and what the result has to be."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from typing import Any

import torch
from attention_cases import AttentionCase
from operands import Arena
from torch import Tensor

from pagedkv.ops import reference

ABSURD_ID = 2**31 - 1
SPARE_ROWS = 2  # query rows that belong to no sequence
SPARE_BLOCKS = 3


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """The operands of one call: `inputs` and `options` by schema name, `out` and `lse` apart."""

    case: AttentionCase
    arena: Arena
    inputs: dict[str, Tensor]
    options: dict[str, Any]
    out: Tensor
    lse: Tensor | None

    @property
    def num_rows(self) -> int:
        """Rows that belong to a sequence: the first ones."""
        return sum(query_len for _, query_len in self.case.sequences)

    def arguments(self, **changes: Any) -> dict[str, Any]:
        """Everything paged_attention takes."""
        return {"out": self.out, "lse": self.lse, **self.inputs, **self.options, **changes}


def first_block(case: AttentionCase, seq: int) -> int:
    """The block of the first key that the sequence's first query sees, or, for the first of a
    prefix group, through whose table the prefix is read, a query of any of the group.
    """
    if case.window == 0:
        return 0
    first, num_seqs, _ = case.prefix or (seq, 1, 0)
    seqs = range(first, first + num_seqs) if seq == first else [seq]
    positions = [case.sequences[s][0] - case.sequences[s][1] for s in seqs]
    return max(0, min(positions) - case.window + 1) // case.block_size


def block_tables(case: AttentionCase, chooser: random.Random) -> tuple[Tensor, int]:
    """Shuffled tables with absurd ids around the used entries, and how many blocks there are."""
    counts = [-(-seq_len // case.block_size) for seq_len, _ in case.sequences]
    num_blocks = sum(counts) + SPARE_BLOCKS
    ids = chooser.sample(range(num_blocks), num_blocks)
    tables = torch.full((len(counts), max(counts, default=0) + 2), ABSURD_ID, dtype=torch.int32)
    first, num_seqs, num_shared = case.prefix or (0, 0, 0)
    shared = [ids.pop() for _ in range(num_shared)]
    for s, count in enumerate(counts):
        begin = num_shared if first <= s < first + num_seqs else 0
        own = shared[:begin] + [ids.pop() for _ in range(count - begin)]
        tables[s, :count] = torch.tensor(own, dtype=torch.int32)
        tables[s, : first_block(case, s)] = ABSURD_ID
    return tables, num_blocks


def caches(case: AttentionCase, tables: Tensor, num_blocks: int) -> tuple[Tensor, Tensor]:
    """Keys and values in the blocks, as the cache stores them; NaN where there are none."""
    shape = (num_blocks, case.num_kv_heads, case.block_size, case.head_dim)
    dtype = getattr(torch, case.dtype if case.cache == "same" else case.cache)
    owned = torch.zeros(num_blocks, case.block_size, dtype=torch.bool)
    for s, (seq_len, _) in enumerate(case.sequences):
        for j in range(first_block(case, s), -(-seq_len // case.block_size)):
            owned[tables[s, j], : seq_len - j * case.block_size] = True
    made = []
    for spread in (1.0, 2.0):
        real = torch.randn(shape) * spread
        real.masked_fill_(~owned[:, None, :, None], math.nan)
        made.append(real.to(dtype))
    return made[0], made[1]


def make(case: AttentionCase, seed: int = 0) -> AttentionCall:
    """The call of a case."""
    torch.manual_seed(seed)
    arena = Arena()
    tables, num_blocks = block_tables(case, random.Random(seed))
    keys, values = caches(case, tables, num_blocks)
    num_heads = case.num_kv_heads * case.group
    dtype = getattr(torch, case.dtype)
    query_lens = [query_len for _, query_len in case.sequences]
    num_tokens = sum(query_lens) + SPARE_ROWS
    rows = (num_tokens, num_heads, case.head_dim)
    starts = [0]
    for query_len in query_lens:
        starts.append(starts[-1] + query_len)
    inputs = {
        "query": torch.randn(rows).to(dtype),
        "key_cache": keys,
        "value_cache": values,
        "block_tables": tables,
        "seq_lens": torch.tensor([n for n, _ in case.sequences], dtype=torch.int32),
        "query_start_loc": torch.tensor(starts, dtype=torch.int32),
    }
    layout = case.layout
    inputs = {name: arena.make(tensor, layout) for name, tensor in inputs.items()}
    options: dict[str, Any] = {
        "max_query_len": max(query_lens, default=0),
        "scale": case.head_dim**-0.5,
        "causal": case.causal,
        "window": case.window,
        "soft_cap": case.soft_cap,
        "num_splits": case.num_splits,
    }
    if case.alibi:
        options["alibi_slopes"] = (torch.rand(2 * num_heads) * 0.1)[::2]
    if case.cache != "same":
        count = case.num_kv_heads if case.scales == "head" else 1
        options["k_scale"] = (torch.rand(2 * count) + 0.3)[::2]
        options["v_scale"] = (torch.rand(3 * count) * 4 + 0.1)[::3]
    if case.prefix is not None:
        empty = (0, 0, 5)
        options["prefix_groups"] = torch.tensor([empty, case.prefix], dtype=torch.int32)
    out = arena.make(torch.full(rows, math.nan).to(dtype), layout)
    lse = arena.make(torch.full(rows[:2], math.nan), layout) if case.with_lse else None
    arena.remember()
    return AttentionCall(case, arena, inputs, options, out, lse)


def again(call: AttentionCall, **changes: Any) -> AttentionCall:
    """The same operands with poisoned outputs of their own and other options."""
    arena = Arena()
    out = arena.make(torch.full_like(call.out, math.nan), call.case.layout)
    lse = None
    if call.lse is not None:
        lse = arena.make(torch.full_like(call.lse, math.nan), call.case.layout)
    arena.remember()
    return replace(call, arena=arena, out=out, lse=lse, options=call.options | changes)


def oracle(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """out and lse in fp32, NaN in the rows outside every sequence."""
    out = torch.full_like(call.out, math.nan, dtype=torch.float32)
    lse = torch.full(out.shape[:2], math.nan)
    reference.paged_attention(**call.arguments(out=out, lse=lse))
    return out, lse


def plain(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """What rounding alone does: out in the query's dtype, lse (whose dtype it is) in fp32."""
    return plain_in(call, call.out.dtype)[0], plain_in(call, torch.float32)[1]


def plain_in(call: AttentionCall, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The same mathematics in one dtype, keys last to first. Dot products are summed in fp32, one
    term after another: matrix libraries do so with many rows and are more exact with one."""
    case, inputs = call.case, call.inputs
    out = torch.full_like(call.out, math.nan, dtype=dtype)
    lse = torch.full(out.shape[:2], math.nan)
    slopes = call.options.get("alibi_slopes")
    starts = inputs["query_start_loc"].tolist()
    for s, (seq_len, query_len) in enumerate(case.sequences):
        rows = slice(starts[s], starts[s + 1])
        if seq_len == 0:
            out[rows], lse[rows] = 0, -math.inf
            continue
        slots = torch.arange(seq_len - 1, first_block(case, s) * case.block_size - 1, -1)
        blocks = inputs["block_tables"][s, slots // case.block_size].long()
        sides = []
        for name in ("key", "value"):
            stored = inputs[f"{name}_cache"][blocks, :, slots % case.block_size].float()
            scale = call.options.get(f"{name[0]}_scale")
            real = stored if scale is None else stored * scale.view(1, -1, 1)
            sides.append(real.to(dtype).repeat_interleave(case.group, dim=1).transpose(0, 1))
        query = inputs["query"][rows].to(dtype).transpose(0, 1)
        dots = torch.zeros(len(query), query_len, slots.numel())
        for d in range(case.head_dim):
            dots += query[:, :, d, None].float() * sides[0][:, None, :, d].float()
        logits = dots.to(dtype) * call.options["scale"]
        if case.soft_cap:
            logits = case.soft_cap * torch.tanh(logits / case.soft_cap)
        away = slots - torch.arange(seq_len - query_len, seq_len).unsqueeze(1)
        if slopes is not None:
            logits = logits + (slopes.view(-1, 1, 1) * away).to(dtype)
        hidden = torch.zeros_like(away, dtype=torch.bool)
        if case.causal:
            hidden |= away > 0
        if case.window:
            hidden |= away <= -case.window
        logits = logits.masked_fill(hidden, -math.inf)
        largest = logits.amax(dim=-1, keepdim=True)
        weights = torch.exp(logits - largest)
        total = weights.sum(dim=-1, keepdim=True)
        out[rows] = (weights @ sides[1] / total).transpose(0, 1)
        lse[rows] = (largest + torch.log(total)).float().squeeze(-1).T
    return out, lse
