"""Applies the rules of requests to their rows of logits, on the device of the logits. The order is
SamplingParams': bias, penalties, functions of the caller's, forbidden tokens, min_p. What follows,
temperature, top-k and top-p, is the samplers'.

A row depends on its own logits, rules and tokens only.
"""

from __future__ import annotations

import logging
import math
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


def process_logits(logits: torch.Tensor, rows: Sequence[RuledRow]) -> torch.Tensor:
    """Logits to choose from.

    Args:
        logits: [n, vocab_size], any floating dtype. It stays as it is.
        rows: those that have rules; at least one.

    Returns:
        float32 [n, vocab_size], -inf where a token must not be chosen. A row without usable logits
        (a NaN, an infinite maximum) is given back as it came, and one whose function raised, which
        is logged, as NaN, so that its request alone fails.
    """
    index = torch.tensor([one.row for one in rows], device=logits.device)
    raw = logits[index].float()
    values = raw.clone()
    _add_bias(values, rows)
    _penalise(values, rows)
    for place, one in enumerate(rows):
        if one.rules.processors:
            values[place] = _processed(values[place], one)
    _keep_allowed(values, rows)
    _forbid(values, rows)
    _apply_min_p(values, rows)
    is_usable = raw.amax(dim=1, keepdim=True).isfinite()
    result = logits.to(torch.float32, copy=True)
    result[index] = values.where(is_usable, raw)
    return result


class _Entries:
    """Elements of a batch of rows, gathered row by row: one indexed access for all of them."""

    def __init__(self) -> None:
        self._places: list[NDArray[np.int64]] = []
        self._ids: list[NDArray[np.int64]] = []
        self._values: list[NDArray[np.float32]] = []

    def add(self, place: int, ids: NDArray[np.int64], *values: NDArray[np.float32]) -> None:
        """values: float32 [ids.size] each, as many with every call."""
        if ids.size:
            self._places.append(np.full(ids.size, place, dtype=np.int64))
            self._ids.append(ids)
            self._values.append(np.array(values, dtype=np.float32).reshape(-1, ids.size))

    def __bool__(self) -> bool:
        return bool(self._ids)

    def index(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """(rows, ids), int64 [num_entries] each."""
        places, ids = np.concatenate(self._places), np.concatenate(self._ids)
        return torch.from_numpy(places).to(device), torch.from_numpy(ids).to(device)

    def values(self, device: torch.device) -> torch.Tensor:
        """float32 [values of a call, num_entries]."""
        return torch.from_numpy(np.concatenate(self._values, axis=1)).to(device)


def _add_bias(logits: torch.Tensor, rows: Sequence[RuledRow]) -> None:
    entries = _Entries()
    for place, one in enumerate(rows):
        entries.add(place, one.rules.bias_ids, one.rules.bias)
    if entries:
        at = entries.index(logits.device)
        logits[at] += entries.values(logits.device)[0]


def _penalise(logits: torch.Tensor, rows: Sequence[RuledRow]) -> None:
    entries = _Entries()
    for place, one in enumerate(rows):
        if one.rules.params.has_penalties:
            ids, taken = one.rules.penalties(one.token_ids)
            factor = np.full(ids.size, one.rules.params.repetition_penalty, dtype=np.float32)
            entries.add(place, ids, factor, taken)
    if not entries:
        return
    at = entries.index(logits.device)
    factors, taken_ = entries.values(logits.device)
    before = logits[at]
    logits[at] = torch.where(before > 0, before / factors, before * factors) - taken_


def _processed(logits: torch.Tensor, one: RuledRow) -> torch.Tensor:
    prompt_len, request_id = one.rules.prompt_len, one.rules.request_id
    shape = logits.shape
    for processor in one.rules.processors:
        # A copy each: what a function writes there must not change the request.
        token_ids = one.token_ids.copy()
        try:
            logits = processor(token_ids[:prompt_len], token_ids[prompt_len:], logits)
            if not isinstance(logits, torch.Tensor) or logits.shape != shape:
                raise TypeError(f"it must return logits of the shape {tuple(shape)}, got {logits}")
        except Exception:
            logger.exception("a logits processor of request %r failed", request_id)
            return torch.full(shape, torch.nan)
    return logits


def _keep_allowed(logits: torch.Tensor, rows: Sequence[RuledRow]) -> None:
    entries = _Entries()
    limited = []
    for place, one in enumerate(rows):
        if one.rules.allowed_ids.size:
            limited.append(place)
            entries.add(place, one.rules.allowed_ids)
    if entries:
        at = entries.index(logits.device)
        kept = logits[at]
        has_nan = logits.isnan().any(dim=1, keepdim=True)  # stays to be seen
        limits = torch.tensor(limited, device=logits.device)
        logits[limits] = torch.full_like(logits[limits], -torch.inf)
        logits[at] = kept
        logits.masked_fill_(has_nan, torch.nan)


def _forbid(logits: torch.Tensor, rows: Sequence[RuledRow]) -> None:
    entries = _Entries()
    for place, one in enumerate(rows):
        entries.add(place, one.rules.forbidden(one.token_ids))
    if entries:
        at = entries.index(logits.device)
        # Not a plain -inf: a NaN stays to be seen.
        logits[at] = logits[at].where(logits[at].isnan(), -torch.inf)


def _apply_min_p(logits: torch.Tensor, rows: Sequence[RuledRow]) -> None:
    """Forbid tokens whose logit / temperature lies more than -log(min_p) below the largest."""
    cuts = [math.log(one.rules.params.min_p) if _has_min_p(one) else -math.inf for one in rows]
    if not any(map(_has_min_p, rows)):
        return
    scales = [float(one.rules.inverse_temperature) for one in rows]
    cut = torch.tensor(cuts, dtype=torch.float32, device=logits.device)[:, None]
    scale = torch.tensor(scales, dtype=torch.float32, device=logits.device)[:, None]
    below = (logits - logits.amax(dim=1, keepdim=True)) * scale < cut
    logits.masked_fill_(below, -torch.inf)


def _has_min_p(one: RuledRow) -> bool:
    return one.rules.params.min_p > 0 and not one.rules.params.is_greedy
