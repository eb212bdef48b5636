"""Choosing a token from each row of logits, and how likely tokens are. Only thin calls of the
registered operators live here: checks and kernels are in `csrc/`.
"""

from __future__ import annotations

import torch
from torch import Tensor

_sample_tokens = torch.ops.pagedkv.sample_tokens.default
_score_tokens = torch.ops.pagedkv.score_tokens.default


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
    """Choose one token per row: the largest logit, or a draw from what the filters leave.

    In this order: edits, temperature, min_p, top_k, top_p. Filters keep whole groups of equal
    logits, so each is a cut: a token stays if its logit is not below it.
        min_p: logits l with (l - largest) / temperature >= log(min_p).
        top_k: logits of at least the k-th largest.
        top_p: the largest cut that leaves top_p of the probability that the other filters leave.
    The token drawn is the first, in the order of ids, where the cumulative probability exceeds a
    number in [0, 1), which Philox4x32-10 makes of the row's seed, position and draw alone. A row
    depends on its own entries only. Computed with in fp32, whatever the dtype.

    Args:
        token_ids: [num_rows] int64: the tokens; -1 where a logit is NaN or the largest is not
            finite.
        cuts: [num_rows] fp32: smallest logit that could be chosen, -inf without filters; NaN
            beside -1. None: not wanted.
        logits: [num_rows, vocab_size], fp32, bf16 or fp16; at most 1,048,576 tokens.
        inverse_temperatures: [num_rows] fp32; 0 takes the first of the largest logits.
        top_k: [num_rows] int64; 0 keeps all.
        top_p: [num_rows] fp64, above 0; 1 keeps all.
        min_p: [num_rows] fp64, 0 to 1; 0 keeps all.
        seeds: [num_rows] int64, the bits of an unsigned number; the generator's key.
        positions: [num_rows] int64; with draws the generator's counter.
        draws: [num_rows] int64.
        edit_start_loc: [num_rows + 1] int32: edits edit_start_loc[i] to edit_start_loc[i + 1] are
            row i's. None: no row has any; the other three are None too.
        edit_ids: [num_edits] int32, ascending in a row; 2^31 - 1 at its end edits nothing.
        edit_values: [num_edits, 3] fp32, (bias, factor, taken): the logit x becomes, with
            y = x + bias, (y / factor if y > 0 else y * factor) - taken; -inf if taken is inf.
        is_limited: [num_rows] int32; not 0: tokens without an edit are not chosen.

    Returns:
        Nothing.

    Mutates:
        token_ids, cuts.

    Raises:
        RuntimeError: device, dtype, layout or shape not as above; some of the edits' operands
            without the others; on the CPU, options and edits outside of what is said here.

    Example:
        >>> ids, cuts = torch.empty(2, dtype=torch.int64), torch.empty(2)
        >>> logits = torch.tensor([[1.0, 3.0, 2.0, 3.0], [1.0, 3.0, 2.0, 3.0]])
        >>> none, one = torch.zeros(2, dtype=torch.int64), torch.ones(2, dtype=torch.float64)
        >>> temperatures, ks = torch.tensor([0.0, 1.0]), torch.tensor([0, 3])
        >>> sample_tokens(ids, cuts, logits, temperatures, ks, one, one * 0, none, none, none)
        >>> ids, cuts  # greedy; a draw by 0.39 of weights 1, 0.37, 1, as the third largest is 2
        (tensor([1, 1]), tensor([3., 2.]))

    Source: Holtzman et al., "The Curious Case of Neural Text Degeneration", 2020 (top-p); Nguyen et
    al., "Turning Up the Heat: Min-p Sampling", 2024; Keskar et al., "CTRL", 2019 (repetition
    penalty); Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011 (Philox).
    """
    _sample_tokens(
        token_ids,
        cuts,
        logits,
        inverse_temperatures,
        top_k,
        top_p,
        min_p,
        seeds,
        positions,
        draws,
        edit_start_loc=edit_start_loc,
        edit_ids=edit_ids,
        edit_values=edit_values,
        is_limited=is_limited,
    )


def score_tokens(
    logprobs: Tensor,
    ranks: Tensor,
    top_ids: Tensor,
    top_logprobs: Tensor,
    logits: Tensor,
    token_ids: Tensor,
) -> None:
    """Log-probability and rank of one token of each row of logits, and the row's most likely ones.

    Args:
        logprobs: [num_rows] fp64, natural; -inf where the token has no logit, NaN where a logit is
            NaN or the largest is not finite.
        ranks: [num_rows] int64: 1 + number of larger logits; 0 beside NaN.
        top_ids: [num_rows, num_top] int64, best first, the lower id of equal logits; -1 beside NaN.
            num_top is at most 512 and vocab_size; it may be 0.
        top_logprobs: [num_rows, num_top] fp64.
        logits: [num_rows, vocab_size], fp32, bf16 or fp16; at most 1,048,576 tokens.
        token_ids: [num_rows] int64; those outside of the vocabulary have no logit.

    Returns:
        Nothing.

    Mutates:
        logprobs, ranks, top_ids, top_logprobs.

    Raises:
        RuntimeError: device, dtype, layout or shape not as above.

    Example:
        >>> logprobs, ranks = torch.empty(1, dtype=torch.float64), torch.empty(1, dtype=torch.int64)
        >>> top_ids = torch.empty(1, 2, dtype=torch.int64)
        >>> logits = torch.tensor([[1.0, 4.0, 2.0]]).log()
        >>> tops = torch.empty(1, 2, dtype=torch.float64)
        >>> score_tokens(logprobs, ranks, top_ids, tops, logits, torch.tensor([2]))
        >>> logprobs.exp(), ranks, top_ids  # 2 of 7
        (tensor([0.2857], dtype=torch.float64), tensor([2]), tensor([[1, 2]]))

    Source: the definition of softmax.
    """
    _score_tokens(logprobs, ranks, top_ids, top_logprobs, logits, token_ids)
