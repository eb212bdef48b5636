"""How whole blocks move: counted on the GPU's timeline, and right whichever way they go."""

from __future__ import annotations

import pytest
import torch
from operands import assert_same
from torch import Tensor

from pagedkv import ops
from pagedkv.engine.gpu_timeline import Activity, record
from pagedkv.ops import reference

# A block over all layers has 256 KiB in bf16, the least that goes by the copy engines.
LAYERS, HEADS, BLOCK, DIM = 4, 8, 32, 64


def block_major(num_blocks: int, device: torch.device | None) -> Tensor:
    """[LAYERS, 2, num_blocks, HEADS, BLOCK, DIM] as the engine has it; None: in pinned memory."""
    made = torch.randn(num_blocks, LAYERS, 2, HEADS, BLOCK, DIM).bfloat16()
    made = made.pin_memory() if device is None else made.to(device)
    return made.permute(1, 2, 0, 3, 4, 5)


def moved(source: Tensor, destination: Tensor, pairs: Tensor, stream: object) -> list[Activity]:
    """What the GPU did for a swap on that stream, whose result is checked against the oracle."""
    before = destination.clone(memory_format=torch.preserve_format)
    want = before.cpu().clone(memory_format=torch.preserve_format)
    reference.swap_blocks(source.cpu(), want, pairs)

    def run() -> None:
        with torch.cuda.stream(stream):
            ops.swap_blocks(source, destination, pairs)

    run()  # loads the kernel
    torch.cuda.synchronize()
    destination.copy_(before)
    torch.cuda.synchronize()
    activities = record(run)
    assert_same(destination.cpu(), want)
    return activities


@pytest.mark.parametrize("layers", [1, 32])
def test_a_copy_is_one_launch_for_all_layers(layers: int, device: torch.device) -> None:
    pool = torch.randn(layers, 2, 9, 2, 16, 64, device=device).bfloat16()
    pairs = torch.tensor([[0, 4], [1, 5], [2, 8]])
    want = pool.clone()
    reference.copy_blocks(want, pairs)
    ops.copy_blocks(pool.clone(), pairs)  # loads the kernel
    names = [one.name for one in record(lambda: ops.copy_blocks(pool, pairs))]
    assert len(names) == 1
    assert "move_blocks" in names[0]
    assert_same(pool, want)


@pytest.mark.parametrize("way", ["in", "out"])
def test_long_runs_go_by_the_copy_engines(way: str, device: torch.device) -> None:
    pools = block_major(8, device), block_major(8, None)
    source, destination = pools if way == "out" else pools[::-1]
    pairs = torch.tensor([[7, 1], [0, 4], [3, 0]])
    activities = moved(source, destination, pairs, torch.cuda.Stream())
    assert activities
    assert all(one.way == way for one in activities), activities


@pytest.mark.parametrize("way", ["in", "out"])
def test_long_runs_go_by_a_kernel_where_copies_cannot(way: str, device: torch.device) -> None:
    # A batch of copies has no order of its own, and none is possible on the legacy default stream.
    pools = block_major(8, device), block_major(8, None)
    source, destination = pools if way == "out" else pools[::-1]
    twice = torch.tensor([[7, 1], [0, 1], [3, 0], [2, 1]])
    independent = torch.tensor([[7, 1], [0, 4]])
    for pairs, stream in (
        (twice, torch.cuda.Stream()),
        (independent, torch.cuda.default_stream()),
    ):
        names = [one.name for one in moved(source, destination, pairs, stream)]
        assert len(names) == 1
        assert "move_blocks" in names[0]
