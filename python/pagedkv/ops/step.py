"""From what a device keeps of the running sequences to the inputs of one step. Only a thin call of
the registered operator lives here: checks and kernels are in `csrc/`.
"""

from __future__ import annotations

import torch
from torch import Tensor

_advance_step = torch.ops.pagedkv.advance_step.default


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
    """Write the inputs of a step, and count its tokens, so that the next call is the next step.

    A slot is the stable place of a sequence, a row its place in the step. Row r has the tokens
    query_start_loc[r] to query_start_loc[r + 1] of the step, which are the next ones of the
    sequence at slots[r], and the samples sample_start_loc[r] to sample_start_loc[r + 1]. Rows from
    counts[0] on are padding: tokens 0 at position 0 that are written to no slot, no keys, samples
    that are greedy and nobody's (slot num_slots).

    Args:
        lens: [num_slots] int32: tokens of each sequence before this step.
        tokens: [3, num_tokens] int64: input_ids, positions, slot_mapping.
        block_tables: [num_rows, max_num_blocks or fewer] int32: entries that a row's sequence has.
        seq_lens: [num_rows] int32, this step's tokens included.
        samples: [6, num_samples] int64: the token whose hidden state gives the logits, the slot,
            top_k, seed, position of the sampled token, and draw: those of a row count up.
        filters: [2, num_samples] fp64: top_p, min_p.
        inverse_temperatures: [num_samples] fp32.
        counts: [2] int32: rows that are no padding; leading tokens whose id is latest.
        slots: [num_rows] int32, each once.
        query_start_loc: [num_rows + 1] int32, from 0 on.
        sample_start_loc: [num_rows + 1] int32, from 0 on.
        tables: [num_slots, max_num_blocks] int32: block tables, the step's tokens included.
        draws: [num_slots] int32: of a row's first sample.
        params: [num_slots, 8] int32: the bits of inverse_temperature fp32, top_k int32, top_p,
            min_p fp64, seed int64.
        latest: [num_slots + 1] int64: the token that each slot got last, and nobody's.
        token_ids: [num_token_ids] int32: of the tokens from counts[1] on; -1: the latest too.
        block_size: tokens of a block.

    Returns:
        Nothing.

    Mutates:
        lens: the step's tokens are added. tokens, block_tables, seq_lens, samples, filters,
        inverse_temperatures; not what lies behind the last row's tokens, samples and blocks.

    Raises:
        RuntimeError: device, dtype, layout or shape not as above; on the CPU, slots, lengths,
            counts and offsets outside of what is said here.

    Example: block_size 4; slot 1 has blocks [7, 2], 4 tokens so far, and got token 30 last
        >>> i32, i64 = torch.int32, torch.int64
        >>> lens = torch.tensor([0, 4], dtype=i32)
        >>> tables = torch.tensor([[0, 0], [7, 2]], dtype=i32)
        >>> tokens, samples = torch.empty(3, 1, dtype=i64), torch.empty(6, 1, dtype=i64)
        >>> row, starts = torch.ones(1, dtype=i32), torch.tensor([0, 1], dtype=i32)
        >>> inputs = torch.empty(1, 2, dtype=i32), torch.empty(1, dtype=i32)
        >>> drawn = samples, torch.empty(2, 1, dtype=torch.float64), torch.empty(1)
        >>> counts, params = torch.ones(2, dtype=i32), torch.zeros(2, 8, dtype=i32)
        >>> latest = torch.tensor([0, 30, 0])
        >>> step = counts, row, starts, starts, tables, lens * 0, params, latest, row[:0]
        >>> advance_step(lens, tokens, *inputs, *drawn, *step, block_size=4)
        >>> tokens.flatten(), lens  # slot 8 = 2 * 4 + 0
        (tensor([30,  4,  8]), tensor([0, 5], dtype=torch.int32))

    Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with
    PagedAttention", SOSP 2023 (slots); Holtzman et al. 2020 and others for what is drawn, see
    sample_tokens.
    """
    _advance_step(
        lens,
        tokens,
        block_tables,
        seq_lens,
        samples,
        filters,
        inverse_temperatures,
        counts,
        slots,
        query_start_loc,
        sample_start_loc,
        tables,
        draws,
        params,
        latest,
        token_ids,
        block_size=block_size,
    )
