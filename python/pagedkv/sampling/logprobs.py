"""Log-probabilities of given tokens, their ranks, and the most likely tokens beside them: under the
model itself, of the logits as they are.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray


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
        logits: [m, vocab_size], any floating dtype; computed with in fp32, summed in fp64.
        token_ids: int64 [m]; one without a logit (padding of the embedding) has the log-probability
            -inf and the last rank.
        num_top: most likely tokens of each row; no more than there are.
    """
    values = logits.detach().float()
    vocab_size = values.shape[1]
    total = torch.logsumexp(values.double(), dim=1)
    has_logit = torch.from_numpy(token_ids < vocab_size).to(values.device)
    wanted = torch.from_numpy(np.minimum(token_ids, vocab_size - 1)).to(values.device)
    own = values.gather(1, wanted[:, None]).where(has_logit[:, None], -torch.inf)
    ranks = 1 + (values > own).sum(dim=1)
    best = torch.topk(values, min(num_top, vocab_size), dim=1)
    return TokenScores(
        rows,
        token_ids,
        (own[:, 0].double() - total).cpu().numpy(),
        ranks.cpu().numpy(),
        best.indices.cpu().numpy(),
        (best.values.double() - total[:, None]).cpu().numpy(),
        np.full(rows.size, num_top, dtype=np.int64),
    )
