"""From what a device keeps of the running sequences to the inputs of one step. Only thin calls of
the registered operators live here: checks and kernels are in `csrc/`.
"""

from __future__ import annotations

import torch
from torch import Tensor

_advance_step = torch.ops.pagedkv.advance_step.default
_advance_edits = torch.ops.pagedkv.advance_edits.default

# Of entries of advance_edits.
NO_EDIT = 2**31 - 1  # an id that edits nothing
UNSEEN = -1  # counts
FORBIDDEN = -(2**31)


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
    """Make the edits of a step, as sample_tokens has them, of those of the step before.

    A row's list goes on from where it was, or is one that is sent. The token that the row's slot
    got last is counted in it: its count goes up by one, from UNSEEN to 1, that of a FORBIDDEN id
    stays; where the list lacks it, it is put in at its place with count 1, unless the row is
    limited. Then the values follow from the counts: (bias, 1, 0) of an UNSEEN id, (bias, 1, inf) of
    a FORBIDDEN one, otherwise (bias, repetition, frequency * count + presence, if count is not 0),
    computed with in fp64.

    Args:
        ids: [num_edits] int32: ascending in a row; behind them NO_EDIT = 2^31 - 1.
        counts: [num_edits] int32: how often each id stands in the answer; 0: in the prompt alone,
            UNSEEN = -1: nowhere, FORBIDDEN = -2^31: it may not come next.
        values: [num_edits, 3] fp32: (bias, factor, taken). Beside NO_EDIT stand UNSEEN, (0, 1, 0).
        start_loc: [num_rows + 1] int32: row i's list is start_loc[i] to start_loc[i + 1], with room
            for what it was and the token.
        is_limited: [num_rows] int32; not 0: nothing is put in.
        rows: [num_rows, 8] int32: source, its length, slot (-1: no token is counted), and the bits
            of repetition fp32, frequency, presence fp64. A source from 0 on is an entry of the last
            step's, and -1 - i entry i of those sent.
        latest: [num_slots] int64: the token that each slot got last.
        last_ids: [num_last] int32, as ids.
        last_counts: [num_last] int32.
        last_values: [num_last, 3] fp32, of which the bias is read.
        sent: [num_sent, 3] int32: id, count, and the bits of bias fp32.

    Returns:
        Nothing.

    Mutates:
        ids, counts, values; not what lies behind the last row's list.

    Raises:
        RuntimeError: device, dtype, layout or shape not as above; on the CPU, offsets, lengths,
            slots and tokens outside of what is said here, and a list without room.

    Example: ids 3 and 8 were in a prompt, 8 then twice in the answer; now 5 has come
        >>> i32, f32 = torch.int32, torch.float32
        >>> ids, counts, values = torch.empty(2, 4, dtype=i32).unbind() + (torch.empty(4, 3),)
        >>> starts, limited = torch.tensor([0, 4], dtype=i32), torch.zeros(1, dtype=i32)
        >>> row = torch.tensor([[0, 2, 0, 0, 0, 0, 0, 0]], dtype=i32)
        >>> row[:, 3:4].view(f32)[:], row[:, 4:].view(torch.float64)[:] = 1.5, 0.25
        >>> last = torch.tensor([3, 8], dtype=i32), torch.tensor([0, 2], dtype=i32)
        >>> sent, latest = torch.empty(0, 3, dtype=i32), torch.tensor([5])
        >>> made = ids, counts, values, starts, limited, row, latest
        >>> advance_edits(*made, *last, torch.zeros(2, 3), sent)
        >>> ids[:3], counts, values[1:3]
        (tensor([3, 5, 8], dtype=torch.int32), tensor([ 0,  1,  2, -1], dtype=torch.int32), \
tensor([[0.0000, 1.5000, 0.5000],
                [0.0000, 1.5000, 0.7500]]))

    Source: Keskar et al., "CTRL: A Conditional Transformer Language Model for Controllable
    Generation", 2019 (repetition penalty); OpenAI's API reference (frequency and presence).
    """
    _advance_edits(
        ids,
        counts,
        values,
        start_loc,
        is_limited,
        rows,
        latest,
        last_ids,
        last_counts,
        last_values,
        sent,
    )
