"""The worked example of the README: two requests share a prompt's blocks; one writes; only the
block it writes is copied.

Every stage is a snapshot of a real manager, so the picture cannot drift from what the code does.
"""

from __future__ import annotations

from dataclasses import dataclass

from pagedkv._core import BlockManager, Snapshot

_NAMES = {0: "request 0", 1: "request 1"}


@dataclass(frozen=True, slots=True)
class ExampleStage:
    """One moment of the example: what happened, and the cache right after it."""

    title: str
    snapshot: Snapshot


def copy_on_write_example(num_blocks: int = 8, block_size: int = 4) -> list[ExampleStage]:
    """Run the example on a manager of its own.

    The prompt fills one block and half of the next, so the shared last block has room to write
    into.

    Args:
        num_blocks: blocks of the pool, at least 3.
        block_size: tokens of a block, at least 2.

    Raises:
        ValueError: a pool too small for the example.
    """
    if num_blocks < 3 or block_size < 2:
        raise ValueError(
            f"the example needs num_blocks >= 3 and block_size >= 2, "
            f"got {num_blocks} and {block_size}"
        )
    manager = BlockManager(num_blocks, block_size, watermark=0.0)
    prompt_len = block_size + block_size // 2
    manager.allocate(0, list(range(1, prompt_len + 1)))
    manager.fork(0, 1)
    stages = [
        ExampleStage(
            f"Before: two requests with the same {prompt_len} prompt tokens hold the same blocks, "
            "each with ref count 2.",
            manager.snapshot(),
        )
    ]
    copies = manager.append(1, 1)
    described = ", ".join(
        f"block {source} -> block {destination}" for source, destination in copies
    )
    stages.append(
        ExampleStage(
            "After: request 1 writes one token. Its last block was shared, so it is copied first "
            f"({described}); the full block stays shared.",
            manager.snapshot(),
        )
    )
    return stages


def example_names() -> dict[int, str]:
    """Names of the example's sequences, for `draw_cache`."""
    return dict(_NAMES)
