"""One token per row of logits, by the op sample_tokens on the device of the logits: nothing is read
back. What it does and in which order is told there (ops/sampling.py).
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray

from pagedkv import ops
from pagedkv.sampling.edits import EditTensors
from pagedkv.sampling.params import SlotParams


@dataclass(frozen=True, slots=True, eq=False)
class RowTensors:
    """How the rows of one batch are drawn, on the device of the logits: inverse_temperatures
    float32 [n], 0 where a row is greedy; top_k int64 [n], top_p, min_p float64 [n], as SlotParams;
    seeds, positions, draws int64 [n]: what each row's random number is a function of.
    """

    inverse_temperatures: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor
    draws: torch.Tensor

    @classmethod
    def of(cls, params: SlotParams, positions: NDArray[np.int64]) -> RowTensors:
        """Of these rows, in their order, in CPU memory. positions: int64 [n], the index in its
        sequence of the token that is chosen."""
        arrays = (
            params.inverse_temperatures,
            params.top_k.astype(np.int64),
            params.top_p,
            params.min_p,
            params.seeds.view(np.int64),
            positions,
            params.draws,
        )
        return cls(*(torch.from_numpy(np.ascontiguousarray(one)) for one in arrays))

    def to(self, device: torch.device | str) -> RowTensors:
        """A copy there."""
        return RowTensors(*(getattr(self, one.name).to(device) for one in fields(self)))


def choose(
    logits: torch.Tensor, rows: RowTensors, edits: EditTensors | None = None
) -> torch.Tensor:
    """Choose one token per row.

    Args:
        logits: [n, vocab_size], fp32, bf16 or fp16; computed with in fp32.
        edits: what is made of some of the logits first.

    Returns:
        token ids int64 [n]; -1 where the row had no usable logits: its largest is not finite, or
        one is NaN.
    """
    token_ids = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    ops.sample_tokens(
        token_ids,
        None,
        logits,
        rows.inverse_temperatures,
        rows.top_k,
        rows.top_p,
        rows.min_p,
        rows.seeds,
        rows.positions,
        rows.draws,
        edit_start_loc=None if edits is None else edits.start_loc,
        edit_ids=None if edits is None else edits.ids,
        edit_values=None if edits is None else edits.values,
        is_limited=None if edits is None else edits.is_limited,
    )
    return token_ids
