"""The block manager: which block of the KV cache belongs to whom, for any engine. No torch.

A thin door to the compiled core (`pagedkv._core`, whose stub documents every call). The manager is
arithmetic on ids and launches nothing: copy-on-write and swaps come back as (source, destination)
pairs, which the caller runs in the order in which they were returned, before the kernels of the
step being built. One thread owns a manager; others read its snapshots.

Example: two requests share a prompt's blocks, then one of them writes::

    manager = BlockManager(num_blocks=8, block_size=4)
    manager.allocate(0, [1, 2, 3, 4, 5, 6])  # 0 tokens cached; two blocks, the second half full
    manager.fork(0, 1)                       # request 1 holds the same two blocks
    manager.append(1)                        # [(1, 2)]: copy block 1 to block 2, then write there
"""

from pagedkv._core import (
    FREED_BLOCK,
    BlockManager,
    BlockState,
    CanAllocate,
    DoubleFree,
    InvariantViolation,
    MissReason,
    OutOfBlocks,
    PrefixGrouper,
    PrefixMiss,
    Snapshot,
    Statistics,
    StepState,
    StepTables,
    UnknownSequence,
)
from pagedkv.block_manager.prefix_costs import PrefixRates, prefix_costs

__all__ = [
    "FREED_BLOCK",
    "BlockManager",
    "BlockState",
    "CanAllocate",
    "DoubleFree",
    "InvariantViolation",
    "MissReason",
    "OutOfBlocks",
    "PrefixGrouper",
    "PrefixMiss",
    "PrefixRates",
    "Snapshot",
    "Statistics",
    "StepState",
    "StepTables",
    "UnknownSequence",
    "prefix_costs",
]
