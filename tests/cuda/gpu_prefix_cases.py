"""Named paged-attention problems in which sequences share a prefix: PREFIX, PREFIX_SANITIZE, and a
random cover."""

from __future__ import annotations

import random
from dataclasses import replace

import torch
from gpu_attention_cases import E4M3, E5M2, Case, decode

# Two groups, single rows, rows of several tokens, lengths that differ within a group; and in the
# second group sequences that cannot take part: padded, shorter than the prefix, a prefill chunk.
MIXED_ROWS = (
    *decode(33, 700, 641, 690),
    (3, 660),
    *decode(5, 400, 0, 337),
    (2, 350),
    (120, 500),
    *decode(100, 321),
    (70, 90),
)
MIXED_GROUPS = ((1, 4, 40), (6, 7, 20))
MIXED = Case("mixed", MIXED_ROWS, groups=MIXED_GROUPS)


LATE = Case(
    "late",
    decode(*(4097 + i % 90 for i in range(200))),
    num_heads=32,
    num_kv_heads=8,
    groups=((0, 200, 256),),
)


def mixed(name: str, **changes: object) -> Case:
    return replace(MIXED, name=name, **changes)  # type: ignore[arg-type]


PREFIX = (
    Case("one_group", decode(300, 280, 273, 300), groups=((0, 4, 17),)),
    Case("group_of_one", decode(100, 90), groups=((1, 1, 3),)),
    Case("no_blocks", decode(100, 90), groups=((0, 2, 0),)),
    Case("one_block", decode(100, 90), groups=((0, 2, 1),)),
    Case("all_but_one_key", decode(*[257] * 5), groups=((0, 5, 16),)),
    Case("prefix_is_everything", decode(*[256] * 5), groups=((0, 5, 16),)),
    Case("everything_in_pieces", decode(*[256] * 5), groups=((0, 5, 16),), num_splits=3),
    Case("everything_in_one_pass", decode(*[256] * 5), groups=((0, 5, 16),), num_splits=1),
    Case("first_is_padding", decode(0, 256, 300), groups=((0, 3, 16),)),
    Case("long_own_parts", decode(5000, 3000, 9000, 170), groups=((0, 4, 10),)),
    Case("long_prefix", decode(20_003, 20_070, 20_001), groups=((0, 3, 1250),)),
    Case("many_rows", decode(*(1030 + 3 * i for i in range(200))), groups=((3, 190, 64),)),
    Case("many_groups", decode(*[37] * 600), groups=tuple((2 * i, 2, 2) for i in range(300))),
    Case("uneven", decode(*(50 * i + 17 for i in range(60))), groups=((2, 7, 5), (30, 30, 90))),
    # More steps over the prefix than fit beside decode: workers that start with it and behind it.
    replace(LATE, name="early_and_late"),
    replace(LATE, name="early_and_late_mma", cache_dtype=E4M3),
    Case("speculative", tuple((4, 532 + i) for i in range(20)), groups=((0, 20, 33),)),
    MIXED,
    mixed("fp16", dtype=torch.float16),
    mixed("fp32", dtype=torch.float32, head_dim=64),
    mixed("e4m3", cache_dtype=E4M3),
    mixed("e5m2_per_head", cache_dtype=E5M2, scale_per_head=True),
    mixed("fp16_e4m3", dtype=torch.float16, cache_dtype=E4M3, scale_per_head=True),
    mixed("window_inside", window=100),
    mixed("window_behind", window=5),
    mixed("window_between", window=660),
    mixed("window_beyond", window=5000),
    mixed("alibi", alibi=True),
    mixed("soft_cap", soft_cap=5.0),
    mixed("all_features", window=200, alibi=True, soft_cap=20.0, cache_dtype=E4M3),
    mixed("not_causal", causal=False),
    mixed("not_causal_alibi", causal=False, alibi=True),
    mixed("token_major", token_major=True),
    mixed("mqa_64", num_heads=64, num_kv_heads=1),
    mixed("mha", num_heads=3, num_kv_heads=3),
    mixed("group_of_7", num_heads=14, num_kv_heads=2, head_dim=64),
    mixed("group_of_16", num_heads=32, num_kv_heads=2),
    mixed("one_pass", num_splits=1),
    mixed("five_pieces", num_splits=5),
    *(mixed(f"head_dim_{d}", head_dim=d) for d in (8, 64, 80, 96, 112, 192, 256)),
    *(mixed(f"fp8_head_dim_{d}", head_dim=d, cache_dtype=E4M3) for d in (64, 96, 192, 256)),
    mixed("odd_head_dim", head_dim=46),
    mixed("block_size_8", block_size=8, groups=((1, 4, 80), (6, 7, 40))),
    mixed("block_size_24", block_size=24, groups=((1, 4, 26), (6, 7, 13))),
    mixed("block_size_100", block_size=100, groups=((1, 4, 6), (6, 7, 3))),
    mixed("block_size_3", block_size=3, groups=((1, 4, 200), (6, 7, 100))),
    mixed("block_size_64", block_size=64, groups=((1, 4, 10), (6, 7, 5))),
    mixed("block_size_256", block_size=256, groups=((1, 4, 2), (6, 7, 1))),
)

