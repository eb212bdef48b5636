"""SANITIZE: the small ops on sizes that are quick under compute-sanitizer, one case for each way
through each kernel. `-k sanitize` selects these and the attention cases of the same name."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from operands import assert_same
from sampling_cases import OPTIONS, made_call, random_edits
from step_cases import random_call, random_edits_call
from torch import Tensor

from pagedkv import ops
from pagedkv.ops import reference

BF16, FP32, E4M3 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
Run = Callable[[object, torch.device], list[Tensor]]


def norms(module, device, hidden: int, shift: int) -> list[Tensor]:
    wide = torch.randn(5, hidden + 8, device=device).to(BF16)
    x, weight = wide[:, shift : shift + hidden], torch.randn(hidden, device=device).to(BF16)
    out, residual = torch.empty_like(x), x.clone()
    module.rms_norm(out, x, weight, 1e-5)
    module.fused_add_rms_norm(x, residual, weight, 1e-5)
    return [out, x, residual]


def gates(module, device, width: int) -> list[Tensor]:
    x = torch.randn(5, 2 * width, device=device).to(BF16)
    outs = [torch.empty(5, width, dtype=BF16, device=device) for _ in range(3)]
    module.silu_and_mul(outs[0], x)
    module.gelu_and_mul(outs[1], x, "none")
    module.gelu_and_mul(outs[2], x, "tanh")
    return outs


def cache(module, device, cache_dtype, heads: int, dim: int, neox: bool) -> list[Tensor]:
    """The cache written by both ops, and read again."""
    rows = torch.randn(21, 3 * heads, dim, device=device).to(BF16)
    query, key, value = rows.split(heads, 1)
    pools = [torch.zeros(6, heads, 8, dim, device=device).to(cache_dtype) for _ in range(2)]
    slots = torch.randperm(48, device=device)[:21]
    slots[3] = -1
    scales = {}
    if cache_dtype == E4M3:
        scales = {"k_scale": torch.rand(heads, device=device) + 0.1}
        scales["v_scale"] = torch.tensor([0.5], device=device)
    table, positions = torch.rand(30, dim, device=device), torch.arange(21, device=device)
    module.reshape_and_cache(key, value, *pools, slots, **scales)
    module.fused_rotary_reshape_and_cache(
        positions, query, key, value, table, *pools, slots, neox, **scales
    )
    module.rotary_embedding(positions, query, key, table, neox)
    tables = torch.tensor([[5, 0, 2], [1, 3, 4]], dtype=torch.int32, device=device)
    starts = torch.tensor([0, 19, 21], dtype=torch.int32, device=device)
    gathered = [torch.zeros(21, heads, dim, dtype=BF16, device=device) for _ in range(2)]
    module.gather_blocks(*gathered, *pools, tables, starts, **scales)
    return [query, key, *(pool.float() for pool in pools), *gathered]


def blocks(module, device, dim: int) -> list[Tensor]:
    pool = torch.randn(2, 2, 6, 2, 4, dim, device=device).to(BF16)
    pinned = torch.zeros(2, 2, 3, 2, 4, dim).to(BF16).pin_memory()
    module.copy_blocks(pool, torch.tensor([[0, 1], [1, 2], [3, 0]]))
    module.swap_blocks(pool, pinned, torch.tensor([[5, 0], [1, 2]]))
    torch.cuda.synchronize(device)
    module.swap_blocks(pinned, pool, torch.tensor([[2, 5]]))
    torch.cuda.synchronize(device)
    return [pool, pinned]


def merges(module, device, dim: int) -> list[Tensor]:
    a, b = torch.randn(2, 5, 3, dim, device=device).to(BF16)
    lse_a, lse_b = torch.randn(2, 5, 3, device=device)
    lse_a[0], lse_b[:2] = -math.inf, -math.inf
    out, lse = torch.empty_like(a), torch.empty_like(lse_a)
    module.merge_attention_states(out, lse, a, lse_a, b, lse_b)
    return [out, lse]


def choices(module, device, vocab: int, shift: int, edited: bool) -> list[Tensor]:
    """Greedy, drawn, each filter; with more candidates than are compared at once, too."""
    options = [OPTIONS[i] for i in (0, 1, 4, 7, 8, 12, 17, 18)]
    call = made_call("normal", vocab, BF16, options=options)
    if edited:
        call |= random_edits(len(options), vocab, 1)
    call = {name: one.to(device) for name, one in call.items()}
    wide = torch.zeros(len(options), vocab + 8, dtype=BF16, device=device)
    wide[:, shift : shift + vocab] = call["logits"]
    module.sample_tokens(**call | {"logits": wide[:, shift : shift + vocab]})
    # Thresholds between two logits are as good as the lower one.
    kept = (wide[:, shift : shift + vocab].float() >= call["cuts"][:, None]).sum(1)
    return [call["token_ids"], kept if not edited else kept * 0]


def scores(module, device, vocab: int, shift: int, num_top: int) -> list[Tensor]:
    wide = torch.randn(5, vocab + 8, device=device).to(BF16)
    logits = wide[:, shift : shift + vocab]
    token_ids = torch.randint(vocab, (5,), device=device)
    logprobs = torch.empty(5, dtype=torch.float64, device=device)
    ranks = torch.empty(5, dtype=torch.int64, device=device)
    top_ids = torch.empty(5, num_top, dtype=torch.int64, device=device)
    tops = torch.empty(5, num_top, dtype=torch.float64, device=device)
    module.score_tokens(logprobs, ranks, top_ids, tops, logits, token_ids)
    return [logprobs, ranks, top_ids, tops]


def normed(module, device, dim: int, rotary: int, neox: bool) -> list[Tensor]:
    query, key, value = torch.randn(9, 8, dim, device=device).to(BF16).split([4, 2, 2], 1)
    norms = torch.rand(2, dim, device=device).to(BF16)
    pools = [torch.zeros(3, 2, 8, dim, device=device).to(BF16) for _ in range(2)]
    slots = torch.randperm(24, device=device)[:9]
    slots[3] = -1
    table, positions = torch.rand(30, rotary, device=device), torch.arange(9, device=device)
    module.fused_norm_rotary_reshape_and_cache(
        positions, query, key, value, *norms, 1e-6, table, *pools, slots, neox
    )
    return [query, *pools]


def bare(module, device, dim: int, rotary: int, hidden: int) -> list[Tensor]:
    """A projection without its scales and bias, read by the rotation and by a gate."""
    heads = torch.randn(9, 8, dim, device=device).to(BF16)
    query, key, value = heads.split([4, 2, 2], 1)
    residual = torch.randn(9, hidden, device=device).to(BF16)
    rows = {"residual": residual, "residual_epsilon": 1e-5}
    bias = torch.randn(8 * dim, device=device).to(BF16)
    norms = torch.rand(2, dim, device=device).to(BF16)
    pools = [torch.zeros(3, 2, 8, dim, device=device).to(BF16) for _ in range(4)]
    slots = torch.randperm(24, device=device)[:9]
    slots[3] = -1
    table, positions = torch.rand(30, rotary, device=device), torch.arange(9, device=device)
    gated = torch.empty(9, 4 * dim, dtype=BF16, device=device)
    module.silu_and_mul(gated, heads.flatten(1), **rows)
    module.fused_rotary_reshape_and_cache(
        positions, query, key, value, table, *pools[:2], slots, bias=bias, **rows
    )
    module.fused_norm_rotary_reshape_and_cache(
        positions, query, key, value, *norms, 1e-6, table, *pools[2:], slots, bias=bias, **rows
    )
    return [query, *pools, gated]


def products(module, device, tokens: int, size: int, columns: int) -> list[Tensor]:
    """Each epilogue, with a bias and without, few rows with a norm too."""
    x = torch.randn(tokens, size, device=device).to(BF16)
    weight = (torch.randn(columns, size, device=device) / size**0.5).to(BF16)
    bias, norm = torch.randn(columns, device=device).to(BF16), torch.rand(size, device=device)
    outs = [torch.randn(tokens, columns, device=device).to(BF16) for _ in range(3)]
    # initcheck does not see what tensor copies write; NaN shows what nobody does.
    gated = torch.full((tokens, columns // 2), torch.nan, dtype=BF16, device=device)
    module.streamed_linear(outs[0], x, weight)
    module.streamed_linear(outs[1], x, weight, bias=bias, epilogue="add")
    module.streamed_linear(outs[2], x, weight, epilogue="add")
    more = {"norm_weight": norm.to(BF16), "epsilon": 1e-5} if tokens <= 8 else {}
    module.streamed_linear(gated, x, weight, epilogue="silu_and_mul", **more)
    return [*outs, gated]


def steps(module, device, block_size: int) -> list[Tensor]:
    """Random steps: padding, chunks, several samples a row."""
    written = []
    for seed in range(12):
        call = random_call(seed, block_size, device)
        module.advance_step(**call)
        written += [call[n] for n in ("lens", "tokens", "block_tables", "seq_lens", "samples")]
        written += [call[n] for n in ("filters", "inverse_temperatures")]
    return written


def edits(module, device, longest: int) -> list[Tensor]:
    """Random lists, with and without room, and a token at any place."""
    written = []
    for seed in range(12):
        call = random_edits_call(seed, longest, device)
        module.advance_edits(**call)
        written += [call[n] for n in ("ids", "counts", "values")]
    return written


SANITIZE: dict[str, Run] = {
    "edits": lambda m, d: edits(m, d, 3),
    "edits_of_many_tokens": lambda m, d: edits(m, d, 400),
    "steps": lambda m, d: steps(m, d, 4),
    "steps_of_many_tokens": lambda m, d: steps(m, d, 64),
    "norms_one_vector": lambda m, d: norms(m, d, 96, 0),
    "norms_vectors": lambda m, d: norms(m, d, 3584, 0),
    "norms_streamed": lambda m, d: norms(m, d, 99, 1),
    "gates_vectors": lambda m, d: gates(m, d, 1024),
    "gates_elements": lambda m, d: gates(m, d, 99),
    "cache_vectors": lambda m, d: cache(m, d, BF16, 2, 64, True),
    "cache_elements": lambda m, d: cache(m, d, BF16, 3, 46, True),
    "cache_neighbours": lambda m, d: cache(m, d, BF16, 2, 64, False),
    "cache_fp8_vectors": lambda m, d: cache(m, d, E4M3, 2, 64, True),
    "cache_fp8_elements": lambda m, d: cache(m, d, E4M3, 3, 46, False),
    "blocks_vectors": lambda m, d: blocks(m, d, 64),
    "blocks_bytes": lambda m, d: blocks(m, d, 3),
    "merges_vectors": lambda m, d: merges(m, d, 64),
    "merges_elements": lambda m, d: merges(m, d, 46),
    "choices_vectors": lambda m, d: choices(m, d, 16_000, 0, edited=False),
    "choices_elements": lambda m, d: choices(m, d, 4001, 1, edited=False),
    "choices_edited": lambda m, d: choices(m, d, 4008, 0, edited=True),
    "scores_vectors": lambda m, d: scores(m, d, 16_000, 0, 20),
    "scores_elements": lambda m, d: scores(m, d, 4001, 1, 512),
    "normed_vectors": lambda m, d: normed(m, d, 128, 128, True),
    "normed_elements": lambda m, d: normed(m, d, 46, 20, False),
    "bare_vectors": lambda m, d: bare(m, d, 128, 128, 4096),
    "bare_elements": lambda m, d: bare(m, d, 46, 20, 99),
    "products_one_row": lambda m, d: products(m, d, 1, 1024, 2144),
    "products_wide": lambda m, d: products(m, d, 130, 328, 464),
    "products_rows": lambda m, d: products(m, d, 7, 1000, 176),
    "products_long_rows": lambda m, d: products(m, d, 8, 8192, 48),
    "products_clusters": lambda m, d: products(m, d, 9, 1024, 2144),
    "products_wide_clusters": lambda m, d: products(m, d, 40, 448, 1168),
    "products_passes": lambda m, d: products(m, d, 32, 128, 70_016),
    "products_many_rows": lambda m, d: products(m, d, 90, 704, 2144),
    "products_many_wide_rows": lambda m, d: products(m, d, 120, 192, 28_672),
    "products_tiles": lambda m, d: products(m, d, 300, 640, 528),
    "products_elements": lambda m, d: products(m, d, 3, 99, 34),
}


@pytest.mark.parametrize("name", SANITIZE)
def test_sanitize_small_ops(name: str, device) -> None:
    results = []
    for module in (ops, ops, reference):
        torch.manual_seed(0)
        results.append(SANITIZE[name](module, device))
    for once, again, want in zip(*results, strict=True):
        assert_same(once, again, "a second run")
        torch.testing.assert_close(once.float(), want.float(), atol=0.13, rtol=0.04)
