"""streamed_linear on the GPU: the oracle in every epilogue, shapes that the streams take and those
that they do not, rows that do not depend on each other, kernels that wait for each other.
"""

from __future__ import annotations

import math

import pytest
import torch
from operands import assert_same
from torch import Tensor

from pagedkv import ops
from pagedkv.ops import reference

EPILOGUES = ("store", "add", "silu_and_mul")
HALVES = (torch.bfloat16, torch.float16)
# num_tokens, in_features, out_features
STREAMED = [
    (1, 4096, 6144),  # several passes a block
    (8, 4096, 4096),
    (5, 1024, 4096),
    (1, 2048, 1024),  # a tile a block
    (2, 64, 16),  # one block, one slab
    (3, 576, 34),  # slabs that do not fill the last step, columns that do not fill a tile
    (7, 14336, 48),  # the input in chunks
    (8, 3200, 4240),  # chunks, over several passes
]
# Of more rows, whose blocks work in clusters (from five on, if there is no norm).
CLUSTERED = [
    (5, 1024, 4096),
    (9, 4096, 6144),  # clusters of two
    (32, 1024, 4096),
    (16, 14336, 48),  # more steps than stages
    (17, 576, 80),  # slabs that do not fill the last step, groups that do not fill a tile
    (64, 64, 16),  # one group, one step, a block without any
    (33, 192, 28672),  # a block alone
    (31, 128, 70016),  # several passes
    (64, 128, 70016),
    (65, 704, 6144),  # clusters of two, whose parts are not equally long
    (96, 64, 16),
    (97, 1024, 80),
    (128, 192, 28672),  # a block alone
    (80, 128, 70016),  # several passes
    (128, 128, 70016),
]
# Of 129 to 256 rows, all multiplied at once if a gate is behind them.
WIDE = [
    (129, 64, 224),  # one step
    (192, 1024, 4096),
    (193, 1024, 4096),
    (160, 1000, 1040),  # a last step of 40 elements, columns that do not fill a block
    (256, 4096, 272),  # more steps than stages
    (192, 192, 32000),  # more blocks than multiprocessors
    (255, 192, 32000),
]
# Of many rows, in tiles.
TILED = [
    (257, 576, 16),  # one box of columns, as few steps as there may be
    (300, 14336, 144),  # more steps than stages, halves that are no whole tiles
    (512, 640, 512),
    (1000, 1024, 4112),  # rows and columns that do not fill the last tiles
    (1025, 640, 14336),  # several tiles a cluster, of which one's second block has no rows
    (2048, 4096, 512),
    (4500, 576, 1024),  # several groups of rows
]
OTHERS = [
    (300, 512, 64),  # too few steps
    (129, 64, 32),
    (130, 256, 80),
    (200, 99, 34),
    (256, 64, 20),
    (9, 64, 34),
    (70, 64, 34),
    (2, 1000, 64),
    (3, 99, 34),
    (1, 1, 2),
    (4, 7, 130),
]