SMALL = Case("prefix", (*decode(33, 70, 65, 0, 90), (2, 70), (40, 80)), num_heads=4, num_kv_heads=1)
PREFIX_SANITIZE = (
    replace(SMALL, groups=((1, 2, 4), (4, 3, 4))),
    replace(SMALL, name="prefix_fp8", groups=((1, 5, 4),), cache_dtype=E4M3, alibi=True),
    replace(SMALL, name="prefix_window", groups=((1, 5, 4),), window=80, head_dim=256),
    replace(SMALL, name="prefix_pieces", groups=((1, 5, 4),), num_splits=3, head_dim=80),
    # Tiles cut over pieces, whole ones and several of a piece.
    replace(SMALL, name="prefix_cut", rows=decode(*[1030] * 40), groups=((0, 40, 64),)),
    replace(
        SMALL,
        name="prefix_cut_mma",
        rows=decode(*[1030] * 40),
        groups=((0, 40, 64),),
        cache_dtype=E4M3,
    ),
    replace(
        SMALL,
        name="prefix_in_turn",
        rows=decode(*[410] * 8),
        groups=((0, 3, 25), (3, 5, 9)),
        num_splits=1,
    ),
)


def random_prefixes(count: int, seed: int) -> list[Case]:
    """Random batches with random groups."""
    draw = random.Random(seed)
    cases = []
    for number in range(count):
        block_size = draw.choice([8, 16, 16, 16, 32, 128])
        rows: list[tuple[int, int]] = []
        groups = []
        for _ in range(draw.randint(1, 5)):
            size = draw.choice([1, 2, 3, 8, 40])
            num_blocks = draw.choice([0, 1, 2, 7, 1000 // block_size])
            if draw.random() < 0.8:
                groups.append((len(rows), size, num_blocks))
            for _ in range(size):
                own = draw.choice([1, 2, 15, 16, 17, 100, 700])
                query_len = draw.choice([1, 1, 1, 2, 3])
                rows.append((query_len, num_blocks * block_size + own + query_len - 1))
        causal = draw.random() < 0.85
        group = draw.choice([1, 4, 4, 8, 16])
        kv_heads = draw.choice([1, 2, 3])
        cases.append(
            Case(
                f"random_{number}",
                tuple(rows),
                num_heads=group * kv_heads,
                num_kv_heads=kv_heads,
                head_dim=draw.choice([64, 96, 128, 128, 128, 256]),
                block_size=block_size,
                dtype=draw.choice([torch.bfloat16, torch.float16]),
                cache_dtype=draw.choice([None, None, E4M3, E5M2]),
                causal=causal,
                window=draw.choice([0, 0, 1, 30, 500]) if causal else 0,
                alibi=draw.random() < 0.3,
                soft_cap=draw.choice([0.0, 0.0, 10.0]),
                num_splits=draw.choice([0, 0, 0, 1, 3]),
                scale_per_head=draw.random() < 0.5,
                groups=tuple(groups),
            )
        )
    return cases
