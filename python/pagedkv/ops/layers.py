"""The small layers of a transformer: RMS norm, rotary position embedding, gated activations.

Arithmetic is fp32 inside, whatever the dtype; each result is rounded once. Only thin calls of the
registered operators live here: checks and kernels are in `csrc/`.
"""

from __future__ import annotations

import torch
from torch import Tensor

_rms_norm = torch.ops.pagedkv.rms_norm.default
_fused_add_rms_norm = torch.ops.pagedkv.fused_add_rms_norm.default
_rotary_embedding = torch.ops.pagedkv.rotary_embedding.default
_silu_and_mul = torch.ops.pagedkv.silu_and_mul.default
_gelu_and_mul = torch.ops.pagedkv.gelu_and_mul.default


def rms_norm(out: Tensor, input: Tensor, weight: Tensor, epsilon: float) -> None:
    """Scale every row to root mean square 1, then by a weight per column.

    out = input / sqrt(mean(input ** 2) + epsilon) * weight

    Args:
        out: [num_tokens, hidden], fp32, bf16 or fp16; may be `input`.
        input: [num_tokens, hidden], `out`'s dtype.
        weight: [hidden], `out`'s dtype.
        epsilon: at least 0.

    Returns:
        Nothing.

    Mutates:
        out.

    Raises:
        RuntimeError: device, dtype, layout or shape not as above; a last dimension that is not
            contiguous; a negative or not finite epsilon.

    Example:
        >>> out = torch.empty(1, 2)
        >>> rms_norm(out, torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 2.0]), 0.0)
        >>> out  # root mean square of (3, 4): sqrt(12.5) = 3.5355
        tensor([[0.8485, 2.2627]])

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, equation 4.
    """
    _rms_norm(out, input, weight, epsilon)


def fused_add_rms_norm(input: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> None:
    """Add a layer's output to the residual stream and normalise the sum for the next layer.

    residual <- residual + input (rounded to its dtype); input <- rms_norm(residual)

    Args:
        input: [num_tokens, hidden], fp32, bf16 or fp16.
        residual: [num_tokens, hidden], `input`'s dtype.
        weight: [hidden], `input`'s dtype.
        epsilon: at least 0.

    Returns:
        Nothing.

    Mutates:
        input, residual.

    Raises:
        RuntimeError: as `rms_norm`.

    Example:
        >>> input, residual = torch.tensor([[1.0, 1.0]]), torch.tensor([[2.0, 3.0]])
        >>> fused_add_rms_norm(input, residual, torch.ones(2), 0.0)
        >>> residual, input
        (tensor([[3., 4.]]), tensor([[0.8485, 1.1314]]))

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, equation 4.
    """
    _fused_add_rms_norm(input, residual, weight, epsilon)


def rotary_embedding(
    positions: Tensor, query: Tensor, key: Tensor, cos_sin_cache: Tensor, is_neox: bool = True
) -> None:
    """Rotate pairs of elements of every query and key head by angles that grow with position.

    The pair (x, y) of angle a becomes (x cos a - y sin a, y cos a + x sin a). With
    r = rotary_dim / 2, pair i is elements (i, i + r) of the head when `is_neox` (GPT-NeoX, Llama),
    otherwise (2 i, 2 i + 1) (GPT-J). Elements from rotary_dim on stay.

    Args:
        positions: [num_tokens] int64, each below max_position.
        query: [num_tokens, num_heads, head_dim], fp32, bf16 or fp16.
        key: [num_tokens, num_kv_heads, head_dim], `query`'s dtype.
        cos_sin_cache: [max_position, rotary_dim] fp32: r cosines, then r sines; rotary_dim is even
            and at most head_dim.
        is_neox: which elements are a pair.

    Returns:
        Nothing.

    Mutates:
        query, key.

    Raises:
        RuntimeError: device, dtype, layout or shape not as above; on the CPU, a position outside
            the table.

    Example:
        >>> table = torch.tensor([[1.0, 0.0], [0.0, 1.0]])  # position 1 turns by a right angle
        >>> query, key = torch.tensor([[[3.0, 4.0]]]), torch.tensor([[[1.0, 0.0]]])
        >>> rotary_embedding(torch.tensor([1]), query, key, table)
        >>> query.flatten(), key.flatten()
        (tensor([-4.,  3.]), tensor([0., 1.]))

    Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021,
    equation 34.
    """
    _rotary_embedding(positions, query, key, cos_sin_cache, is_neox)


def silu_and_mul(
    out: Tensor, input: Tensor, *, residual: Tensor | None = None, residual_epsilon: float = 0.0
) -> None:
    """The gate of a SwiGLU feed-forward layer: silu(left half) * right half.

    With `residual`, each row of `input` is first multiplied by
    1 / sqrt(mean(r ** 2) + residual_epsilon), where r is the same row of `residual`. So an RMS norm
    before a projection needs no pass of its own: with the norm's weights folded into the
    projection's, rms_norm(r) @ weight.T is r @ weight.T, multiplied so.

    Args:
        out: [num_tokens, intermediate], fp32, bf16 or fp16.
        input: [num_tokens, 2 * intermediate], `out`'s dtype.
        residual: [num_tokens, hidden], `out`'s dtype: what `input` is a projection of.
        residual_epsilon: at least 0.

    Returns:
        Nothing.

    Mutates:
        out.

    Raises:
        RuntimeError: device, dtype, layout or shape not as above.

    Example:
        >>> out = torch.empty(1, 2)
        >>> silu_and_mul(out, torch.tensor([[0.0, 1.0, 5.0, 10.0]]))
        >>> out  # silu(1) = 1 / (1 + e^-1) = 0.7311
        tensor([[0.0000, 7.3106]])
        >>> residual = torch.tensor([[2.0]])
        >>> silu_and_mul(out, torch.tensor([[0.0, 2.0, 10.0, 20.0]]), residual=residual)
        >>> out  # the input is divided by 2
        tensor([[0.0000, 7.3106]])

    Source: Shazeer, "GLU Variants Improve Transformer", 2020, equation 6 (SwiGLU).
    """
    _silu_and_mul(out, input, residual=residual, residual_epsilon=residual_epsilon)


def gelu_and_mul(
    out: Tensor,
    input: Tensor,
    approximate: str = "none",
    *,
    residual: Tensor | None = None,
    residual_epsilon: float = 0.0,
) -> None:
    """The gate of a GEGLU feed-forward layer: gelu(left half) * right half.

    Args:
        out: [num_tokens, intermediate], fp32, bf16 or fp16.
        input: [num_tokens, 2 * intermediate], `out`'s dtype.
        approximate: "none" (x times the normal distribution function) or "tanh".
        residual, residual_epsilon: as of `silu_and_mul`.

    Returns:
        Nothing.

    Mutates:
        out.

    Raises:
        RuntimeError: device, dtype, layout or shape not as above; another `approximate`.

    Example:
        >>> out = torch.empty(1, 2)
        >>> gelu_and_mul(out, torch.tensor([[0.0, 1.0, 5.0, 10.0]]))
        >>> out  # gelu(1) = 0.8413
        tensor([[0.0000, 8.4134]])

    Source: Shazeer, "GLU Variants Improve Transformer", 2020, equation 5 (GEGLU); Hendrycks and
    Gimpel, "Gaussian Error Linear Units", 2016.
    """
    _gelu_and_mul(out, input, approximate, residual=residual, residual_epsilon=residual_epsilon)
