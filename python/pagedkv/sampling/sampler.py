"""One token per row of logits: greedy rows by argmax, the others by one uniform number and the
inverse of the cumulative distribution.

Order: temperature, top-k, top-p, draw; ids in ascending order along the cumulative distribution.
A row depends on its own logits and parameters only. A row whose logits have no finite maximum, or
hold a NaN, is reported, not guessed at.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from pagedkv.sampling.filters import kth_largest, top_p_cut
from pagedkv.sampling.params import SlotParams
from pagedkv.sampling.philox import uniform

_CHUNK = 256  # the cumulative distribution is walked in chunks first, then within one


def sample(
    logits: torch.Tensor, params: SlotParams, positions: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Choose one token per row.

    Args:
        logits: [n, vocab_size], any floating dtype; computed with in fp32.
        params: of these rows, in their order.
        positions: int64 [n], the index in its sequence of the token that is chosen.

    Returns:
        token ids int64 [n], and bool [n], True where the row had no usable logits (its id is
        meaningless then).
    """
    rows = logits.detach().to(device="cpu", dtype=torch.float32).numpy()
    token_ids = rows.argmax(axis=1)  # a NaN counts as the largest
    largest = rows[np.arange(rows.shape[0]), token_ids]
    failed = ~np.isfinite(largest)
    drawn = np.flatnonzero((params.temperature > 0) & ~failed)
    if drawn.size:
        numbers = uniform(params.seeds[drawn], positions[drawn], params.draws[drawn])
        for number, i in zip(numbers.tolist(), drawn.tolist(), strict=True):
            token_ids[i] = _draw(
                rows[i],
                largest[i],
                float(params.temperature[i]),
                int(params.top_k[i]),
                float(params.top_p[i]),
                number,
            )
    return token_ids, failed


def chosen_logprobs(
    logits: torch.Tensor, params: SlotParams, token_ids: NDArray[np.int64]
) -> NDArray[np.float64] | None:
    """Log-probability of each row's chosen token under the model itself: of the logits as they are,
    before temperature, top-k and top-p.

    Returns:
        float64 [n], 0 in rows that do not want it; None if no row does.
    """
    wanted = np.flatnonzero(params.wants_logprob)
    if wanted.size == 0:
        return None
    rows = _picked(logits, wanted)
    chosen = rows.gather(1, torch.from_numpy(token_ids[wanted])[:, None])[:, 0]
    logprobs = np.zeros(token_ids.size, dtype=np.float64)
    logprobs[wanted] = (chosen.double() - torch.logsumexp(rows.double(), dim=1)).numpy()
    return logprobs


def best_candidates(
    logits: torch.Tensor, params: SlotParams
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]] | None:
    """The most likely tokens of each row that is a beam, best first.

    Returns:
        indices of these rows int64 [m], token ids int64 and log-probabilities float64 [m, k], k the
        most that one of them looks at; None if no row is a beam.
    """
    wanted = np.flatnonzero(params.num_candidates)
    if wanted.size == 0:
        return None
    rows = _picked(logits, wanted)
    num_candidates = min(int(params.num_candidates[wanted].max()), rows.shape[1])
    best = torch.topk(torch.log_softmax(rows, dim=1), num_candidates, dim=1)
    return wanted, best.indices.numpy(), best.values.double().numpy()


def _picked(logits: torch.Tensor, rows: NDArray[np.int64]) -> torch.Tensor:
    """float32 [rows.size, vocab_size] on the CPU; waits for a GPU."""
    picked = logits[torch.from_numpy(rows).to(logits.device)]
    return picked.detach().to(device="cpu", dtype=torch.float32)


def _draw(
    row: NDArray[np.float32],
    largest: np.float32,
    temperature: float,
    top_k: int,
    top_p: float,
    number: float,
) -> int:
    """The token at `number` in [0, 1) of the filtered distribution of row [vocab_size]."""
    if 0 < top_k < row.size:
        ids = np.flatnonzero(row >= kth_largest(row, top_k))
        weights = _weights(row[ids], largest, temperature)
        if top_p < 1:
            cut = top_p_cut(weights, float(weights.sum(dtype=np.float64)), top_p)
            ids, weights = ids[weights >= cut], weights[weights >= cut]
        return int(ids[_inverse(weights, number)])
    weights = _weights(row, largest, temperature)
    if top_p < 1:
        ids = _nucleus(weights, top_p)
        return int(ids[_inverse(weights[ids], number)])
    return _inverse(weights, number)


def _weights(
    values: NDArray[np.float32], largest: np.float32, temperature: float
) -> NDArray[np.float32]:
    """exp((values - largest) / temperature): in (0, 1], the largest exactly 1. The difference comes
    first, so that a tiny temperature overflows to -inf, a weight of 0, and never to NaN.
    """
    shifted = values - largest
    with np.errstate(over="ignore"):
        shifted *= np.float32(1 / temperature)
    np.exp(shifted, out=shifted)
    return shifted


def _nucleus(weights: NDArray[np.float32], top_p: float) -> NDArray[np.int64]:
    """Ids that top-p keeps of weights [vocab_size], whose largest is 1.

    Only weights above a floor are sorted; the floor sinks until what is above it reaches top_p.
    """
    total = float(weights.sum(dtype=np.float64))
    floor = 2.0**-4
    while True:
        ids = np.flatnonzero(weights > floor)
        above = weights[ids]
        if floor == 0 or above.sum(dtype=np.float64) >= top_p * total:
            return ids[above >= top_p_cut(above, total, top_p)]
        floor = floor / 16 if floor > 2.0**-60 else 0.0


def _inverse(weights: NDArray[np.float32], number: float) -> int:
    """The first index whose cumulative weight exceeds number * total; a weight of 0 is never it."""
    starts = np.arange(0, weights.size, _CHUNK)
    ends = np.cumsum(np.add.reduceat(weights, starts), dtype=np.float64)
    target = min(number * ends[-1], np.nextafter(ends[-1], 0.0))
    chunk = int(np.searchsorted(ends, target, side="right"))
    inside = weights[starts[chunk] : starts[chunk] + _CHUNK]
    before = ends[chunk - 1] if chunk else 0.0
    index = int(np.searchsorted(before + np.cumsum(inside, dtype=np.float64), target, side="right"))
    if index == inside.size:  # the two sums of this chunk differ in their last bits
        index = int(np.flatnonzero(inside)[-1])
    return int(starts[chunk]) + index
