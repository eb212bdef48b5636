"""Every number of query heads of a KV head, with every head size, and every block size, against the
fp32 oracle under poison. The pairwise cover has some of each, with everything else."""

from __future__ import annotations

import pytest
import torch
from gpu_attention_cases import E4M3, E5M2, Case, Problem, check, decode

HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256)
DTYPES = (torch.bfloat16, torch.float16)
STORED = (None, E4M3, E5M2)


# 71 is Falcon-7B's. More than 64 rows of one query token are prefilled.
@pytest.mark.parametrize("group", [*range(1, 65), 71, 128])
def test_every_group_with_every_head_size(group: int, device: torch.device) -> None:
    # One token, a few, and a chunk; between them a sequence of nothing.
    rows = (*decode(37, 300, 0), (2, 90), (33, 130))
    for i, head_dim in enumerate(HEAD_DIMS):
        case = Case(
            f"group_{group}_head_dim_{head_dim}",
            rows,
            num_heads=2 * group,
            num_kv_heads=2,
            head_dim=head_dim,
            dtype=DTYPES[(group + i) % 2],
            cache_dtype=STORED[(group // 2 + i) % 3],
        )
        problem = Problem(case, device)
        check(problem, *problem.run())


@pytest.mark.parametrize("block_size", range(1, 257))
def test_every_block_size(block_size: int, device: torch.device) -> None:
    # A group of 4 decodes by the kernel of small batches, one of 16 by the other; multiples of 8
    # on tensor cores, others by the plain kernel.
    rows = (*decode(block_size - 1, block_size, block_size + 1, 2 * block_size + 1), (40, 290))
    for group in (4, 16):
        case = Case(
            f"block_size_{block_size}_group_{group}",
            rows,
            num_heads=2 * group,
            num_kv_heads=2,
            head_dim=64,
            block_size=block_size,
            dtype=DTYPES[group // 4 % 2],
            cache_dtype=STORED[(block_size + group) % 3],
        )
        problem = Problem(case, device)
        check(problem, *problem.run())
