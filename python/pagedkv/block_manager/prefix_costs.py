"""When sharing a prefix pays, and what it costs on a GPU: the arguments of `PrefixGrouper`.

The rule. Costs are counted in keys read: 1 is the time to read one token's K and V of one layer,
on a GPU from the L2, where the first sequence's reading leaves them for the others. A group of n
sequences over a prefix of L tokens saves, with m = n rounded up to whole tiles of seqs_per_tile,

    saved = (n - 1) * L - n * per_row - m * L * per_row_key

since the prefix is read once instead of n times, every sequence's rows are ended twice, and the
products with the prefix are hidden behind the reading of its own keys in part only. Of nested
groups, the level or the set of deeper groups that saves most is taken. There is no group at all
unless all together save more than per_step. A prefix is at most the full blocks that a sequence's
first query sees, seq_len - query_len + 1 tokens. Sequences of more than max_query_len query tokens
(prefill is bound by products: sharing saves it nothing), longer than the window if it is not 0, or
with freed first blocks stay out.

`PrefixGrouper.find(block_tables, seq_lens, query_lens, slots)` returns the groups among neighbours,
[num_groups, 3] int32 rows (first_seq, num_seqs, num_prefix_blocks) by first_seq. block_tables is
int32 [num rows, max_num_blocks], a writable NumPy array or torch CPU tensor, and only read;
seq_lens [num_seqs] count this step's tokens too; query_lens [num_seqs]; slots [num_seqs] are the
sequences' rows of block_tables, None if row i is sequence i's. With block_size 4, tables [9, 2, 5],
[9, 2, 7] and [3, 1, 6], lengths 11, 10 and 12, one query token each and no costs it is [[0, 2, 2]]:
8 keys read once instead of twice.

`arrange`, where sequences may change places, returns (order, groups): place i takes sequence
order[i]; those that can take part come first, those that share together; groups count places.
"""

from __future__ import annotations

from dataclasses import dataclass

ROWS_PER_TILE = 128  # query tokens x query heads of a KV head, multiplied together


@dataclass(frozen=True, slots=True)
class PrefixRates:
    """Rates of one GPU. The defaults are an H200's, fitted to the shapes of
    benchmarks/results/2026-11-30-prefix2048-attempts.md, of which they choose those that gain."""

    read: float = 1.6e13  # bytes/s of K and V that another sequence reads too: from the L2
    states: float = 3.7e12  # bytes/s of rows' second ends, as prefix_costs counts their bytes
    products: float = 1.1e15  # FLOP/s of the prefix's tiles, half of them beside decode
    launches_us: float = 12.5  # start and end of the kernel that a call has more


def prefix_costs(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    element_bytes: int = 2,
    rates: PrefixRates | None = None,
) -> dict[str, float | int]:
    """Keyword arguments of `PrefixGrouper`, for sequences of one query token.

    Args: element_bytes: of the cache, 1 for float8.

    Example: Llama-3-8B, 32 query heads and 8 KV heads of 128, bf16. A key has 4,096 bytes and takes
    0.26 ns to read; the launch is worth 48,828 keys, which groups have to save together:

        >>> costs = prefix_costs(32, 8, 128)
        >>> round(costs["per_step"]), costs["seqs_per_tile"]
        (48828, 32)
    """
    used = PrefixRates() if rates is None else rates
    key_seconds = 2 * num_kv_heads * head_dim * element_bytes / used.read
    # As if two states of a row, fp32 sums and two numbers for every head, were written and read.
    state_bytes = 4 * num_heads * (head_dim + 2) * 4
    return {
        "per_step": used.launches_us * 1e-6 / key_seconds,
        "per_row": state_bytes / used.states / key_seconds,
        "per_row_key": 4 * num_heads * head_dim / used.products / key_seconds,
        "seqs_per_tile": max(1, ROWS_PER_TILE * num_kv_heads // num_heads),
    }
