"""The rules of requests as edits of single logits, made by the sampler as it reads them. The order
is SamplingParams': bias, penalties, functions of the caller's, forbidden tokens. What follows,
temperature, min_p, top-k and top-p, is the sampler's own. How the edits of a batch get to a device
and go on from step to step there: edit_lists.py.

A row depends on its own logits, rules and tokens only.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from pagedkv.ops.step import FORBIDDEN, UNSEEN
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
    """Of one row: ids int32 [m], ascending, and of each how often it stands in the answer, int32
    [m], where penalties depend on that, UNSEEN or FORBIDDEN as advance_edits has them; bias float32
    [m]; whether ids without an edit are forbidden.
    """

    ids: NDArray[np.int32]
    counts: NDArray[np.int32]
    bias: NDArray[np.float32]
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


def edits_of(one: RuledRow, *, before: bool = True, behind: bool = True) -> Edits:
    """before: with bias and penalties, which come before functions; behind: with what is forbidden,
    which comes behind them.
    """
    rules = one.rules
    nothing = np.empty(0, dtype=np.int64)
    bias_ids = rules.bias_ids if before else nothing
    forbidden = rules.forbidden(one.token_ids) if behind else nothing
    allowed = rules.allowed_ids if behind else nothing
    seen, often = nothing, nothing
    if before and rules.params.has_penalties:
        seen, often = rules.seen(one.token_ids)
    is_limited = allowed.size > 0
    ids = np.unique(np.concatenate([bias_ids, seen, forbidden, allowed]))
    counts = np.full(ids.size, UNSEEN, dtype=np.int32)
    counts[np.searchsorted(ids, seen)] = often
    counts[np.searchsorted(ids, forbidden)] = FORBIDDEN
    bias = np.zeros(ids.size, dtype=np.float32)
    bias[np.searchsorted(ids, bias_ids)] = rules.bias if before else 0.0
    if is_limited:
        kept = np.isin(ids, allowed)
        ids, counts, bias = ids[kept], counts[kept], bias[kept]
    return Edits(ids.astype(np.int32), counts, bias, is_limited)


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
            result[one.row] = _processed(_edited(row, one), one)
    return result


def _edited(logits: torch.Tensor, one: RuledRow) -> torch.Tensor:
    """A copy of logits float32 [vocab_size] with bias and penalties, as advance_edits and
    sample_tokens would make them.
    """
    edits, params = edits_of(one, behind=False), one.rules.params
    counts = np.maximum(edits.counts, 0)
    taken = params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
    factor = np.where(edits.counts == UNSEEN, 1.0, params.repetition_penalty)
    ids = torch.from_numpy(edits.ids.astype(np.int64)).to(logits.device)
    values = np.stack([edits.bias, factor, taken]).astype(np.float32)
    bias, factors, less = torch.from_numpy(values).to(logits.device)
    changed = logits[ids] + bias
    changed = torch.where(changed > 0, changed / factors, changed * factors) - less
    return logits.index_copy(0, ids, changed)


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
