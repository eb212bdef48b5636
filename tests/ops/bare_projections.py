"""Bare results of projections, that the ops behind them multiply by the scales of their rows: made
on any device, and finished in fp64. For the tests of those ops here and in tests/cuda.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from operands import assert_same
from torch import Tensor

from pagedkv import ops
from pagedkv.ops import reference

EPSILON = 1e-3  # that matters for the smallest rows

# (num_tokens, num_heads, num_kv_heads, head_dim, rotary_dim, block_size, hidden)
SIZES = {
    "llama": (37, 32, 8, 128, 128, 16, 4096),
    "qwen": (9, 16, 8, 128, 128, 16, 1024),
    "smollm2": (5, 9, 3, 64, 64, 16, 576),
    "one_head": (9, 1, 1, 256, 256, 3, 40),
    "fewer_heads_than_a_warp_holds": (3, 1, 1, 64, 64, 4, 8),
    "hidden_of_no_vectors": (6, 4, 2, 64, 64, 16, 99),
    "lanes_no_power_of_two": (9, 4, 2, 80, 80, 16, 104),
    "partial": (9, 4, 2, 80, 20, 16, 96),
    "odd_half": (5, 3, 3, 46, 46, 8, 7),
    "no_query_heads": (4, 0, 2, 64, 64, 4, 20000),
    "no_tokens": (0, 2, 1, 64, 64, 16, 64),
}
# (heads are normed, rows have scales, there is a bias)
FORMS = {
    "scales": (False, True, False),
    "scales_and_bias": (False, True, True),
    "bias": (False, False, True),
    "normed_with_scales": (True, True, False),
    "normed_with_scales_and_bias": (True, True, True),
}


def rows(num_tokens: int, hidden: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Sums of very different sizes, so that a scale that lacks or is another row's is seen."""
    sizes = torch.logspace(-1.5, 2.5, max(num_tokens, 1), device=device)[:num_tokens]
    return (torch.randn(num_tokens, hidden, device=device) * sizes[:, None]).to(dtype)


def exact_scales(residual: Tensor) -> Tensor:
    """fp64 [num_tokens, 1]."""
    return 1 / torch.sqrt(residual.double().pow(2).mean(-1, keepdim=True) + EPSILON)


class BareProjection:
    """Queries, keys and values in one buffer, whose rows begin `shift` elements into their memory,
    and poisoned caches; a third of the tokens are padding.
    """

    def __init__(
        self,
        size: str,
        form: str,
        dtype: torch.dtype,
        cache_dtype: torch.dtype | None,
        shift: int,
        device: torch.device | str,
    ) -> None:
        tokens, heads, kv_heads, dim, rotary, block_size, hidden = SIZES[size]
        normed, scaled, biased = FORMS[form]
        self.heads = [heads, kv_heads, kv_heads]
        total = sum(self.heads)
        residual = rows(tokens, hidden + 8, dtype, device)[:, shift : shift + hidden]
        wide = torch.randn(tokens, total, dim + 8, device=device)
        if scaled:
            wide /= exact_scales(residual).float().view(-1, 1, 1)
        self.projected = wide.to(dtype)[..., shift : shift + dim]
        bias = torch.randn(total * dim + shift, device=device).to(dtype)[shift:]
        self.residual = residual if scaled else None
        self.bias = bias if biased else None
        self.norms = [torch.rand(dim, device=device).to(dtype) for _ in range(2 * normed)]
        self.positions = torch.randint(3, 40, (tokens,), device=device)
        angles = torch.rand(50, rotary // 2, device=device) * 6.3
        self.table = torch.cat([angles.cos(), angles.sin()], 1)
        shape = (tokens // block_size + 3, kv_heads, block_size, dim)
        stored = cache_dtype or dtype
        self.caches = [torch.full(shape, math.nan, device=device).to(stored) for _ in range(2)]
        self.slots = torch.randperm(shape[0] * block_size, device=device)[:tokens]
        self.slots[1::3] = -1
        self.scales: dict[str, Tensor] = {}
        if cache_dtype is not None:
            self.scales = {
                "k_scale": torch.rand(kv_heads, device=device) + 0.01,
                "v_scale": torch.tensor([0.03], device=device),
            }

    def call(self, module: Any, projected: Tensor, caches: list[Tensor], **options: object) -> None:
        query, key, value = projected.split(self.heads, 1)
        arguments = [self.positions, query, key, value]
        name = "fused_rotary_reshape_and_cache"
        if self.norms:
            name = "fused_norm_rotary_reshape_and_cache"
            arguments += [*(norm.to(query.dtype) for norm in self.norms), 1e-6]
        getattr(module, name)(*arguments, self.table, *caches, self.slots, **options)

    def finished(self) -> Tensor:
        """The projection with scales and bias, fp64 rounded to fp32."""
        x = self.projected.double()
        if self.residual is not None:
            x = x * exact_scales(self.residual).unsqueeze(-1)
        if self.bias is not None:
            x = x + self.bias.double().view(1, *x.shape[1:])
        return x.float()

    def check(self, module: Any, is_neox: bool) -> None:
        """The op's result is the fp64 one, within the roundings that it may make."""
        want, want_caches = self.finished(), [cache.float() for cache in self.caches]
        self.call(reference, want, want_caches, is_neox=is_neox)
        before = self.projected.clone()
        options: dict[str, object] = {"is_neox": is_neox, **self.scales}
        if self.residual is not None:
            options |= {"residual": self.residual, "residual_epsilon": EPSILON}
        self.call(module, self.projected, self.caches, bias=self.bias, **options)
        assert_same(self.projected[:, self.heads[0] :], before[:, self.heads[0] :], "key, value")
        dtype = self.projected.dtype
        # Of what was finished, normed and rotated; each may fall to the other side.
        rounding = 4 * torch.finfo(dtype).eps
        queries = self.projected[:, : self.heads[0]].float()
        self._close(queries, want[:, : self.heads[0]], rounding)
        for cache, want_cache, name in zip(
            self.caches, want_caches, ("k_scale", "v_scale"), strict=True
        ):
            got = cache.float()
            if self.scales:
                got = got * self.scales[name].view(1, -1, 1, 1)
                rounding = max(rounding, 0.07)  # half a step of e4m3
            self._close(got, want_cache, rounding)

    def _close(self, got: Tensor, want: Tensor, rounding: float) -> None:
        largest = want[~want.isnan()].abs().max().item() if (~want.isnan()).any() else 0.0
        torch.testing.assert_close(
            got, want, rtol=rounding, atol=rounding * max(largest, 1) / 2, equal_nan=True
        )


ACTIVATIONS = {
    "silu": (ops.silu_and_mul, {}, lambda gate: torch.nn.functional.silu(gate)),
    "gelu": (ops.gelu_and_mul, {}, lambda gate: torch.nn.functional.gelu(gate)),
    "gelu_tanh": (
        ops.gelu_and_mul,
        {"approximate": "tanh"},
        lambda gate: torch.nn.functional.gelu(gate, approximate="tanh"),
    ),
}


def exact_gate(activation: str, x: Tensor, residual: Tensor) -> Tensor:
    """fp64 act(left half) * right half of x [n, 2 F] with the scales of residual's rows."""
    gate, up = (x.double() * exact_scales(residual)).chunk(2, dim=-1)
    return ACTIVATIONS[activation][2](gate) * up
