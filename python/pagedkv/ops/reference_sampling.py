"""The oracles of `pagedkv.ops.sample_tokens` and `score_tokens`: plain NumPy, by sorting all there
is. A part of `pagedkv.ops.reference`.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pagedkv.ops.philox import uniform
from pagedkv.ops.step import NO_EDIT


def filtered_weights(
    row: NDArray[np.float32], inverse_temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[NDArray[np.float64], float]:
    """Weights [vocab_size] of a row with a finite maximum, 0 where a filter leaves a token out, and
    the cut: the smallest logit left, -inf without filters.
    """
    shifted = (row - row.max()) * np.float32(inverse_temperature)
    weights = np.exp(shifted).astype(np.float64)
    cut = -math.inf
    if min_p > 0:
        cut = float(row[shifted >= np.float32(math.log(min_p))].min())
    if 0 < top_k < row.size:
        cut = max(cut, float(np.sort(row)[-top_k]))
    weights[row < cut] = 0
    if top_p < 1:
        order = np.argsort(-row, kind="stable")
        reached = np.cumsum(weights[order])
        enough = np.flatnonzero(reached >= top_p * reached[-1])
        cut = float(row[order[enough[0]]])
        weights[row < cut] = 0
    return weights, cut


def edited(row: NDArray[np.float32], ids: Tensor, values: Tensor, limited: bool) -> None:
    """Makes a row's edits in place, each as `pagedkv.ops.sample_tokens` says."""
    is_edit = ids != NO_EDIT
    ids, values = ids[is_edit], values[is_edit]
    if limited:
        row_before = row.copy()
        row[row < math.inf] = -math.inf
        row[ids.numpy()] = row_before[ids.numpy()]
    for token_id, (bias, factor, taken) in zip(ids.tolist(), values.numpy(), strict=True):
        value = row[token_id] + bias
        row[token_id] = (value / factor if value > 0 else value * factor) - taken


def sample_tokens(
    token_ids: Tensor,
    cuts: Tensor | None,
    logits: Tensor,
    inverse_temperatures: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    draws: Tensor,
    *,
    edit_start_loc: Tensor | None = None,
    edit_ids: Tensor | None = None,
    edit_values: Tensor | None = None,
    is_limited: Tensor | None = None,
) -> None:
    """See `pagedkv.ops.sample_tokens`."""
    rows = logits.detach().float().cpu().numpy().copy()
    numbers = uniform(
        seeds.cpu().numpy().view(np.uint64), positions.cpu().numpy(), draws.cpu().numpy()
    )
    for i, row in enumerate(rows):
        if edit_start_loc is not None:
            assert edit_ids is not None
            assert edit_values is not None
            assert is_limited is not None
            begin, end = edit_start_loc[i : i + 2].tolist()
            ids, values = edit_ids[begin:end].cpu(), edit_values[begin:end].cpu()
            edited(row, ids, values, bool(is_limited[i]))
        token_id, cut = -1, math.nan
        if math.isfinite(row.max()):  # a NaN counts as the largest
            inverse = float(inverse_temperatures[i])
            if inverse == 0:
                token_id, cut = int(row.argmax()), float(row.max())
            else:
                weights, cut = filtered_weights(
                    row, inverse, int(top_k[i]), float(top_p[i]), float(min_p[i])
                )
                ends = np.cumsum(weights)
                target = min(numbers[i] * ends[-1], np.nextafter(ends[-1], 0.0))
                token_id = int(np.searchsorted(ends, target, side="right"))
        token_ids[i] = token_id
        if cuts is not None:
            cuts[i] = cut


def score_tokens(
    logprobs: Tensor,
    ranks: Tensor,
    top_ids: Tensor,
    top_logprobs: Tensor,
    logits: Tensor,
    token_ids: Tensor,
) -> None:
    """See `pagedkv.ops.score_tokens`."""
    num_top = top_ids.shape[1]
    for i, row in enumerate(logits.detach().double().cpu().numpy()):
        if not math.isfinite(row.max()):  # a NaN counts as the largest
            logprobs[i], ranks[i], top_ids[i], top_logprobs[i] = math.nan, 0, -1, math.nan
            continue
        log_sum = row.max() + math.log(np.exp(row - row.max()).sum())
        token_id = int(token_ids[i])
        own = row[token_id] if 0 <= token_id < row.size else -math.inf
        logprobs[i], ranks[i] = own - log_sum, 1 + int((row > own).sum())
        for place, best in enumerate(np.argsort(-row, kind="stable")[:num_top].tolist()):
            top_ids[i, place], top_logprobs[i, place] = best, row[best] - log_sum
