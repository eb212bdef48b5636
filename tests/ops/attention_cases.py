"""Named cases of paged attention: CORRECTNESS, CORNERS and PERFORMANCE. Plain data, for the CPU's
and the GPU's tests and for the benchmarks; `attention_operands.py` makes tensors of them.

CORRECTNESS covers every pair of values of FACTORS (`pairwise` makes the cover,
a test proves it). A length is written in terms of the block size B.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

# (sequence length, query tokens); the queries are the sequence's last tokens.
Sequences = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """One call of paged_attention.

    Args:
        sequences: (seq_len, query_len) of each; seq_len 0 is padding.
        group: query heads of a key/value head.
        cache: "same" as dtype, or a float8.
        scales: of a float8 cache, for the whole "tensor" or per "head".
        layout: of all operands, a name of operands.LAYOUTS.
        prefix: (first_seq, num_seqs, num_prefix_blocks) of sequences that share blocks, or None.
    """

    name: str
    sequences: Sequences
    dtype: str = "float32"
    head_dim: int = 64
    group: int = 3
    num_kv_heads: int = 2
    block_size: int = 16
    cache: str = "same"
    scales: str = "tensor"
    causal: bool = True
    window: int = 0
    alibi: bool = False
    soft_cap: float = 0.0
    num_splits: int = 0
    with_lse: bool = True
    layout: str = "contiguous"
    prefix: tuple[int, int, int] | None = None


FACTORS: Mapping[str, Sequence[str]] = {
    "dtype": ("float32", "bfloat16", "float16"),
    "head_dim": ("32", "46", "64", "72", "80", "96", "112", "120", "128", "256"),
    "group": ("1", "3", "4", "8", "64"),
    "block_size": ("1", "3", "8", "16", "32", "128", "256"),
    "length": ("0", "1", "B-1", "B", "B+1", "100", "1025"),
    "queries": ("decode", "chunk", "prefill"),
    "feature": ("plain", "window", "alibi", "soft_cap", "all", "non_causal"),
    "cache": ("same", "float8_e4m3fn", "float8_e5m2"),
    "scales": ("tensor", "head"),
    "num_splits": ("0", "1", "3"),
    "layout": ("contiguous", "sliced", "transposed", "offset"),
    "lse": ("lse", "no_lse"),
}
FEATURES: Mapping[str, Mapping[str, object]] = {
    "plain": {},
    "window": {"window": 21},
    "alibi": {"alibi": True},
    "soft_cap": {"soft_cap": 2.0},
    "all": {"window": 50, "alibi": True, "soft_cap": 3.0},
    "non_causal": {"causal": False},
}
Choice = dict[str, str]
Pair = tuple[str, str, str, str]


def _pairs_of(choice: Mapping[str, str]) -> Iterator[Pair]:
    for a, b in itertools.combinations(FACTORS, 2):
        if a in choice and b in choice:
            yield a, choice[a], b, choice[b]


def all_pairs() -> set[Pair]:
    """Every pair of values of two factors."""
    return {
        (a, x, b, y)
        for a, b in itertools.combinations(FACTORS, 2)
        for x in FACTORS[a]
        for y in FACTORS[b]
    }


def pairwise() -> list[Choice]:
    """Choices that cover all pairs: each takes, factor by factor in random order, the value that
    brings the most pairs not covered yet, and is the best of a few tries. Always the same ones."""
    chooser = random.Random(1)
    missing = all_pairs()
    chosen: list[Choice] = []
    while missing:
        best: tuple[int, Choice] = (-1, {})
        for _ in range(12):
            a, x, b, y = chooser.choice(sorted(missing))
            choice = {a: x, b: y}
            for factor in chooser.sample(list(FACTORS), len(FACTORS)):
                if factor not in choice:
                    choice[factor] = max(
                        chooser.sample(FACTORS[factor], len(FACTORS[factor])),
                        key=lambda value: len(
                            missing.intersection(_pairs_of(choice | {factor: value}))
                        ),
                    )
            choice = {factor: choice[factor] for factor in FACTORS}
            gain = len(missing.intersection(_pairs_of(choice)))
            best = max(best, (gain, choice), key=lambda found: found[0])
        chosen.append(best[1])
        missing.difference_update(_pairs_of(best[1]))
    return chosen


def _case(choice: Choice) -> AttentionCase:
    block_size, group = int(choice["block_size"]), int(choice["group"])
    offsets = {"B-1": block_size - 1, "B": block_size, "B+1": block_size + 1}
    seq_len = offsets.get(choice["length"], -1)
    if seq_len < 0:
        seq_len = int(choice["length"])
    wanted = {"decode": 1, "chunk": 7, "prefill": 20 if group == 64 else 70}[choice["queries"]]
    query_len = min(wanted, seq_len) if seq_len > 0 else 2
    # Neighbours: a decode, a prefill that ends inside a block, a sequence without new tokens.
    sequences = ((37, 1), (seq_len, query_len), (19, 5), (8, 0))
    return AttentionCase(
        name="-".join(choice.values()),
        sequences=sequences,
        dtype=choice["dtype"],
        head_dim=int(choice["head_dim"]),
        group=group,
        num_kv_heads=1 if group == 64 else 2,
        block_size=block_size,
        cache=choice["cache"],
        scales=choice["scales"],
        num_splits=int(choice["num_splits"]),
        with_lse=choice["lse"] == "lse",
        layout=choice["layout"],
        **FEATURES[choice["feature"]],  # type: ignore[arg-type]
    )


CORRECTNESS = tuple(_case(choice) for choice in pairwise())

CORNERS = (
    AttentionCase("one_element", ((1, 1),), head_dim=1, group=1, num_kv_heads=1, block_size=1),
    AttentionCase("head_of_7", ((30, 9), (5, 1)), head_dim=7),
    AttentionCase("head_of_250", ((300, 1), (40, 40)), head_dim=250, dtype="bfloat16"),
    AttentionCase("head_of_33", ((300, 1), (40, 40)), head_dim=33, dtype="bfloat16"),
    AttentionCase("all_padding", ((0, 1), (0, 0), (0, 3))),
    AttentionCase("no_query_tokens", ((5, 0), (9, 0))),
    AttentionCase("no_sequences", ()),
    AttentionCase("only_itself", ((40, 9), (40, 1)), window=1),
    AttentionCase("window_over_all", ((40, 9), (40, 1)), window=1000),
    AttentionCase("window_at_block_edges", ((65, 34), (64, 1), (63, 1)), window=16),
    AttentionCase("window_of_one_tile", ((700, 300), (513, 1)), window=256),
    AttentionCase("window_cuts_pieces", ((2500, 1), (3000, 20)), window=1100, num_kv_heads=1),
    AttentionCase("padding_without_mask", ((0, 2), (12, 3)), causal=False),
    AttentionCase("more_splits_than_keys", ((5, 1), (40, 2), (0, 1)), num_splits=256),
    AttentionCase("long_decode", ((5000, 1), (1, 1)), dtype="bfloat16", num_kv_heads=1),
    AttentionCase("rows_of_two_tiles", ((200, 200),), dtype="bfloat16"),
    AttentionCase("group_over_a_tile", ((70, 5),), group=200, num_kv_heads=1, head_dim=16),
    AttentionCase("rows_to_stream_or_pack", ((90, 8), (90, 9), (90, 4)), group=1),
    AttentionCase("rows_of_panels", tuple((60, n) for n in (11, 12, 13, 24, 25)), group=1),
    AttentionCase("prefix_of_all", ((70, 1), (64, 1), (90, 1)), prefix=(0, 3, 3)),
    AttentionCase(
        "prefix_of_some",
        ((20, 3), (70, 4), (64, 1), (90, 2), (5, 5)),
        dtype="bfloat16",
        prefix=(1, 3, 2),
        num_splits=2,
    ),
    AttentionCase("prefix_is_everything", ((48, 1), (48, 1)), causal=False, prefix=(0, 2, 3)),
    AttentionCase("prefix_ends_before_query", ((49, 1), (50, 2)), prefix=(0, 2, 3)),
    AttentionCase("prefix_outside_window", ((100, 1), (300, 1)), window=20, prefix=(0, 2, 4)),
    AttentionCase("prefix_cut_by_window", ((110, 1), (100, 1)), window=60, prefix=(0, 2, 4)),
    AttentionCase("prefix_of_one", ((100, 1), (300, 1)), prefix=(1, 1, 4)),
    AttentionCase("prefix_of_no_blocks", ((100, 1), (300, 1)), prefix=(0, 2, 0)),
    AttentionCase("prefix_over_many_rows", tuple((600, 5) for _ in range(30)), prefix=(0, 30, 30)),
    AttentionCase(
        "prefix_in_float8",
        ((80, 1), (90, 2), (85, 1)),
        dtype="bfloat16",
        cache="float8_e4m3fn",
        scales="head",
        alibi=True,
        prefix=(0, 3, 4),
    ),
)


@dataclass(frozen=True, slots=True)
class PerformanceCase:
    """A batch to be timed: num_seqs sequences of seq_len tokens, query_len queries each."""

    name: str
    num_seqs: int
    seq_len: int
    query_len: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int = 16
    dtypes: tuple[str, ...] = field(default=("float32", "bfloat16"))


PERFORMANCE = (
    PerformanceCase("smollm2_prefill", 1, 2048, 2048, 9, 3, 64),
    PerformanceCase("smollm2_decode", 16, 4096, 1, 9, 3, 64),
    PerformanceCase("smollm2_chunk", 1, 2048, 256, 9, 3, 64),
    PerformanceCase("smollm2_one_stream", 1, 1024, 1, 9, 3, 64),
    PerformanceCase("llama3_8b_prefill", 1, 1024, 1024, 32, 8, 128),
    PerformanceCase("llama3_8b_decode", 4, 4096, 1, 32, 8, 128),
)
