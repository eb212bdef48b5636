"""The oracles of `pagedkv.ops.advance_step` and `advance_edits`: row by row, in plain torch. A part
of `pagedkv.ops.reference`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pagedkv.ops.step import FORBIDDEN, NO_EDIT, UNSEEN


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


def advance_edits(
    ids: Tensor,
    counts: Tensor,
    values: Tensor,
    start_loc: Tensor,
    is_limited: Tensor,
    rows: Tensor,
    latest: Tensor,
    last_ids: Tensor,
    last_counts: Tensor,
    last_values: Tensor,
    sent: Tensor,
) -> None:
    """See `pagedkv.ops.advance_edits`."""
    starts = start_loc.tolist()
    biases = sent[:, 2].contiguous().view(torch.float32)
    there = list(
        zip(last_ids.tolist(), last_counts.tolist(), last_values[:, 0].tolist(), strict=True)
    )
    here = list(zip(sent[:, 0].tolist(), sent[:, 1].tolist(), biases.tolist(), strict=True))
    for i, (source, length, slot) in enumerate(rows[:, :3].tolist()):
        of_row = rows[i].contiguous()
        repetition = of_row[3:4].view(torch.float32).item()
        frequency, presence = of_row[4:].view(torch.float64).tolist()
        listed = (
            there[source : source + length] if source >= 0 else here[~source : ~source + length]
        )
        edits = {token: (count, bias) for token, count, bias in listed if token != NO_EDIT}
        if slot >= 0:
            token = int(latest[slot])
            count, bias = edits.get(token, (UNSEEN, 0.0))
            if count != FORBIDDEN and (token in edits or not is_limited[i]):
                edits[token] = max(count, 0) + 1, bias
        made = []
        for token, (count, bias) in sorted(edits.items()):
            taken = math.inf if count == FORBIDDEN else 0.0
            if count >= 0:
                taken = frequency * count + presence * (count > 0)
            made.append((token, count, (bias, repetition if count >= 0 else 1.0, taken)))
        made += [(NO_EDIT, UNSEEN, (0.0, 1.0, 0.0))] * (starts[i + 1] - starts[i] - len(made))
        own = slice(starts[i], starts[i + 1])
        ids[own] = ids.new_tensor([token for token, _, _ in made])
        counts[own] = counts.new_tensor([count for _, count, _ in made])
        values[own] = values.new_tensor([value for _, _, value in made]).reshape(-1, 3)
