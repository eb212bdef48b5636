"""What a step makes the machine do, in the counts that its time depends on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagedkv.records import ScheduledStep
from pagedkv.scheduler import SlotTable


@dataclass(frozen=True, slots=True)
class StepWork:
    """Counts of one step.

    num_decode_rows: rows with one token; num_context_tokens: K/V they read, their own included.
    num_prefill_tokens: of the chunks of prompts, num_prefill_rows of them; num_prefill_pairs:
    (query, key) pairs that these attend to. num_samples: rows of logits. num_copies, num_swapped:
    blocks copied on write, and moved between the pools.
    """

    num_decode_rows: int
    num_context_tokens: int
    num_prefill_rows: int
    num_prefill_tokens: int
    num_prefill_pairs: int
    num_samples: int
    num_copies: int
    num_swapped: int


def work_of(step: ScheduledStep, table: SlotTable, window: int) -> StepWork:
    """table: as the step was scheduled, before its results are in. window: of RunFacts.

    Token i of a sequence, from 1, attends to min(i, window) tokens, so a chunk of q that ends at s
    to pairs(s) - pairs(s - q), with pairs(n) the sum of the first n.
    """
    lens = step.query_lens
    seq_lens = table.num_computed[step.slots]
    is_chunk = lens > 1
    chunks, ends = lens[is_chunk], seq_lens[is_chunk]
    pairs = _pairs(ends, window) - _pairs(ends - chunks, window)
    return StepWork(
        num_decode_rows=int((~is_chunk).sum()),
        num_context_tokens=int(_seen(seq_lens[~is_chunk], window).sum()),
        num_prefill_rows=int(is_chunk.sum()),
        num_prefill_tokens=int(chunks.sum()),
        num_prefill_pairs=int(pairs.sum()),
        num_samples=int(step.sample_rows.size),
        num_copies=len(step.copies),
        num_swapped=len(step.swap_out) + len(step.swap_in),
    )


def _seen(positions: NDArray[np.int64], window: int) -> NDArray[np.int64]:
    return np.minimum(positions, window) if window else positions


def _pairs(num_tokens: NDArray[np.int64], window: int) -> NDArray[np.int64]:
    near = _seen(num_tokens, window)
    return near * (near + 1) // 2 + (num_tokens - near) * near
