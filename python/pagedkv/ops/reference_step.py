"""The oracle of `pagedkv.ops.advance_step`: row by row, in plain torch. A part of
`pagedkv.ops.reference`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def advance_step(
    lens: Tensor,
    tokens: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    samples: Tensor,
    filters: Tensor,
    inverse_temperatures: Tensor,
    counts: Tensor,
    slots: Tensor,
    query_start_loc: Tensor,
    sample_start_loc: Tensor,
    tables: Tensor,
    draws: Tensor,
    params: Tensor,
    latest: Tensor,
    token_ids: Tensor,
    *,
    block_size: int,
) -> None:
    num_rows, num_pending = counts.tolist()
    starts, sample_starts = query_start_loc.tolist(), sample_start_loc.tolist()
    for row in range(seq_lens.numel()):
        begin, end = starts[row], starts[row + 1]
        own = slice(sample_starts[row], sample_starts[row + 1])
        if row >= num_rows:
            seq_lens[row] = 0
            tokens[:2, begin:end] = 0
            tokens[2, begin:end] = -1
            samples[:, own] = 0
            samples[1, own] = lens.numel()
            filters[0, own] = 1
            filters[1, own] = 0
            inverse_temperatures[own] = 0
            continue
        slot, query_len = int(slots[row]), end - begin
        first = int(lens[slot])
        length = first + query_len
        lens[slot] = seq_lens[row] = length
        num_blocks = -(-length // block_size)
        block_tables[row, :num_blocks] = tables[slot, :num_blocks]
        for t in range(begin, end):
            known = -1 if t < num_pending else int(token_ids[t - num_pending])
            position = first + t - begin
            block = int(tables[slot, position // block_size])
            tokens[0, t] = latest[slot] if known == -1 else known
            tokens[1, t] = position
            tokens[2, t] = block * block_size + position % block_size
        drawn = params[slot].contiguous()
        inverse_temperatures[own] = drawn[:1].view(torch.float32)
        filters[:, own] = drawn[2:6].view(torch.float64)[:, None]
        count = own.stop - own.start
        samples[0, own] = end - 1
        samples[1, own] = slot
        samples[2, own] = drawn[1].long()
        samples[3, own] = drawn[6:8].view(torch.int64)
        samples[4, own] = length
        samples[5, own] = draws[slot] + torch.arange(count, device=draws.device)
