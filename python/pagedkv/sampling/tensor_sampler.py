"""sampler.py's choice of tokens on tensors of any device, for logits that stay on a GPU: nothing is
read back, and nothing is sorted. The uniform numbers come from outside.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn import functional

from pagedkv.sampling.params import SlotParams

_CHUNK = 256  # the cumulative distribution is walked in chunks first, then within one
_KEY_BITS = 32


@dataclass(frozen=True, slots=True, eq=False)
class RowTensors:
    """Of the rows of one batch, on the device of the logits: inverse_temperatures float32 [n], 0
    where a row is greedy; top_k int64 [n], 0 keeps all; top_p, numbers float64 [n], a number in
    [0, 1) for each draw.
    """

    inverse_temperatures: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    numbers: torch.Tensor


class Kinds(NamedTuple):
    """What the rows of a batch ask for at all. Known on the CPU, so that nothing that no row wants
    is launched; more than they ask for changes no token.
    """

    draws: bool
    has_top_k: bool
    has_top_p: bool

    @classmethod
    def of(cls, params: SlotParams, vocab_size: int) -> Kinds:
        is_drawn = params.temperature > 0
        is_cut = (params.top_k > 0) & (params.top_k < vocab_size)
        return cls(
            bool(is_drawn.any()),
            bool((is_drawn & is_cut).any()),
            bool((is_drawn & (params.top_p < 1)).any()),
        )


def choose(logits: torch.Tensor, rows: RowTensors, kinds: Kinds) -> torch.Tensor:
    """One token per row, as sample() chooses it with the same number; the sums of its distribution
    may differ in their last bits.

    Args:
        logits: [n, vocab_size], any floating dtype; computed with in fp32.
        kinds: of the same rows.

    Returns:
        token ids int64 [n]; -1 where the row had no usable logits.
    """
    best, token_ids = logits.max(dim=1)  # a NaN counts as the largest
    largest = best.float()
    if kinds.draws:
        # The difference of 16-bit logits and an fp32 vector is made in fp32, in one pass.
        weights = (logits - largest[:, None]).mul_(rows.inverse_temperatures[:, None]).exp_()
        if kinds.has_top_k:
            values = logits.float()
            weights = weights.where(values >= _kth_largest(values, rows.top_k)[:, None], 0.0)
        if kinds.has_top_p:
            weights = weights.where(weights >= _nucleus_cut(weights, rows.top_p)[:, None], 0.0)
        drawn = _inverse(weights, rows.numbers)
        token_ids = drawn.where(rows.inverse_temperatures > 0, token_ids)
    return token_ids.where(largest.isfinite(), -1)


def _kth_largest(values: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """[n]: the k-th largest of each row of values [n, vocab_size]; -inf where top_k is 0.

    Bit by bit from the highest, the largest key that at least k keys of the row reach.
    """
    keys = _ordered(values)
    wanted = top_k[:, None].clamp(max=values.shape[1])
    found = torch.full_like(wanted, -(2 ** (_KEY_BITS - 1)))
    for bit in reversed(range(_KEY_BITS)):
        higher = found + 2**bit
        reaches = (keys >= higher).sum(dim=1, keepdim=True) >= wanted
        found = higher.where(reaches & (wanted > 0), found)
    kth = _values_of(found[:, 0])
    return kth.where(top_k > 0, -torch.inf)


def _nucleus_cut(weights: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """[n]: the largest weight such that those of the row not below it reach top_p of its sum."""
    total = weights.sum(dim=1, dtype=torch.float64)[:, None]
    wanted = top_p[:, None] * total
    keys = weights.view(torch.int32)  # weights are not negative: their bits have their order
    found = torch.zeros_like(wanted, dtype=torch.int64)
    for bit in reversed(range(_KEY_BITS - 1)):
        higher = found + 2**bit
        above = weights.where(keys >= higher, 0.0).sum(dim=1, keepdim=True, dtype=torch.float64)
        found = higher.where(above >= wanted, found)
    cut = found[:, 0].to(torch.int32).view(torch.float32)
    return cut.where(top_p < 1, 0.0)


def _ordered(values: torch.Tensor) -> torch.Tensor:
    """int32 keys with the order of fp32 values; -0.0 becomes 0.0: equals have equal keys."""
    bits = (values + 0.0).view(torch.int32)
    return bits.where(bits >= 0, bits ^ 0x7FFFFFFF)


def _values_of(keys: torch.Tensor) -> torch.Tensor:
    """The fp32 values of int64 keys [n]."""
    bits = keys.to(torch.int32)
    return bits.where(bits >= 0, bits ^ 0x7FFFFFFF).view(torch.float32)


def _inverse(weights: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """int64 [n]: the first index of each row of weights [n, vocab_size] whose cumulative weight
    exceeds number * total; a weight of 0 is never it.
    """
    padding = -weights.shape[1] % _CHUNK
    if padding:
        weights = functional.pad(weights, (0, padding))
    chunks = weights.view(weights.shape[0], -1, _CHUNK)
    # fp64 sums of all elements would first make a copy of them in fp64.
    ends = chunks.sum(dim=2).cumsum(dim=1, dtype=torch.float64)
    total = ends[:, -1:]
    below = torch.nextafter(total, torch.zeros_like(total))
    target = (numbers[:, None] * total).minimum(below)
    # A row of NaN is none of its chunks.
    chunk = torch.searchsorted(ends, target, right=True).clamp(max=ends.shape[1] - 1)
    before = ends.gather(1, (chunk - 1).clamp(min=0)).where(chunk > 0, 0.0)
    inside = chunks.gather(1, chunk[:, :, None].expand(-1, 1, _CHUNK))[:, 0]
    reached = before + inside.cumsum(dim=1, dtype=torch.float64)
    index = torch.searchsorted(reached, target, right=True)
    # Where the two sums of this chunk differ in their last bits: the last that has a weight.
    places = torch.arange(_CHUNK, device=weights.device)
    last = places.where(inside > 0, 0).amax(dim=1, keepdim=True)
    return (chunk * _CHUNK + index.minimum(last))[:, 0]
