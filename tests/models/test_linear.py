"""Both forms of the product with a weight matrix, and the choice between them."""

from __future__ import annotations

import pytest
import torch

from pagedkv import ops
from pagedkv.models import linear
from pagedkv.models.layers import RMSNorm
from pagedkv.models.linear import Linear, Norm, can_pack, packed_product, plain_product
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


def loaded(
    rows: int,
    size: int,
    *,
    streams: bool,
    monkeypatch,
    has_bias: bool = True,
    dtype: torch.dtype = torch.float32,
) -> tuple[Linear, torch.Tensor]:
    monkeypatch.setattr(linear, "streamed_rows", lambda *_: 12 if streams else 0)
    parameters = Parameters(dtype=dtype, device=CPU, rank=0, num_ranks=1)
    weight = parameters.add(Piece("w", (rows, size)))
    bias = parameters.add(Piece("b", (rows,))) if has_bias else None
    layer = Linear(parameters, weight, bias)
    matrix = torch.randn(rows, size).to(dtype)
    weight.load("w", matrix)
    if bias is not None:
        bias.load("b", torch.arange(float(rows)))
    parameters.finish()
    return layer, matrix


def test_few_rows_are_streamed_where_there_is_a_kernel(monkeypatch) -> None:
    layer, _ = loaded(3, 16, streams=True, monkeypatch=monkeypatch)
    assert [n for n in range(20) if layer.streams(n)] == list(range(13))
    assert not loaded(3, 16, streams=False, monkeypatch=monkeypatch)[0].streams(1)


@pytest.mark.parametrize(
    ("dtype", "device", "shape", "capability", "rows"),
    [
        (torch.bfloat16, "cuda", (6144, 1024), (9, 0), 32),
        (torch.float16, "cuda", (16, 4096), (9, 0), 128),
        (torch.float16, "cuda", (128256, 4032), (9, 0), 32),
        (torch.bfloat16, "cuda", (6152, 4096), (9, 0), 8),  # halves that no group of rows divides
        (torch.float32, "cuda", (6144, 1024), (9, 0), 0),
        (torch.bfloat16, "cpu", (6144, 1024), (9, 0), 0),
        (torch.bfloat16, "cuda", (6144, 1000), (9, 0), 0),
        (torch.bfloat16, "cuda", (6144, 1024), (8, 0), 0),
        (torch.bfloat16, "cuda", (6144, 1024), (10, 0), 0),
    ],
)
def test_what_is_streamed(dtype, device, shape, capability, rows, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert linear.streamed_rows(dtype, torch.device(device), *shape) == rows


@pytest.mark.parametrize(
    ("dtype", "shape", "multiprocessors", "rows"),
    [
        (torch.bfloat16, (28672, 4096), 132, 256),
        (torch.float16, (28672, 4096), 132, 256),
        (torch.float32, (28672, 4096), 132, 0),
        (torch.bfloat16, (28672, 4096), 114, 0),  # a round and a bit
        (torch.bfloat16, (28672, 4096), 160, 0),  # many idle
        (torch.bfloat16, (28672, 3072), 132, 0),
        (torch.bfloat16, (6144, 4096), 132, 0),
    ],
)
def test_what_is_gated_inside(dtype, shape, multiprocessors, rows, monkeypatch) -> None:
    class Properties:
        multi_processor_count = multiprocessors

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties)
    assert linear.gated_rows(dtype, torch.device("cuda"), *shape) == rows


@pytest.mark.parametrize("has_bias", [False, True])
def test_more_rows_are_streamed_with_a_gate_behind_them(has_bias, monkeypatch) -> None:
    monkeypatch.setattr(linear, "gated_rows", lambda *_: 15)
    layer, matrix = loaded(6, 16, streams=True, has_bias=has_bias, monkeypatch=monkeypatch)
    most = 12 if has_bias else 15
    assert [n for n in range(20) if layer.streams(n, "silu_and_mul")] == list(range(most + 1))
    assert not layer.streams(13)
    x, out = torch.randn(most, 16), torch.empty(most, 3)
    layer.stream_(out, x, epilogue="silu_and_mul")
    gate, up = (x @ matrix.T + has_bias * torch.arange(6.0)).chunk(2, dim=-1)
    torch.testing.assert_close(out, torch.nn.functional.silu(gate) * up)


