"""The product with a weight matrix, in the fastest form that torch has for the device.

On a CPU this is oneDNN with the weight reordered once into its blocked layout. Measured with torch
2.13 on two cores with AVX-512 (microseconds; weights rotated so that they come from memory):

    rows x in x out      fp32: F.linear  packed    bf16: F.linear  packed
       1 x 576 x 3072              686     308               246     108
      16 x 576 x 3072              913     397               337     191
      16 x 576 x 49152           23600    5700              5390    3030
     128 x 1536 x 576             1360    1080               720     610
    2048 x 576 x 3072            42200   34300             17900   17000

It won for every number of rows from 1 to 2,048, packed for none in particular. There a row's result
does not depend on how many rows go with it, which F.linear's does.
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
