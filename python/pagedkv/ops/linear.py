"""The product of rows with a weight matrix, with what a decoder layer does before and behind it.

Only a thin call of the registered operator lives here: checks and kernels are in `csrc/`.
"""

from __future__ import annotations

import torch
from torch import Tensor

_streamed_linear = torch.ops.pagedkv.streamed_linear.default


def streamed_linear(
    out: Tensor,
    input: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    epsilon: float = 0.0,
    epilogue: str = "store",
) -> None:
    """Multiply rows with a weight matrix, with the norm before and the sum or gate behind it.

    y = x @ weight.T + bias, rounded to its dtype, where x is `input` or, with `norm_weight`,
    rms_norm(input). "store": out = y. "add": out = out + y. "silu_and_mul": out = silu(y's left
    half) * y's right half. Sums are fp32; a row's result does not depend on the rows beside it, nor
    on their number, as long as that stays within 1 to 4, 5 to 128, 129 to 256 or 257 and more; with
    a norm, within 1 to 128.

    For decoding: it is fast for at most 128 rows of bf16 or fp16 on a GPU of compute capability
    9.0, with in_features a multiple of 64 and 16-byte aligned rows. Five rows and more need
    out_features of a multiple of 8, for "silu_and_mul" of 16, and code compiled for 9.0a. With a
    norm it is fast for at most 8 rows and (num_tokens + 1) * in_features of at most 73,728.
    "silu_and_mul" of 129 to 256 rows is fast without norm and bias, with out_features a multiple of
    16 and 16-byte aligned rows of all three.

    For prompts: more than 128 rows are multiplied at the speed of torch's product, if there is
    neither norm nor bias, in_features is a multiple of 64 and at least 576, and rows of `out` are
    a multiple of 8 elements and 16-byte aligned as well.
    Anything else is computed too, eight rows at a time or at a small part of the speed of torch's
    product.

    Args:
        out: [num_tokens, out_features], or [num_tokens, out_features / 2] for "silu_and_mul";
            fp32, bf16 or fp16.
        input: [num_tokens, in_features], `out`'s dtype.
        weight: [out_features, in_features], `out`'s dtype; for "silu_and_mul" the rows of the gate,
            then the others. On a GPU it and norm_weight are read before what precedes the call on
            its stream has ended: no op of pagedkv that may still run may write them.
        bias: [out_features], `out`'s dtype.
        norm_weight: [in_features], `out`'s dtype.
        epsilon: of the norm, at least 0.
        epilogue: "store", "add" or "silu_and_mul".

    Returns:
        Nothing.

    Mutates:
        out.

    Raises:
        RuntimeError: device, dtype, layout or shape not as above; another `epilogue`; a negative or
            not finite epsilon.

    Example:
        >>> out = torch.tensor([[1.0, 1.0]])
        >>> weight = torch.tensor([[1.0, 2.0, 3.0], [0.0, 1.0, 0.0]])
        >>> streamed_linear(out, torch.tensor([[1.0, 2.0, 3.0]]), weight, epilogue="add")
        >>> out  # 1 + (1 + 4 + 9), 1 + 2
        tensor([[15.,  3.]])

    Source: Shazeer, "GLU Variants Improve Transformer", 2020, equation 6 (SwiGLU); Zhang and
    Sennrich, "Root Mean Square Layer Normalization", 2019, equation 4.
    """
    _streamed_linear(
        out,
        input,
        weight,
        bias=bias,
        norm_weight=norm_weight,
        epsilon=epsilon,
        epilogue=epilogue,
    )
