"""Both forms of the product with a weight matrix, and the choice between them."""

from __future__ import annotations

import pytest
import torch

from pagedkv.models.linear import Linear, can_pack, packed_product, plain_product
from pagedkv.models.parameters import Parameters, Piece

CPU = torch.device("cpu")
HAS_BF16 = can_pack(torch.bfloat16, CPU)


@pytest.mark.parametrize("form", [packed_product, plain_product])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 5, 16, 129])
@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        pytest.param(
            torch.bfloat16,
            marks=pytest.mark.skipif(not HAS_BF16, reason="this CPU has no bf16 product"),
        ),
    ],
)
def test_a_product_is_that_of_the_matrices(
    form: object, has_bias: bool, num_rows: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(37, 50).to(dtype), torch.randn(num_rows, 50).to(dtype)
    bias = torch.randn(37).to(dtype) if has_bias else None
    exact = x.double() @ weight.double().T + (bias.double() if bias is not None else 0)
    assert callable(form)
    result = form(weight, bias)(x)
    assert result.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(result.double(), exact, rtol=tolerance, atol=10 * tolerance)


def test_packing_is_for_what_onednn_can_multiply_on_the_cpu() -> None:
    assert can_pack(torch.float32, CPU)
    assert not can_pack(torch.float16, CPU)
    assert not can_pack(torch.float32, torch.device("cuda"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shares_weight", [False, True])
def test_a_layer_multiplies_by_what_was_loaded(dtype: torch.dtype, shares_weight: bool) -> None:
    parameters = Parameters(dtype=dtype, device=CPU, rank=0, num_ranks=1)
    weight, bias = parameters.add(Piece("w", (2, 2))), parameters.add(Piece("b", (2,)))
    layer = Linear(parameters, weight, bias, shares_weight=shares_weight)
    weight.load("w", torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    bias.load("b", torch.tensor([10.0, 20.0]))
    parameters.finish()
    assert layer(torch.tensor([[1.0, -1.0]], dtype=dtype)).tolist() == [[9.0, 19.0]]
    assert (weight._data is None) == (not shares_weight)
