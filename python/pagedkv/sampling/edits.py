"""The rules of requests as edits of single logits, made by the sampler as it reads them. The order
is SamplingParams': bias, penalties, functions of the caller's, forbidden tokens. What follows,
temperature, min_p, top-k and top-p, is the sampler's own.

A row depends on its own logits, rules and tokens only.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from pagedkv.sampling.logit_rules import LogitRules

logger = logging.getLogger(__name__)


class RuledRow(NamedTuple):
    """A row of logits, its rules, and the tokens before the one to be chosen: int32 [num_tokens],
    prompt first.
    """

    row: int
    rules: LogitRules
    token_ids: NDArray[np.int32]


class Edits(NamedTuple):
    """Of one row: ids int32 [m], ascending; values float32 [m, 3], (bias, factor, taken) as
    sample_tokens has them; whether ids without an edit are forbidden.
    """

    ids: NDArray[np.int32]
    values: NDArray[np.float32]
    is_limited: bool


class EditTensors(NamedTuple):
    """Of the rows of a batch, on the device of its logits: the edits of row i are start_loc[i] to
    start_loc[i + 1], int32 [num_rows + 1], of ids int32 [num_edits] and values float32 [num_edits,
    3]. is_limited int32 [num_rows].
    """

    start_loc: torch.Tensor
    ids: torch.Tensor
    values: torch.Tensor
    is_limited: torch.Tensor


def edit_tensors(
    rows: Sequence[RuledRow], num_rows: int, device: torch.device | str = "cpu"
) -> EditTensors:
    """Of a batch of num_rows, of which these have rules, in ascending order. The edits of a row
    with functions are those behind them: call_functions() has made the others.

    On a GPU they come in one copy, which nobody waits for: a row with a bias alone is launched
    before the step before it has ended.
    """
    starts = np.zeros(num_rows + 1, dtype=np.int32)
    is_limited = np.zeros(num_rows, dtype=np.int32)
    ids, values = [np.empty(0, dtype=np.int32)], [np.empty((0, 3), dtype=np.float32)]
    for one in rows:
        edits = edits_of(one, before=not one.rules.processors)
        starts[one.row + 1] = edits.ids.size
        is_limited[one.row] = edits.is_limited
        ids.append(edits.ids)
        values.append(edits.values)
    bits = np.concatenate(values).view(np.int32).reshape(-1)
    parts = np.cumsum(starts, dtype=np.int32), np.concatenate(ids), bits, is_limited
    place = torch.device(device)
    # torch keeps pinned memory as it is until the copy that reads it has ended.
    size = sum(one.size for one in parts)
    packed = torch.empty(size, dtype=torch.int32, pin_memory=place.type == "cuda")
    np.concatenate(parts, out=packed.numpy())
    start_loc, edit_ids, edit_bits, limited = torch.split(
        packed.to(place, non_blocking=True), [one.size for one in parts]
    )
    return EditTensors(start_loc, edit_ids, edit_bits.view(torch.float32).view(-1, 3), limited)


def edits_of(one: RuledRow, *, before: bool = True, behind: bool = True) -> Edits:
    """before: with bias and penalties, which come before functions; behind: with what is forbidden,
    which comes behind them.
    """
    rules = one.rules
    nothing = np.empty(0, dtype=np.int64)
    bias_ids = rules.bias_ids if before else nothing
    forbidden = rules.forbidden(one.token_ids) if behind else nothing
    allowed = rules.allowed_ids if behind else nothing
    seen, taken = nothing, np.empty(0, dtype=np.float32)
    if before and rules.params.has_penalties:
        seen, taken = rules.penalties(one.token_ids)
    is_limited = allowed.size > 0
    ids = np.unique(np.concatenate([bias_ids, seen, forbidden, allowed]))
    values = np.zeros((ids.size, 3), dtype=np.float32)
    values[:, 1] = 1.0
    values[np.searchsorted(ids, bias_ids), 0] = rules.bias if before else 0.0
    penalised = np.searchsorted(ids, seen)
    values[penalised, 1] = rules.params.repetition_penalty
    values[penalised, 2] = taken
    values[np.searchsorted(ids, forbidden), 2] = np.inf
    if is_limited:
        kept = np.isin(ids, allowed)
        ids, values = ids[kept], values[kept]
    return Edits(ids.astype(np.int32), values, is_limited)


def call_functions(logits: torch.Tensor, rows: Sequence[RuledRow]) -> torch.Tensor:
    """Logits to edit and choose from: those given, if no row has functions of the caller's.

    Args:
        logits: [n, vocab_size], any floating dtype. It stays as it is.
        rows: those that have rules.

    Returns:
        else float32 [n, vocab_size]. A row without usable logits (a NaN, an infinite maximum) is
        given back as it came, and one whose function raised, which is logged, as NaN, so that its
        request alone fails.
    """
    with_functions = [one for one in rows if one.rules.processors]
    if not with_functions:
        return logits
    result = logits.to(torch.float32, copy=True)
    for one in with_functions:
        row = result[one.row]
        if row.amax().isfinite():
            result[one.row] = _processed(_edited(row, edits_of(one, behind=False)), one)
    return result


def _edited(logits: torch.Tensor, edits: Edits) -> torch.Tensor:
    """A copy of logits float32 [vocab_size] with edits that limit nothing."""
    ids = torch.from_numpy(edits.ids.astype(np.int64)).to(logits.device)
    bias, factor, taken = torch.from_numpy(edits.values).to(logits.device).unbind(1)
    values = logits[ids] + bias
    values = torch.where(values > 0, values / factor, values * factor) - taken
    return logits.index_copy(0, ids, values)


def _processed(logits: torch.Tensor, one: RuledRow) -> torch.Tensor:
    prompt_len, request_id = one.rules.prompt_len, one.rules.request_id
    shape, device = logits.shape, logits.device
    for processor in one.rules.processors:
        # A copy each: what a function writes there must not change the request.
        token_ids = one.token_ids.copy()
        try:
            logits = processor(token_ids[:prompt_len], token_ids[prompt_len:], logits)
            if (
                not isinstance(logits, torch.Tensor)
                or (logits.shape, logits.device, logits.layout) != (shape, device, torch.strided)
                or not logits.is_floating_point()
            ):
                raise TypeError(
                    f"it must return a tensor of floats of the shape {tuple(shape)} on {device}, "
                    f"got {logits!r:.200}"
                )
        except Exception:  # of a user's function, whatever it is: its own row fails
            logger.exception("a logits processor of request %r failed", request_id)
            return torch.full(shape, torch.nan, device=device)
    return logits
