"""Faults that cache kernels and small layers have had elsewhere, each as the behaviour that is
right."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from calls import CALLS
from operands import DTYPES, FLOAT8, assert_same
from torch import Tensor

from pagedkv import ops
from pagedkv.ops import reference

E4M3 = torch.float8_e4m3fn


def poisoned(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full(shape, math.nan, device=device).to(dtype)


def scales_for(dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    if dtype not in FLOAT8:
        return {}
    return {
        name: torch.tensor([s], device=device) for name, s in (("k_scale", 0.3), ("v_scale", 2.0))
    }


@pytest.mark.parametrize("cache_dtype", [None, *FLOAT8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_negative_slot_leaves_every_slot_alone(dtype, cache_dtype, device) -> None:
    stored = cache_dtype or dtype
    shape = (4, 2, 8, 64)
    caches = [torch.randn(shape, device=device).to(stored) for _ in range(2)]
    before = [cache.clone() for cache in caches]
    query, key, value = torch.randn(3, 5, 2, 64, device=device).to(dtype)
    slots = torch.tensor([-1, -2, -(2**40), -1, -1], device=device)
    scales = scales_for(stored, device)
    ops.reshape_and_cache(key, value, *caches, slots, **scales)
    positions, table = torch.arange(5, device=device), torch.rand(5, 64, device=device)
    for is_neox in (True, False):
        ops.fused_rotary_reshape_and_cache(
            positions, query, key, value, table, *caches, slots, is_neox, **scales
        )
    for cache, old in zip(caches, before, strict=True):
        assert_same(cache, old)


def test_rows_behind_the_slot_mapping_are_padding(device) -> None:
    caches = [poisoned((4, 2, 8, 64), torch.bfloat16, device) for _ in range(2)]
    key, value = torch.randn(2, 9, 2, 64, device=device).bfloat16()
    slots = torch.tensor([31, 0, 17], device=device)
    wants = [cache.clone() for cache in caches]
    reference.reshape_and_cache(key, value, *wants, slots)
    ops.reshape_and_cache(key, value, *caches, slots)
    for cache, want in zip(caches, wants, strict=True):
        assert_same(cache, want)


@pytest.mark.parametrize("float8", FLOAT8)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_number_is_quantised_as_the_oracle_does_by_any_scale(
    dtype, float8, device
) -> None:
    # The kernel refines a product with the reciprocal; it must be the exact quotient, rounded.
    # Ties, denormals, infinities and NaN among the numbers, extremes among the scales.
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32, device=device).to(torch.int16)
    key = every.view(dtype).view(1024, 1, 64)
    mantissas = 1 + torch.rand(12)
    scales = [0.01, 8.0, 1.0, 3.0, 0.1, 1e-30, 1e30, 1e-38, 1e-42, 3e38, 2.0**-60, 2.0**60]
    scales += [m.item() * 2.0**e for m, e in zip(mantissas, range(-66, 66, 11), strict=True)]
    slots = torch.arange(1024, device=device)
    for number in scales:
        caches = [poisoned((64, 1, 16, 64), float8, device) for _ in range(2)]
        scale = torch.tensor([number], device=device)
        ops.reshape_and_cache(key, key, *caches, slots, k_scale=scale, v_scale=scale)
        want = reference.quantize(key, scale, float8)
        for cache in caches:
            assert_same(cache.view(1024, 1, 64), want, f"scale {number}")


@pytest.mark.parametrize("float8", FLOAT8)
def test_what_is_too_large_for_a_float8_saturates(float8, device) -> None:
    key = torch.tensor([1e4, -1e4, 3e38, -3e38, math.inf, -math.inf], device=device)
    key = key.bfloat16().repeat_interleave(64).view(6, 1, 64)
    caches = [poisoned((1, 1, 8, 64), float8, device) for _ in range(2)]
    for number in (0.01, 0.1):
        scale = torch.tensor([number], device=device)
        ops.reshape_and_cache(
            key, key, *caches, torch.arange(6, device=device), k_scale=scale, v_scale=scale
        )
        largest = torch.finfo(float8).max
        stored = caches[0][0, 0, :6].float()
        if float8 == E4M3 or number == 0.01:
            assert (stored.abs() == largest).all()
        assert torch.isfinite(stored).all()


@pytest.mark.parametrize("hidden", [3584, 4104, 8192, 896, 4, 5])
def test_norms_of_any_hidden_size_are_right(hidden, device) -> None:
    for dtype in DTYPES:
        x, weight = torch.randn(3, hidden, device=device).to(dtype), torch.rand(hidden).to(dtype)
        weight = weight.to(device)
        out, want = torch.empty_like(x), torch.empty(3, hidden, device=device)
        ops.rms_norm(out, x, weight, 1e-5)
        reference.rms_norm(want, x, weight, 1e-5)
        limit = 2 * torch.finfo(dtype).eps
        torch.testing.assert_close(out.float(), want, atol=2e-6, rtol=limit)
        in_place = x.clone()
        ops.rms_norm(in_place, in_place, weight, 1e-5)
        assert_same(in_place, out)


def layouts(tensor: Tensor) -> dict[str, Tensor]:
    """The same values in other memory: part of wider rows, heads outside, an odd start."""
    tokens, heads, dim = tensor.shape
    wide = torch.full((tokens, heads + 3, dim + 8), math.nan, dtype=tensor.dtype).to(tensor.device)
    made = {"sliced": wide[:, 1:-2, :dim]}
    made["transposed"] = torch.empty_like(tensor.transpose(0, 1).contiguous()).transpose(0, 1)
    made["offset"] = torch.empty(tensor.numel() + 1, dtype=tensor.dtype).to(tensor.device)[1:]
    made["offset"] = made["offset"].view(tensor.shape)
    for view in made.values():
        view.copy_(tensor)
    return made


@pytest.mark.parametrize("layout", ["sliced", "transposed", "offset"])
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, E4M3])
def test_strides_of_new_keys_and_of_the_cache_are_honoured(cache_dtype, layout, device) -> None:
    key, value = torch.randn(2, 20, 4, 64, device=device).bfloat16()
    scales, slots = scales_for(cache_dtype, device), torch.randperm(64, device=device)[:20]
    want = [poisoned((4, 4, 16, 64), cache_dtype, device) for _ in range(2)]
    ops.reshape_and_cache(key, value, *want, slots, **scales)
    # Heads and tokens of a block the other way round in memory, and a gap behind each block.
    gap = [poisoned((4, 17, 4, 64), cache_dtype, device)[:, :16].transpose(1, 2) for _ in "12"]
    moved = layouts(key)[layout], layouts(value)[layout]
    ops.reshape_and_cache(*moved, *gap, slots, **scales)
    for got, expected in zip(gap, want, strict=True):
        assert_same(got.contiguous(), expected)
    starts = torch.tensor([0, 12, 20], dtype=torch.int32, device=device)
    table = torch.tensor([[9, 2, 9], [9, 0, 9]], dtype=torch.int32, device=device)[:, 1:2]
    plain = [torch.empty_like(key) for _ in range(2)]
    ops.gather_blocks(*plain, *want, table, starts, **scales)
    strided = [layouts(torch.zeros_like(key))[layout] for _ in range(2)]
    ops.gather_blocks(*strided, *gap, table, starts, **scales)
    for got, expected in zip(strided, plain, strict=True):
        assert_same(got.contiguous(), expected)


def test_positions_do_not_begin_at_zero_after_a_prefix_hit(device) -> None:
    # The second half of a prompt, alone, is rotated as it was with the first one before it.
    query, key = torch.randn(40, 4, 64, device=device), torch.randn(40, 2, 64, device=device)
    table = torch.rand(64, 64, device=device)
    positions = torch.arange(40, device=device)
    whole = query.clone(), key.clone()
    ops.rotary_embedding(positions, *whole, table)
    tail = query[24:].clone(), key[24:].clone()
    ops.rotary_embedding(positions[24:], *tail, table)
    assert_same(tail[0], whole[0][24:])
    assert_same(tail[1], whole[1][24:])


def pool_of(
    shape: tuple[int, int, int, int, int], block_major: bool, device: torch.device | None
) -> Tensor:
    """Random bf16 [layers, 2, blocks, heads, block_size, dim]. block_major: as the engine's, in
    which a block is one run of memory over all layers. device None: in pinned memory."""
    layers, blocks, *inner = shape
    order = (blocks, layers, 2) if block_major else (layers, 2, blocks)
    made = torch.randn(*order, *inner).bfloat16()
    made = made.pin_memory() if device is None else made.to(device)
    return made.permute(1, 2, 0, 3, 4, 5) if block_major else made


# The last by the copy engines, which take runs of 256 KiB.
@pytest.mark.parametrize(
    ("block_size", "block_major"), [(16, False), (16, True), (256, False), (256, True)]
)
def test_swaps_copies_and_attention_on_streams_of_their_own_follow_their_events(
    block_size, block_major, device
) -> None:
    # Out to pinned memory, back into other blocks, one more copy, attention: each on a stream of
    # its own behind the event of the one before, with delays that show a missing wait.
    heads, dim, blocks = 2, 64, 6
    pool = pool_of((2, blocks, heads, block_size, dim), block_major, device)
    pinned = pool_of((2, 3, heads, block_size, dim), block_major, None)
    query = torch.randn(2, 4, dim, device=device).bfloat16()
    lengths = torch.tensor([block_size + 5, 2 * block_size], dtype=torch.int32, device=device)
    starts = torch.tensor([0, 1, 2], dtype=torch.int32, device=device)

    def attend(tables: list[list[int]]) -> Tensor:
        out = torch.full_like(query, math.nan)
        ops.paged_attention(
            out,
            None,
            query,
            *pool[1],
            torch.tensor(tables, dtype=torch.int32).to(device),
            lengths,
            starts,
            max_query_len=1,
            scale=0.1,
        )
        return out

    want = attend([[0, 1], [2, 0]])
    # Allocated before: no allocation waits for a device while the streams run.
    attend([[4, 5], [3, 4]])
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(4)]
    done = torch.cuda.current_stream().record_event()
    out = None
    for number, stream in enumerate(streams):
        with torch.cuda.stream(stream):
            stream.wait_event(done)
            torch.cuda._sleep(20_000_000)
            if number == 0:
                ops.swap_blocks(pool, pinned, torch.tensor([[0, 2], [1, 0], [2, 1]]))
                pool[:, :, :3].fill_(math.nan)
            elif number == 1:
                ops.swap_blocks(pinned, pool, torch.tensor([[2, 4], [0, 5], [1, 1]]))
            elif number == 2:
                ops.copy_blocks(pool, torch.tensor([[1, 3]]))
            else:
                out = attend([[4, 5], [3, 4]])
            done = stream.record_event()
    torch.cuda.synchronize()
    assert out is not None
    assert_same(out, want)


@pytest.mark.parametrize("block_major", [False, True])
def test_a_swap_leaves_the_host_free(block_major, device) -> None:
    # Behind a delay on the device the call returns before the copy has run.
    pool = pool_of((1, 4, 2, 256, 128), block_major, device)
    pinned = pool_of((1, 4, 2, 256, 128), block_major, None)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    ops.swap_blocks(pool, pinned, torch.tensor([[0, 0]]))  # loads the kernel
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        ops.swap_blocks(pool, pinned, torch.tensor([[1, 1]]))
        ended = stream.record_event()
    assert not ended.query()
    ended.synchronize()
    assert_same(pinned[:, :, 1], pool[:, :, 1].cpu())


AFTER_A_FAULT = """
import sys
import torch
sys.path[:0] = sys.argv[1:]
from calls import CALLS
from test_cuda_every_op import moved
from pagedkv import ops
calls = [(name, op, moved(make(), "cuda")) for name, (op, make) in CALLS.items()]
pinned = torch.zeros(2, 2, 3, 2, 2, 4).pin_memory()
calls += [("swap_blocks, out", op, {**call, "destination": pinned})
          for name, op, call in calls if name == "swap_blocks"]
