"""How a step's token budget is shared between the running sequences. Pure arithmetic on arrays."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pagedkv.scheduler.slots import SlotTable


def unfinished(
    order: NDArray[np.int64], table: SlotTable
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Of the slots in order those with tokens left to compute, and how many. A beam that waits for
    the others of its search has none.
    """
    remaining = table.num_tokens[order] - table.num_computed[order]
    has_work = remaining > 0
    return (order, remaining) if has_work.all() else (order[has_work], remaining[has_work])


def share_budget(
    order: NDArray[np.int64], remaining: NDArray[np.int64], max_num_batched_tokens: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows of the next step and their token counts.

    Rows with one token left to compute all take part. Longer ones take what is left of the budget
    in order of arrival: the first its whole remainder if it fits, then the next.

    Since max_num_seqs <= max_num_batched_tokens and a chunk's row holds one of the slots, the
    single-token rows never use up the budget: the first chunk always gets a token.

    Args:
        order: slots of the running sequences in order of arrival.
        remaining: tokens each still has to compute, at least 1.
        max_num_batched_tokens: the step's budget, at least order.size.

    Returns:
        slots and token counts [num_rows], single-token rows first, each kind in order of arrival.

    Example:
        share_budget([4, 0, 7, 2], [1, 9, 1, 30], 16) -> [4, 7, 0, 2], [1, 1, 9, 5]
    """
    is_single = remaining == 1
    if is_single.all():
        return order, remaining
    wanted = remaining[~is_single]
    budget = max_num_batched_tokens - int(is_single.sum())
    given = np.clip(budget - (np.cumsum(wanted) - wanted), 0, wanted)
    has_share = given > 0
    rows = np.concatenate([order[is_single], order[~is_single][has_share]])
    counts = np.concatenate([remaining[is_single], given[has_share]])
    return singles_first(rows, counts)  # a chunk cut down to one token is a single-token row too


def singles_first(
    rows: NDArray[np.int64], counts: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Single-token rows before the others, order otherwise kept: attention takes both in one
    launch.
    """
    by_kind = np.argsort(counts != 1, kind="stable")
    return rows[by_kind], counts[by_kind]
