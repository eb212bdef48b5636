"""Log-probabilities of given tokens, their ranks, and the most likely tokens beside them: under the
model itself, of the logits as they are, before any option changes them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from pagedkv import ops
from pagedkv.sampling.params import SlotParams


class TokenScores(NamedTuple):
    """Of m tokens. rows int64 [m]: whose they are, as the maker says. logprobs float64, ranks int64
    [m]: of each token; rank 1 is the most likely. top_ids int64, top_logprobs float64 [m, num_top]:
    the most likely tokens, best first. num_tops int64 [m]: how many of these each wants.
    """

    rows: NDArray[np.int64]
    token_ids: NDArray[np.int64]
    logprobs: NDArray[np.float64]
    ranks: NDArray[np.int64]
    top_ids: NDArray[np.int64]
    top_logprobs: NDArray[np.float64]
    num_tops: NDArray[np.int64]


def score_tokens(
    logits: torch.Tensor, rows: NDArray[np.int64], token_ids: NDArray[np.int64], num_top: int
) -> TokenScores:
    """Waits for a GPU.

    Args:
        logits: [m, vocab_size], any floating dtype; computed with in fp32.
        token_ids: int64 [m]; one without a logit (padding of the embedding) has the log-probability
            -inf and the last rank.
        num_top: most likely tokens of each row; no more than there are.
    """
    logprobs, ranks, top_ids, top_logprobs = (
        one.cpu().numpy() for one in _scored(logits, token_ids, num_top)
    )
    num_tops = np.full(rows.size, num_top, dtype=np.int64)
    return TokenScores(rows, token_ids, logprobs, ranks, top_ids, top_logprobs, num_tops)


def _scored(
    logits: torch.Tensor, token_ids: NDArray[np.int64], num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(logprobs, ranks, top_ids, top_logprobs) as TokenScores has them, on the logits' device."""
    shape = logits.shape[0], min(num_top, logits.shape[1])

    def made(dtype: torch.dtype, *sizes: int) -> torch.Tensor:
        return torch.empty(sizes, dtype=dtype, device=logits.device)

    scored = (
        made(torch.float64, shape[0]),
        made(torch.int64, shape[0]),
        made(torch.int64, *shape),
        made(torch.float64, *shape),
    )
    ops.score_tokens(*scored, logits.detach(), torch.from_numpy(token_ids).to(logits.device))
    return scored


def chosen_logprobs(
    logits: torch.Tensor, params: SlotParams, token_ids: NDArray[np.int64]
) -> NDArray[np.float64] | None:
    """Log-probability of each row's chosen token.

    Returns:
        float64 [n], 0 in rows that do not want it; None if no row does.
    """
    wanted = np.flatnonzero(params.wants_logprob)
    if wanted.size == 0:
        return None
    rows = logits[torch.from_numpy(wanted).to(logits.device)]
    logprobs = np.zeros(token_ids.size, dtype=np.float64)
    logprobs[wanted] = _scored(rows, token_ids[wanted], 0)[0].cpu().numpy()
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
    picked = logits[torch.from_numpy(wanted).to(logits.device)]
    rows = picked.detach().to(device="cpu", dtype=torch.float32)
    num_candidates = min(int(params.num_candidates[wanted].max()), rows.shape[1])
    best = torch.topk(torch.log_softmax(rows, dim=1), num_candidates, dim=1)
    return wanted, best.indices.numpy(), best.values.double().numpy()