def made(
    size: tuple[int, int, int], dtype: torch.dtype, epilogue: str, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """(out with poison or old values, input, weight); rows of wider matrices, NaN beside them."""
    num_tokens, in_features, out_features = size
    columns = out_features // 2 if epilogue == "silu_and_mul" else out_features

    def inside(rows: int, columns: int) -> Tensor:
        wide = torch.full((rows, columns + 16), math.nan, dtype=dtype, device=device)
        return wide[:, 8 : columns + 8]

    out, x, weight = (
        inside(num_tokens, columns),
        inside(num_tokens, in_features),
        inside(out_features, in_features),
    )
    x.copy_(torch.randn(x.shape, device=device))
    weight.copy_(torch.randn(weight.shape, device=device) / math.sqrt(in_features))
    if epilogue == "add":
        out.copy_(torch.randn(out.shape, device=device))
    return out, x, weight


def options(
    size: tuple[int, int, int], dtype: torch.dtype, normed: bool, device: torch.device
) -> dict[str, object]:
    if not normed or (min(size[0], 8) + 1) * size[1] > 73728 or size in TILED:
        return {}
    bias = torch.randn(size[2], device=device).to(dtype)
    if size[0] > 32:  # more rows are normed eight at a time, fewer too
        return {"bias": bias}
    return {
        "bias": bias,
        "norm_weight": torch.rand(size[1], device=device).to(dtype),
        "epsilon": 1e-5,
    }


@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
@pytest.mark.parametrize("size", STREAMED + CLUSTERED + WIDE + TILED + OTHERS, ids=str)
def test_it_matches_the_oracle(size, dtype, epilogue, normed, device) -> None:
    if dtype == torch.float32 and size in WIDE + TILED:
        pytest.skip("OTHERS has what only the plain kernel takes")
    out, x, weight = made(size, dtype, epilogue, device)
    more = options(size, dtype, normed, device)
    want = out.clone()
    reference.streamed_linear(want, x, weight, epilogue=epilogue, **more)
    ops.streamed_linear(out, x, weight, epilogue=epilogue, **more)
    epsilon = torch.finfo(dtype).eps
    error = (out.float() - want.float()).abs()
    assert torch.isfinite(out).all()
    assert (error <= 4 * epsilon * want.float().abs().clamp(min=2) + 2e-6).all()
    assert torch.isnan(out.as_strided((out.shape[0], 4), out.stride(), out.shape[1] + 8)).all()


def test_more_rows_than_a_grid_has_in_one_direction(device) -> None:
    x = torch.randn(70_000, 3, device=device)
    weight, out = torch.randn(2, 3, device=device), torch.full((70_000, 2), math.nan, device=device)
    ops.streamed_linear(out, x, weight)
    torch.testing.assert_close(out, x @ weight.T)


@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("size", [size for size in STREAMED if size[0] > 1], ids=str)
def test_a_row_has_the_same_bits_alone_and_again(size, epilogue, normed, device) -> None:
    more = options(size, torch.bfloat16, normed, device)
    if not more:
        size = (min(size[0], 4), *size[1:])
    out, x, weight = made(size, torch.bfloat16, epilogue, device)
    again = out.clone()
    alone = [row.clone().unsqueeze(0) for row in out]
    ops.streamed_linear(out, x, weight, epilogue=epilogue, **more)
    ops.streamed_linear(again, x, weight, epilogue=epilogue, **more)
    assert_same(again, out, "a second run")
    for row, single, together in zip(x, alone, out, strict=True):
        ops.streamed_linear(single, row.unsqueeze(0), weight, epilogue=epilogue, **more)
        assert_same(single[0], together, "the row alone")


# For each kind of kernel: ranges of rows that are multiplied by themselves, as parts of the first.
CLUSTERED_ROWS = (0, 128), (0, 5), (7, 16), (3, 19), (20, 52), (31, 95), (50, 128), (9, 80)
WIDE_ROWS = (0, 256), (0, 129), (3, 195), (127, 256), (50, 250), (7, 200)
TILED_ROWS = (0, 1100), (0, 257), (7, 400), (129, 1025), (800, 1100)
BESIDE = [
    *((size, CLUSTERED_ROWS) for size in CLUSTERED),
    *((size, WIDE_ROWS) for size in WIDE),
    *((size, TILED_ROWS) for size in TILED),
]


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize(("size", "ranges"), BESIDE, ids=str)
def test_a_row_has_the_same_bits_whatever_is_beside_it(size, ranges, epilogue, device) -> None:
    num_rows = ranges[0][1]
    out, x, weight = made((num_rows, *size[1:]), torch.bfloat16, epilogue, device)
    old = out.clone()
    ops.streamed_linear(out, x, weight, epilogue=epilogue)
    for first, end in ranges:
        part = old[first:end].clone()
        ops.streamed_linear(part, x[first:end], weight, epilogue=epilogue)
        assert_same(part, out[first:end], f"rows {first} to {end}")


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("size", [(20, 256, 1040), (70, 128, 28672), (9, 64, 70016)], ids=str)
def test_results_that_are_not_aligned_to_vectors(size, epilogue, device) -> None:
    # Of two blocks that share rows, of a block alone, and of one of several passes.
    out, x, weight = made(size, torch.bfloat16, epilogue, device)
    wide = torch.full((size[0], out.shape[1] + 3), math.nan, dtype=torch.bfloat16, device=device)
    odd = wide[:, 1:-2]
    odd.copy_(out)
    ops.streamed_linear(out, x, weight, epilogue=epilogue)
    ops.streamed_linear(odd, x, weight, epilogue=epilogue)
    assert_same(odd, out)
    assert torch.isnan(wide[:, [0, -2, -1]]).all()


@pytest.mark.parametrize("num_tokens", [1, 8, 9, 64, 96, 128, 160, 256])
def test_kernels_that_start_early_see_what_was_written_before(num_tokens, device) -> None:
    # A chain in which each product reads what the two before it wrote, many times: once with the
    # kernels overlapping, once alone.
    weights = [torch.randn(1024, 1024, device=device).bfloat16() / 40 for _ in range(12)]
    gated = [torch.cat(pair) for pair in zip(weights[::2], weights[1::2], strict=True)]
    norm = torch.rand(1024, device=device).bfloat16()

    def chain(residual: Tensor, *, alone: bool) -> Tensor:
        x = torch.empty_like(residual)
        for first, second, both in zip(weights[::2], weights[1::2], gated, strict=True):
            if num_tokens > 8:
                normed = torch.empty_like(residual)
                ops.rms_norm(normed, residual, norm, 1e-5)
                if alone:
                    torch.cuda.synchronize()
                if num_tokens > 128:
                    ops.streamed_linear(x, normed, both, epilogue="silu_and_mul")
                else:
                    ops.streamed_linear(x, normed, first)
            else:
                ops.streamed_linear(x, residual, first, norm_weight=norm, epsilon=1e-5)
            if alone:
                torch.cuda.synchronize()
            ops.streamed_linear(residual, x, second, epilogue="add")
            if alone:
                torch.cuda.synchronize()
        return residual

    start = torch.randn(num_tokens, 1024, device=device).bfloat16()
    want = chain(start.clone(), alone=True)
    graph, residual = torch.cuda.CUDAGraph(), start.clone()
    with torch.cuda.graph(graph):
        chain(residual, alone=False)
    for _ in range(50):
        residual.copy_(start)
        graph.replay()
        assert_same(residual, want)
