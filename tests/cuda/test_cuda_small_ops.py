"""The cache ops and the layers on the GPU, against the oracle, in aligned and in awkward memory."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from pagedkv import ops
from pagedkv.ops import reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def close(got: Tensor, want: Tensor) -> None:
    epsilon = torch.finfo(got.dtype).eps
    assert torch.isfinite(got).all()
    error = (got.float() - want.float()).abs()
    limit = 2 * epsilon * want.float().abs().clamp(min=0.5) + 2e-6
    assert (error <= limit).all(), f"off by {error.max().item():.3g}"


def awkward(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Random values in rows that start at odd addresses."""
    wide = torch.full((*shape[:-1], shape[-1] + 3), math.nan, dtype=dtype, device=device)
    view = wide[..., 1:-2]
    view.copy_(torch.randn(shape, device=device))
    return view


def plain(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(shape, device=device).to(dtype)


@pytest.mark.parametrize("make", [plain, awkward])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "hidden"), [(7, 4096), (3, 99), (1, 1), (5, 576), (2, 40000)])
def test_norms(make, dtype, tokens, hidden, device) -> None:
    x, weight = make((tokens, hidden), dtype, device), plain((hidden,), dtype, device)
    out, want = torch.empty_like(x), torch.empty(tokens, hidden, device=device)
    ops.rms_norm(out, x, weight, 1e-5)
    reference.rms_norm(want, x, weight, 1e-5)
    close(out, want)
    residual = make((tokens, hidden), dtype, device)
    x2, r2 = x.clone(), residual.clone()
    ops.fused_add_rms_norm(x, residual, weight, 1e-5)
    reference.fused_add_rms_norm(x2, r2, weight, 1e-5)
    assert torch.equal(bits(residual), bits(r2))
    close(x, x2.float())


@pytest.mark.parametrize("make", [plain, awkward])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize(("dim", "rotary"), [(128, 128), (80, 20), (46, 46), (64, 32)])
def test_rotary(make, dtype, neox, dim, rotary, device) -> None:
    for make_table in (plain, awkward):
        query, key = make((9, 4, dim), dtype, device), make((9, 2, dim), dtype, device)
        positions = torch.randint(0, 50, (9,), device=device)
        table = make_table((50, rotary), torch.float32, device)
        q2, k2 = query.clone(), key.clone()
        ops.rotary_embedding(positions, query, key, table, neox)
        reference.rotary_embedding(positions, q2, k2, table, neox)
        for got, want in ((query, q2), (key, k2)):
            error = (got.float() - want.float()).abs().max().item()
            assert error <= 2 * torch.finfo(dtype).eps * want.abs().max().item()


@pytest.mark.parametrize("make", [plain, awkward])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [14336, 99, 8])
def test_activations(make, dtype, width, device) -> None:
    x = make((5, 2 * width), dtype, device)
    out, want = (
        torch.empty(5, width, dtype=dtype, device=device),
        torch.empty(5, width, device=device),
    )
    ops.silu_and_mul(out, x)
    reference.silu_and_mul(want, x)
    close(out, want)
    for approximate in ("none", "tanh"):
        ops.gelu_and_mul(out, x, approximate)
        reference.gelu_and_mul(want, x, approximate)
        close(out, want)


