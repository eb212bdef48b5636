"""The product with a weight matrix, in the fastest form that torch has for the device.

On a CPU this is oneDNN with the weight reordered once into its blocked layout, for no number of
rows in particular: about one to four times the speed of torch's own product from 2,048 rows down to
the few of decoding, in fp32 and bf16 (benchmarks/bench_cpu_linear.py). Where that was measured, a
row also has the same bits whatever rows are multiplied with it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from pagedkv.models.parameters import Parameter, Parameters

Product = Callable[[torch.Tensor], torch.Tensor]


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether oneDNN has a product for this dtype on this device."""
    has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if device.type != "cpu" or not has_onednn:
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def packed_product(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    """x [n, in] -> x @ weight.T + bias [n, out], on a reordered copy of weight [out, in]."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)
    product = torch.ops.mkldnn._linear_pointwise.default

    def run(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = product(x, packed, bias, "none", [], "")
        return result

    return run


def plain_product(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    """x [n, in] -> x @ weight.T + bias [n, out], on weight [out, in] itself."""

    def run(x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, weight, bias)

    return run


class Linear:
    """x [n, in] -> [n, out] with the weight and bias that the parameters hold once loaded.

    shares_weight: another layer (a tied embedding) keeps using the weight, so it must stay.
    """

    __slots__ = ("_product",)

    def __init__(
        self,
        parameters: Parameters,
        weight: Parameter,
        bias: Parameter | None = None,
        *,
        shares_weight: bool = False,
    ) -> None:
        def prepare() -> None:
            self._product = make(
                weight.data if shares_weight else weight.take(),
                None if bias is None else bias.take(),
            )

        make = packed_product if can_pack(parameters.dtype, parameters.device) else plain_product
        parameters.when_loaded(prepare)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._product(x)