@pytest.mark.parametrize(
    ("dtype", "capability", "shape", "rows"),
    [
        (torch.bfloat16, (9, 0), (28672, 4096), 768),
        (torch.float16, (9, 0), (6144, 1024), 768),
        (torch.float32, (9, 0), (28672, 4096), None),
        (torch.bfloat16, (8, 0), (28672, 4096), None),
        (torch.bfloat16, (9, 0), (28672, 4000), None),
        (torch.bfloat16, (9, 0), (28680, 4096), None),  # halves that are no multiple of 8
        (torch.bfloat16, (9, 0), (1536, 512), None),  # too short to put a tile away beside the next
    ],
)
def test_what_is_gated_inside_for_many_rows(dtype, capability, shape, rows, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert linear.tiled_rows(dtype, torch.device("cuda"), *shape) == rows


@pytest.mark.parametrize("has_bias", [False, True])
def test_many_rows_are_gated_inside_without_a_bias(has_bias, monkeypatch) -> None:
    monkeypatch.setattr(linear, "tiled_rows", lambda *_: 15)
    layer, _ = loaded(6, 16, streams=True, has_bias=has_bias, monkeypatch=monkeypatch)
    gated = [n for n in range(18) if layer.streams(n, "silu_and_mul")]
    assert gated == [*range(13), *([] if has_bias else range(15, 18))]
    assert [n for n in range(18) if layer.streams(n, "add")] == list(range(13))


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("num_rows", [0, 1, 8, 9, 13])
def test_streamed_or_not_the_product_is_the_same(streams, num_rows, monkeypatch) -> None:
    layer, matrix = loaded(5, 16, streams=streams, monkeypatch=monkeypatch)
    x = torch.randn(num_rows, 16)
    torch.testing.assert_close(layer(x), x @ matrix.T + torch.arange(5.0))


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # packed, and as it is
@pytest.mark.parametrize("num_rows", [0, 1, 13])
def test_what_a_product_adds_to(num_rows, dtype, has_bias, streams, monkeypatch) -> None:
    layer, matrix = loaded(
        5, 16, streams=streams, has_bias=has_bias, dtype=dtype, monkeypatch=monkeypatch
    )
    x, out = torch.randn(num_rows, 16).to(dtype), torch.randn(num_rows, 5).to(dtype)
    want = out.double() + x.double() @ matrix.double().T + has_bias * torch.arange(5.0)
    layer.add_to_(out, x)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(out.double(), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_folded_norm_is_in_the_one_matrix_and_the_bias_is_left(dtype) -> None:
    parameters = Parameters(dtype=dtype, device=CPU, rank=0, num_ranks=1)
    norm = RMSNorm(parameters, "norm", 2, 1e-5)
    weight, bias = parameters.add(Piece("w", (2, 2))), parameters.add(Piece("b", (2,)))
    layer = Linear(parameters, weight, bias, fold=norm.fold_into_)
    parameters.find("norm.weight").load("norm.weight", torch.tensor([2.0, 0.5]))
    weight.load("w", torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    bias.load("b", torch.tensor([10.0, 20.0]))
    memory = weight.data
    parameters.finish()
    assert memory.tolist() == [[2.0, 1.0], [6.0, 2.0]]  # no other matrix of this size is made
    assert norm.norm.weight.tolist() == [1.0, 1.0]
    assert layer(torch.tensor([[1.0, -1.0]], dtype=dtype)).tolist() == [[1.0, 4.0]]
    assert layer.late_bias.tolist() == [10.0, 20.0]


@pytest.mark.parametrize(
    ("num_rows", "size", "inside"), [(2, 16, True), (8, 16, True), (9, 16, False), (5, 2112, False)]
)
def test_a_streamed_product_norms_and_adds(num_rows, size, inside, monkeypatch) -> None:
    normed = []
    real = ops.rms_norm
    monkeypatch.setattr(ops, "rms_norm", lambda out, *rest: (normed.append(out), real(out, *rest)))
    layer, matrix = loaded(5, size, streams=True, monkeypatch=monkeypatch)
    x, out, norm = (
        torch.randn(num_rows, size),
        torch.randn(num_rows, 5),
        Norm(torch.rand(size), 1e-5),
    )
    want = x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-5) * norm.weight
    want = out + want @ matrix.T + torch.arange(5.0)
    layer.stream_(out, x, norm, "add")
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-4)
    assert len(normed) == (not inside)