@pytest.mark.parametrize("make", [plain, awkward])
@pytest.mark.parametrize("dtype", DTYPES)
def test_merge_states(make, dtype, device) -> None:
    a, b = make((9, 4, 72), dtype, device), make((9, 4, 72), dtype, device)
    lse_a, lse_b = torch.randn(9, 4, device=device), torch.randn(9, 4, device=device)
    lse_a[0], lse_b[1] = -math.inf, -math.inf
    lse_a[2], lse_b[2] = -math.inf, -math.inf
    a[0], b[1], a[2], b[2] = math.nan, math.nan, math.nan, math.nan
    out, lse = torch.empty_like(a), torch.full((9, 4), math.nan, device=device)
    want, want_lse = torch.empty(9, 4, 72, device=device), torch.empty(9, 4, device=device)
    ops.merge_attention_states(out, lse, a, lse_a, b, lse_b)
    reference.merge_attention_states(want, want_lse, a, lse_a, b, lse_b)
    close(out, want)
    torch.testing.assert_close(lse, want_lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("cache_dtype", [None, *FLOAT8])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "heads", "block_size", "dim"),
    [(70, 3, 16, 64), (9, 2, 1, 80), (300, 1, 256, 128), (21, 2, 8, 46), (0, 2, 16, 64)],
)
def test_reshape_and_gather(cache_dtype, dtype, tokens, heads, block_size, dim, device) -> None:
    stored = cache_dtype or dtype
    blocks = tokens // block_size + 4
    wide = torch.randn(tokens + 2, 3 * heads, dim, device=device).to(dtype) * 30
    key, value = wide[:, :heads], wide[:, heads : 2 * heads]
    shape = (blocks, heads, block_size, dim)
    caches = [
        torch.full(shape, 0x11, dtype=torch.uint8, device=device)
        .repeat_interleave(stored.itemsize, dim=-1)
        .view(stored)
        for _ in range(2)
    ]
    wants = [cache.clone() for cache in caches]
    slots = torch.randperm(blocks * block_size, device=device)[:tokens]
    slots[::5] = -1
    scales = (
        {}
        if cache_dtype is None
        else {
            "k_scale": torch.tensor([0.07], device=device),
            "v_scale": torch.rand(heads, device=device) + 0.02,
        }
    )
    ops.reshape_and_cache(key, value, *caches, slots, **scales)
    reference.reshape_and_cache(key, value, *wants, slots, **scales)
    for got, want in zip(caches, wants, strict=True):
        assert torch.equal(bits(got), bits(want))
    table = torch.full((3, blocks + 1), 2**30, dtype=torch.int32, device=device)
    table[:, :blocks] = torch.randperm(blocks, device=device).int()
    starts = torch.tensor([0, tokens // 2, tokens // 2, tokens], dtype=torch.int32, device=device)
    outs = [
        torch.full((tokens, heads, dim), math.nan, dtype=dtype, device=device) for _ in range(2)
    ]
    expected = [out.clone() for out in outs]
    ops.gather_blocks(*outs, *caches, table, starts, **scales)
    reference.gather_blocks(*expected, *caches, table, starts, **scales)
    for got, want in zip(outs, expected, strict=True):
        assert torch.equal(bits(got), bits(want))


@pytest.mark.parametrize(
    "pairs", [[], [[0, 1]], [[0, 1], [1, 2], [3, 0], [4, 4]], [[0, 5], [1, 5]]]
)
@pytest.mark.parametrize("dim", [64, 3])
def test_copy_blocks(pairs, dim, device) -> None:
    pool = torch.randn(3, 2, 6, 2, 4, dim, device=device).bfloat16()
    pairs = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2)
    for view in (pool, pool.transpose(3, 4).contiguous().transpose(3, 4)):
        got, want = view.clone(memory_format=torch.preserve_format), view.clone()
        ops.copy_blocks(got, pairs)
        reference.copy_blocks(want, pairs)
        assert torch.equal(bits(got), bits(want))


def test_copy_of_many_pairs(device) -> None:
    pool = torch.randn(2, 2, 8000, 1, 2, 8, device=device)
    order = torch.randperm(8000)
    pairs = torch.stack([order[:4000], order[4000:]], dim=1)
    want = pool.clone()
    want[:, :, pairs[:, 1].to(device)] = pool[:, :, pairs[:, 0].to(device)]
    ops.copy_blocks(pool, pairs)
    assert torch.equal(pool, want)


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("side_stream", [True, False])
@pytest.mark.parametrize("block_size", [4, 128])
def test_swap_blocks(pinned, side_stream, block_size, device) -> None:
    shape = (3, 2, 9, 2, block_size, 64)
    on_device = torch.randn(shape, device=device).bfloat16()
    on_cpu = torch.randn(3, 2, 5, 2, block_size, 64).bfloat16()
    on_cpu = on_cpu.pin_memory() if pinned else on_cpu
    stream = torch.cuda.Stream() if side_stream else torch.cuda.current_stream()
    out_pairs, in_pairs = torch.tensor([[8, 0], [1, 4], [3, 2]]), torch.tensor([[4, 0], [0, 7]])
    want_cpu, want_device = on_cpu.clone(), on_device.clone()
    reference.swap_blocks(want_device, want_cpu, out_pairs)
    reference.swap_blocks(want_cpu, want_device, in_pairs)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        ops.swap_blocks(on_device, on_cpu, out_pairs)
        ops.swap_blocks(on_cpu, on_device, in_pairs)
    torch.cuda.synchronize()
    assert torch.equal(on_cpu, want_cpu)
    assert torch.equal(on_device, want_device)


def test_no_tokens_is_no_work(device) -> None:
    empty = torch.empty(0, 64, device=device)
    ops.rms_norm(empty, empty.clone(), torch.ones(64, device=device), 1e-5)
    ops.silu_and_mul(torch.empty(0, 32, device=device), empty)
    torch.cuda.synchronize()
