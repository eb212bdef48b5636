"""The product with a weight matrix, in the fastest form that there is for the device.

On a CPU this is oneDNN with the weight reordered once into its blocked layout, for no number of
rows in particular: about one to four times the speed of torch's own product from 2,048 rows down to
the few of decoding, in fp32 and bf16 (benchmarks/bench_cpu_linear.py). Where that was measured, a
row also has the same bits whatever rows are multiplied with it.

On a GPU it is torch's product, but for the few rows of small decodes pagedkv's own, whose time is
that of reading the weights, and which adds behind it, and for the fewest norms before it, without
further kernels; and for the rows of larger decodes and of prompts where the gate is behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn import functional

from pagedkv import ops
from pagedkv.models.parameters import Parameter, Parameters

Product = Callable[[torch.Tensor], torch.Tensor]

# Measured with benchmarks/bench_streamed_linear.py, against torch's product.
MAX_ROWS_OF_ANY_SHAPE = 8
MAX_STREAMED_ROWS = 32  # from here on the L2 and the sums at each kernel's end count, ...
MAX_STREAMED_LONG_ROWS, LONG = 128, 4096  # ... but for rows of so many in_features
# With a gate behind it, and where its blocks, each for so many columns, are a round of the
# multiprocessors that leaves few of them idle: benchmarks/results/2026-11-30-wide-products.md.
MAX_GATED_ROWS, COLUMNS_OF_BLOCK, MIN_BUSY = 256, 112, 0.9
# Measured in benchmarks/results/2026-11-30-tiled-products.md, against torch's product and a gate.
MIN_TILED_ROWS, MIN_TILED_FEATURES = 768, 576


class Norm(NamedTuple):
    """x / sqrt(mean(x ** 2) + epsilon) * weight [in_features]."""

    weight: torch.Tensor
    epsilon: float


def streamed_rows(
    dtype: torch.dtype, device: torch.device, out_features: int, in_features: int
) -> int:
    """For how many rows at most a kernel on this device streams such weights; 0: there is none."""
    if device.type != "cuda" or dtype.itemsize != 2 or in_features % 64:
        return 0
    if torch.cuda.get_device_capability(device)[0] != 9:
        return 0
    if out_features % 16:
        return MAX_ROWS_OF_ANY_SHAPE
    return MAX_STREAMED_LONG_ROWS if in_features >= LONG else MAX_STREAMED_ROWS


def gated_rows(
    dtype: torch.dtype, device: torch.device, out_features: int, in_features: int
) -> int:
    """For how many rows at most, of more than are streamed, a product without a bias is faster with
    the gate inside than torch's and the gate's kernel; 0: for none.
    """
    if streamed_rows(dtype, device, out_features, in_features) < MAX_STREAMED_LONG_ROWS:
        return 0
    blocks = -(-out_features // (2 * COLUMNS_OF_BLOCK))
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    is_round = MIN_BUSY * multiprocessors <= blocks <= multiprocessors
    return MAX_GATED_ROWS if is_round else 0


def tiled_rows(
    dtype: torch.dtype, device: torch.device, out_features: int, in_features: int
) -> int | None:
    """From how many rows on a product with gate and up weights is faster with the gate inside;
    None: never. Without a bias.
    """
    if streamed_rows(dtype, device, out_features, in_features) <= MAX_ROWS_OF_ANY_SHAPE:
        return None
    return MIN_TILED_ROWS if in_features >= MIN_TILED_FEATURES else None


def norms_inside(num_rows: int, in_features: int) -> bool:
    """Whether a streamed product also norms its input faster than an op of its own would."""
    return num_rows <= 4 or (num_rows <= 8 and in_features <= 2048)


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether oneDNN has a product for this dtype on this device."""
    has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if device.type != "cpu" or not has_onednn:
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def packed_product(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    """x [n, in] -> x @ weight.T + bias [n, out], on a reordered copy of weight [out, in]. On the
    meta device a plain copy, as large but for oneDNN's padding of odd shapes.
    """
    if weight.is_meta:
        return plain_product(weight.clone(), bias)
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

    shares_weight: another layer (a tied embedding) keeps using the weight, so it must stay. fold:
    multiplies the weights of the norm before into the loaded matrix, in place. The product is bare
    then: whoever goes on with it multiplies rows by the norm's scale and adds late_bias.
    """

    __slots__ = (
        "_bias",
        "_max_gated_rows",
        "_max_streamed_rows",
        "_min_tiled_rows",
        "_product",
        "_streamed",
        "_transposed",
        "late_bias",
    )

    def __init__(
        self,
        parameters: Parameters,
        weight: Parameter,
        bias: Parameter | None = None,
        *,
        shares_weight: bool = False,
        fold: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        self._streamed: torch.Tensor | None = None
        self.late_bias: torch.Tensor | None = None

        def prepare() -> None:
            matrix = weight.data if shares_weight else weight.take()
            self._bias = None if bias is None else bias.take()
            if fold is not None:
                fold(matrix)
                self.late_bias, self._bias = self._bias, None
            self._product = make(matrix, self._bias)
            self._transposed = None if make is packed_product else matrix.T
            kind = (parameters.dtype, parameters.device, *matrix.shape)
            self._max_streamed_rows = self._max_gated_rows = streamed_rows(*kind)
            self._min_tiled_rows: int | None = None
            if self._max_streamed_rows:
                self._streamed = matrix
                if self._bias is None:
                    self._max_gated_rows = max(self._max_streamed_rows, gated_rows(*kind))
                    self._min_tiled_rows = tiled_rows(*kind)

        make = packed_product if can_pack(parameters.dtype, parameters.runs_on) else plain_product
        parameters.when_loaded(prepare)

    def streams(self, num_rows: int, epilogue: str = "store") -> bool:
        """Whether the weights are streamed for so many rows, or multiplied in tiles with the gate
        behind them: stream_ is the faster form."""
        if self._streamed is None:
            return False
        if epilogue != "silu_and_mul":
            return num_rows <= self._max_streamed_rows
        least = self._min_tiled_rows
        return num_rows <= self._max_gated_rows or (least is not None and num_rows >= least)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if not self.streams(x.shape[0]):
            return self._product(x)
        assert self._streamed is not None
        out = x.new_empty(x.shape[0], self._streamed.shape[0])
        self.stream_(out, x)
        return out

    def add_to_(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """out [n, out] <- out + self(x)."""
        if self.streams(x.shape[0]):
            self.stream_(out, x, epilogue="add")
        elif self._transposed is None:
            out.add_(self._product(x))
        elif not out.is_meta:  # there torch would load its compiler, to find no new shape
            out.addmm_(x, self._transposed)  # without a pass of its own, and rounded once
            if self._bias is not None:
                out.add_(self._bias)

    def stream_(
        self, out: torch.Tensor, x: torch.Tensor, norm: Norm | None = None, epilogue: str = "store"
    ) -> None:
        """out [n, out] <- what ops.streamed_linear makes of it. REQUIRES streams(n, epilogue)."""
        assert self._streamed is not None
        if norm is not None and not norms_inside(*x.shape):
            normed = torch.empty_like(x)
            ops.rms_norm(normed, x, *norm)
            x, norm = normed, None
        ops.streamed_linear(
            out,
            x,
            self._streamed,
            bias=self._bias,
            norm_weight=None if norm is None else norm.weight,
            epsilon=0.0 if norm is None else norm.epsilon,
            epilogue=epilogue,
        )
