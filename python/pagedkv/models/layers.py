"""Layers that models are put together from: norms, embedding, feed-forward with a gate or without,
and the parameters of their projections. Attention has a file of its own.

Layers are plain objects, not torch modules: a step of a small model on a CPU is a few hundred
calls, and each costs as little Python as it can.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch.nn import functional

from pagedkv import ops
from pagedkv.models.config import ModelConfig
from pagedkv.models.linear import Linear, Norm
from pagedkv.models.parameters import Parameter, Parameters, Piece, Split, fused


class RMSNorm:
    """x / sqrt(mean(x ** 2) + epsilon) * weight, over the last dimension."""

    __slots__ = ("norm",)

    def __init__(
        self,
        parameters: Parameters,
        name: str,
        size: int,
        epsilon: float,
        *,
        offset: float = 0.0,
    ) -> None:
        """offset: what is added to the weight that the checkpoint holds."""
        weight = parameters.add(Piece(f"{name}.weight", (size,)))

        def prepare() -> None:
            self.norm = Norm(weight.take() + offset if offset else weight.take(), epsilon)

        parameters.when_loaded(prepare)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        ops.rms_norm(out, x, *self.norm)
        return out

    def fold_into_(self, matrix: torch.Tensor) -> None:
        """matrix [n, size] <- matrix * weight, and the weight is ones from here on."""
        matrix.mul_(self.norm.weight)
        self.norm.weight.fill_(1)

    def apply_(self, x: torch.Tensor) -> None:
        """x <- norm(x)."""
        ops.rms_norm(x, x, *self.norm)

    def add_(self, x: torch.Tensor, residual: torch.Tensor) -> None:
        """residual <- residual + x; x <- norm(residual)."""
        ops.fused_add_rms_norm(x, residual, *self.norm)


class LayerNorm:
    """(x - mean(x)) / sqrt(variance(x) + epsilon) * weight + bias, over the last dimension."""

    __slots__ = ("_bias", "_epsilon", "_weight")

    def __init__(
        self,
        parameters: Parameters,
        name: str,
        size: int,
        epsilon: float,
        *,
        has_bias: bool = True,
    ) -> None:
        weight = parameters.add(Piece(f"{name}.weight", (size,)))
        bias = parameters.add(Piece(f"{name}.bias", (size,))) if has_bias else None
        self._epsilon = epsilon

        def prepare() -> None:
            self._weight = weight.take()
            self._bias = None if bias is None else bias.take()

        parameters.when_loaded(prepare)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, x.shape[-1:], self._weight, self._bias, self._epsilon)


class Embedding:
    """Rows of a table [vocab_size, hidden_size] by token id, or by position."""

    __slots__ = ("_table", "weight")

    def __init__(
        self,
        parameters: Parameters,
        name: str,
        vocab_size: int,
        size: int,
        split: Split = Split.VOCABULARY,
    ) -> None:
        self.weight = parameters.add(Piece(f"{name}.weight", (vocab_size, size), split))

        def prepare() -> None:
            self._table = self.weight.data

        parameters.when_loaded(prepare)

    def __call__(self, input_ids: torch.Tensor) -> torch.Tensor:
        return functional.embedding(input_ids, self._table)


class OutputHead:
    """Logits [n, vocab_size] of hidden states, with the embedding's table or one of its own, and
    the soft cap cap * tanh(x / cap) where the model has one.

    tied: the checkpoint tensors that stand for the embedding.
    """

    __slots__ = ("_product", "_soft_cap", "tied")

    def __init__(self, parameters: Parameters, embedding: Embedding, config: ModelConfig) -> None:
        self._soft_cap = config.logit_soft_cap
        if config.tie_word_embeddings:
            self.tied = {"lm_head.weight": embedding.weight}
            weight = embedding.weight
        else:
            self.tied = {}
            shape = (config.vocab_size, config.hidden_size)
            weight = parameters.add(Piece("lm_head.weight", shape, Split.VOCABULARY))
        self._product = Linear(parameters, weight, shares_weight=config.tie_word_embeddings)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self._product(hidden)
        if self._soft_cap:
            logits = self._soft_cap * torch.tanh(logits / self._soft_cap)
        return logits


def projection(
    parameters: Parameters,
    pieces: tuple[Piece, ...],
    *,
    has_bias: bool,
    folded_norm: RMSNorm | None = None,
) -> Linear:
    """A product with the weights of pieces below each other, with or without their biases; bare,
    as Linear says, with those of folded_norm, which was made before.

    A bias is divided like the weight's rows; that of a ROW split, whose parts are summed over the
    ranks, is whole.
    """

    def weight_of(piece: Piece) -> Piece:
        return replace(piece, name=f"{piece.name}.weight")

    def bias_of(piece: Piece) -> Piece:
        split = Split.WHOLE if piece.split is Split.ROW else piece.split
        return replace(
            piece, name=f"{piece.name}.bias", shape=piece.shape[:1], split=split, transposed=False
        )

    weight = parameters.add(*map(weight_of, pieces))
    bias: Parameter | None = None
    if has_bias:
        bias = parameters.add(*map(bias_of, pieces))
    fold = None if folded_norm is None else folded_norm.fold_into_
    return Linear(parameters, weight, bias, fold=fold)


# (out, x, the rows that x is a bare product of or None, their epsilon).
Gate = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, float], None]


def _silu_and_mul(
    out: torch.Tensor, x: torch.Tensor, residual: torch.Tensor | None, epsilon: float
) -> None:
    ops.silu_and_mul(out, x, residual=residual, residual_epsilon=epsilon)


def _gelu_and_mul(
    out: torch.Tensor, x: torch.Tensor, residual: torch.Tensor | None, epsilon: float
) -> None:
    ops.gelu_and_mul(out, x, "none", residual=residual, residual_epsilon=epsilon)


def _gelu_tanh_and_mul(
    out: torch.Tensor, x: torch.Tensor, residual: torch.Tensor | None, epsilon: float
) -> None:
    ops.gelu_and_mul(out, x, "tanh", residual=residual, residual_epsilon=epsilon)


# By ModelConfig.hidden_act.
_GATES: dict[str, Gate] = {
    "silu": _silu_and_mul,
    "gelu": _gelu_and_mul,
    "gelu_pytorch_tanh": _gelu_tanh_and_mul,
}


class GatedMLP:
    """down(act(gate(x)) * up(x)), with gate and up in one product.

    folded_norm: the norm before, if it is to be folded into that product: then there is add_to_
    alone, for any number of rows, and no bias.
    """

    __slots__ = ("_down", "_folds", "_gate", "_gate_up", "_size")

    def __init__(
        self,
        parameters: Parameters,
        name: str,
        config: ModelConfig,
        folded_norm: RMSNorm | None = None,
    ) -> None:
        self._folds = folded_norm is not None
        hidden, inner = config.hidden_size, config.intermediate_size
        self._size = inner
        self._gate = _GATES[config.hidden_act]
        gate_up: tuple[Piece, ...] = (
            Piece(f"{name}.gate_proj", (inner, hidden), Split.COLUMN),
            Piece(f"{name}.up_proj", (inner, hidden), Split.COLUMN),
        )
        if config.fused_weights:
            gate_up = fused(gate_up, f"{name}.gate_up_proj")
        self._gate_up = projection(
            parameters, gate_up, has_bias=config.mlp_bias, folded_norm=folded_norm
        )
        self._down = projection(
            parameters,
            (Piece(f"{name}.down_proj", (hidden, inner), Split.ROW),),
            has_bias=config.mlp_bias,
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [num_tokens, hidden_size] -> the same shape."""
        inner = x.new_empty(x.shape[0], self._size)
        if self._gates_inside(x.shape[0]):
            self._gate_up.stream_(inner, x, epilogue="silu_and_mul")
        else:
            self._gate(inner, self._gate_up(x), None, 0.0)
        return self._down(inner)

    def _gates_inside(self, num_rows: int) -> bool:
        return self._gate is _silu_and_mul and self._gate_up.streams(num_rows, "silu_and_mul")

    def adds(self, num_rows: int) -> bool:
        """Whether add_to_ may be called for so many rows."""
        return self._folds or (self._gate_up.streams(num_rows) and self._down.streams(num_rows))

    def add_to_(self, residual: torch.Tensor, norm: RMSNorm) -> None:
        """residual [num_tokens, hidden_size] <- residual + self(norm(residual)). REQUIRES adds."""
        num_rows = residual.shape[0]
        inner = residual.new_empty(num_rows, self._size)
        if self._gates_inside(num_rows):
            self._gate_up.stream_(inner, residual, norm.norm, "silu_and_mul")
        elif self._folds:
            self._gate(inner, self._gate_up(residual), residual, norm.norm.epsilon)
        else:
            both = residual.new_empty(num_rows, 2 * self._size)
            self._gate_up.stream_(both, residual, norm.norm)
            self._gate(inner, both, None, 0.0)
        self._down.add_to_(residual, inner)


# By ModelConfig.hidden_act: how torch's gelu approximates.
_GELUS = {"gelu": "none", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}


class MLP:
    """out(act(inner(x))), both with a bias or both without."""

    __slots__ = ("_approximate", "_inner", "_out")

    def __init__(
        self, parameters: Parameters, inner: Piece, out: Piece, hidden_act: str, *, has_bias: bool
    ) -> None:
        self._approximate = _GELUS[hidden_act]
        self._inner = projection(parameters, (inner,), has_bias=has_bias)
        self._out = projection(parameters, (out,), has_bias=has_bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [num_tokens, hidden_size] -> the same shape."""
        return self._out(functional.gelu(self._inner(x), approximate=self._approximate))