x, pool = torch.ones(1, 1, 64, device="cuda"), torch.zeros(2, 2, 1, 16, 64, device="cuda")
far = torch.tensor([2**50], device="cuda")  # on a GPU a slot is the caller's promise
torch.cuda.synchronize()
ops.reshape_and_cache(x, x, *pool, far)
try:
    torch.cuda.synchronize()
except RuntimeError:
    print("the device has failed")
for name, op, call in calls:
    try:
        getattr(ops, op)(**call)
        print(name, "returned")
    except RuntimeError as error:
        print(name, "raised:", str(error).splitlines()[0])
"""


def test_failed_cuda_calls_raise(device) -> None:
    # In a process of its own: a device that has failed stays so.
    folders = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "ops")]
    run = subprocess.run(
        [sys.executable, "-c", AFTER_A_FAULT, *folders], capture_output=True, text=True, check=False
    )
    assert "the device has failed" in run.stdout, run.stdout + run.stderr
    assert "returned" not in run.stdout, run.stdout
    assert run.stdout.count(" raised: ") == len(CALLS) + 1, run.stdout + run.stderr
    for op in ("rms_norm", "silu_and_mul", "copy_blocks", "swap_blocks", "swap_blocks, out"):
        assert re.search(f"^{op} raised: .*illegal memory access", run.stdout, re.M), run.stdout
