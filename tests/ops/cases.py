"""Named cases of the small operators: CORRECTNESS, CORNERS and PERFORMANCE. The benchmark
`benchmarks/bench_cpu_ops.py` runs PERFORMANCE; the tests run the others."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RowsCase:
    """Rows of a layer: [num_tokens, width]."""

    name: str
    num_tokens: int
    width: int


@dataclass(frozen=True, slots=True)
class RotaryCase:
    """Heads to rotate."""

    name: str
    num_tokens: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int


@dataclass(frozen=True, slots=True)
class CacheCase:
    """A cache and how many tokens move into or out of it."""

    name: str
    num_tokens: int
    num_blocks: int
    num_kv_heads: int
    block_size: int
    head_dim: int


ROWS_CORRECTNESS = (
    RowsCase("smollm2", 5, 576),
    RowsCase("odd_width", 7, 99),
    RowsCase("many_rows", 300, 160),
    RowsCase("wide", 2, 5000),
)
ROWS_CORNERS = (
    RowsCase("no_rows", 0, 64),
    RowsCase("one_element", 1, 1),
    RowsCase("below_a_vector", 3, 7),
    RowsCase("one_over_a_vector", 3, 17),
)
ROWS_PERFORMANCE = (
    RowsCase("llama3_8b", 2048, 4096),
    RowsCase("smollm2", 2048, 576),
    RowsCase("smollm2_decode", 16, 576),
)

ROTARY_CORRECTNESS = (
    RotaryCase("smollm2", 6, 9, 3, 64, 64),
    RotaryCase("partial", 5, 4, 2, 80, 20),
    RotaryCase("many_tokens", 200, 4, 1, 128, 128),
    RotaryCase("more_pairs_than_a_chunk", 3, 2, 1, 320, 290),
)
ROTARY_CORNERS = (
    RotaryCase("no_tokens", 0, 2, 1, 64, 64),
    RotaryCase("one_pair", 3, 1, 1, 2, 2),
    RotaryCase("odd_half", 3, 3, 3, 46, 46),
    RotaryCase("no_key_heads", 3, 3, 0, 16, 16),
)
ROTARY_PERFORMANCE = (RotaryCase("llama3_8b", 2048, 32, 8, 128, 128),)

CACHE_CORRECTNESS = (
    CacheCase("smollm2", 70, 12, 3, 16, 64),
    CacheCase("block_of_one", 9, 20, 2, 1, 80),
    CacheCase("block_of_256", 300, 3, 1, 256, 128),
    CacheCase("odd_head", 21, 9, 2, 8, 46),
)
CACHE_CORNERS = (
    CacheCase("no_tokens", 0, 4, 2, 16, 64),
    CacheCase("no_tokens_no_blocks", 0, 0, 2, 16, 64),
    CacheCase("one_element", 1, 1, 1, 1, 1),
    CacheCase("full", 32, 2, 1, 16, 24),
)
CACHE_PERFORMANCE = (
    CacheCase("llama3_8b", 8192, 640, 8, 16, 128),
    CacheCase("smollm2", 8192, 640, 3, 16, 64),
)
