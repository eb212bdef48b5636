"""Parameters of a model: which checkpoint tensors each is made of, and how these are divided among
ranks, as data; and the strict loading of them.

A parameter may hold several checkpoint tensors below each other (Q, K and V, or gate and up), so
that one product replaces three.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch


class Split(enum.Enum):
    """How a checkpoint tensor is divided among tensor-parallel ranks."""

    WHOLE = "every rank holds all of it"
    COLUMN = "output rows, in equal parts of whole units"
    ROW = "input columns, in equal parts of whole units"
    KV_HEADS = "as COLUMN, but ranks beyond the number of units share one"
    VOCABULARY = "rows in equal parts; the last ranks may have fewer, or none"


@dataclass(frozen=True, slots=True)
class Piece:
    """One checkpoint tensor as (a part of) a parameter.

    unit: how many rows (for ROW: columns) must stay together; a head's size, for example. Several
    pieces of one name are parts of one checkpoint tensor of stored_rows rows, each from its
    first_row on. transposed: the checkpoint holds rows as columns.
    """

    name: str
    shape: tuple[int, ...]
    split: Split = Split.WHOLE
    unit: int = 1
    first_row: int = 0
    stored_rows: int | None = None
    transposed: bool = False

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of the checkpoint tensor."""
        rows = self.shape[0] if self.stored_rows is None else self.stored_rows
        shape = (rows, *self.shape[1:])
        return shape[::-1] if self.transposed else shape

    def share(self, rank: int, num_ranks: int) -> tuple[int, int, int]:
        """(dimension, start, stop) of the part that a rank holds.

        Raises:
            ValueError: the tensor cannot be divided among so many ranks.

        Example: 4 KV heads of 16 rows among 2 ranks; rank 1 holds rows 32 to 64:

        >>> Piece("k", (64, 8), Split.KV_HEADS, unit=16).share(1, 2)
        (0, 32, 64)
        """
        dim = 1 if self.split is Split.ROW else 0
        size = self.shape[dim]
        if self.split is Split.WHOLE:
            return dim, 0, size
        if self.split is Split.VOCABULARY:
            rows = -(-size // num_ranks)
            return dim, min(rank * rows, size), min((rank + 1) * rows, size)
        units = size // self.unit
        if self.split is Split.KV_HEADS and num_ranks > units and num_ranks % units == 0:
            first = rank // (num_ranks // units)
            return dim, first * self.unit, (first + 1) * self.unit
        if units % num_ranks:
            raise ValueError(
                f"{self.name}: {units} units of {self.unit} cannot be divided among "
                f"{num_ranks} ranks"
            )
        part = units // num_ranks * self.unit
        return dim, rank * part, (rank + 1) * part


def fused(pieces: tuple[Piece, ...], name: str) -> tuple[Piece, ...]:
    """The pieces as parts of one checkpoint tensor of this name, one below the other."""
    rows = [piece.shape[0] for piece in pieces]
    return tuple(
        replace(piece, name=name, first_row=sum(rows[:index]), stored_rows=sum(rows))
        for index, piece in enumerate(pieces)
    )


class Parameter:
    """A tensor of the model: the rank's shares of its pieces, one below the other.

    Memory is taken when the first piece has arrived and has the right shape, so a configuration
    alone cannot make it large.
    """

    def __init__(
        self,
        pieces: tuple[Piece, ...],
        *,
        dtype: torch.dtype,
        device: torch.device,
        rank: int,
        num_ranks: int,
    ) -> None:
        self.pieces = pieces
        self._dtype = dtype
        self._device = device
        self._shares = [piece.share(rank, num_ranks) for piece in pieces]
        self._missing = {piece.name for piece in pieces}
        self._data: torch.Tensor | None = None

    @property
    def missing(self) -> frozenset[str]:
        """Names of the pieces that have not arrived."""
        return frozenset(self._missing)

    @property
    def data(self) -> torch.Tensor:
        """The loaded tensor. REQUIRES nothing is missing."""
        assert self._data is not None
        assert not self._missing
        return self._data

    def load(self, name: str, tensor: torch.Tensor) -> None:
        """Copy the rank's share of a checkpoint tensor into its rows.

        Raises:
            ValueError: the tensor has another shape than the pieces say, is not of floats, or has
                been loaded already.
        """
        found = [index for index, piece in enumerate(self.pieces) if piece.name == name]
        stored = self.pieces[found[0]]
        if tuple(tensor.shape) != stored.stored_shape:
            raise ValueError(
                f"{name} is {list(tensor.shape)}, expected {list(stored.stored_shape)}"
            )
        if not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2:
            raise ValueError(f"{name} is of {tensor.dtype}, expected 16 to 64-bit floats")
        if name not in self._missing:
            raise ValueError(f"{name} appears twice")
        rows = [self._shape(i)[0] for i in range(len(self.pieces))]
        if self._data is None:
            self._data = self._empty()
        tensor = tensor.T if stored.transposed else tensor
        for index in found:
            piece = self.pieces[index]
            dim, start, stop = self._shares[index]
            part = tensor.narrow(0, piece.first_row, piece.shape[0]).narrow(
                dim, start, stop - start
            )
            begin = sum(rows[:index])
            self._data[begin : begin + rows[index]].copy_(part)
        self._missing.remove(name)

    def fill(self, random: torch.Generator) -> None:
        """Random numbers in place of the checkpoint's: rows of matrices like those of a model
        before its training, with a deviation of 0.02, and vectors about 1.
        """
        self._data = self._empty()
        self._data.normal_(0.0 if self._data.ndim > 1 else 1.0, 0.02, generator=random)
        self._missing.clear()

    def leave_empty(self) -> None:
        """Its memory, holding anything."""
        self._data = self._empty()
        self._missing.clear()

    def _empty(self) -> torch.Tensor:
        rows = sum(self._shape(i)[0] for i in range(len(self.pieces)))
        shape = (rows, *self._shape(0)[1:])
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def _shape(self, index: int) -> tuple[int, ...]:
        dim, start, stop = self._shares[index]
        shape = list(self.pieces[index].shape)
        shape[dim] = stop - start
        return tuple(shape)

    def take(self) -> torch.Tensor:
        """The loaded tensor, forgotten here, so that its memory is free once repacked."""
        data = self.data
        self._data = None
        return data


class Parameters:
    """All parameters of a model on one rank, by the checkpoint names of their pieces. runs_on: the
    device whose form of a model they are brought into: device itself, unless that is meta.
    folds_norms: whether models that can do so multiply the weights of norms into the products
    behind them.
    """

    def __init__(
        self,
        *,
        dtype: torch.dtype,
        device: torch.device,
        rank: int,
        num_ranks: int,
        runs_on: torch.device | None = None,
        folds_norms: bool = False,
    ) -> None:
        self.dtype = dtype
        self.device = device
        self.runs_on = runs_on or device
        self.folds_norms = folds_norms
        self._rank = rank
        self._num_ranks = num_ranks
        self._by_name: dict[str, Parameter] = {}
        self._when_loaded: list[Callable[[], None]] = []

    def add(self, *pieces: Piece) -> Parameter:
        """A parameter made of these checkpoint tensors, one below the other."""
        parameter = Parameter(
            pieces,
            dtype=self.dtype,
            device=self.device,
            rank=self._rank,
            num_ranks=self._num_ranks,
        )
        self._by_name.update((piece.name, parameter) for piece in pieces)
        return parameter

    def when_loaded(self, action: Callable[[], None]) -> None:
        """Run action once everything is loaded, in the order of these calls."""
        self._when_loaded.append(action)

    def find(self, name: str) -> Parameter | None:
        return self._by_name.get(name)

    @property
    def pieces(self) -> list[Piece]:
        """Of all parameters."""
        return [piece for one in dict.fromkeys(self._by_name.values()) for piece in one.pieces]

    @property
    def missing(self) -> list[str]:
        """Names of all checkpoint tensors that have not arrived."""
        return sorted(name for name, one in self._by_name.items() if name in one.missing)

    def fill(self, seed: int) -> None:
        """Random numbers for all that is missing, the same for a seed on one kind of device."""
        random = torch.Generator(self.device).manual_seed(seed)
        for one in dict.fromkeys(self._by_name.values()):
            one.fill(random)

    def leave_empty(self) -> None:
        """Memory for all that is missing, holding anything: for counting bytes."""
        for one in dict.fromkeys(self._by_name.values()):
            one.leave_empty()

    def finish(self) -> None:
        """Let the layers bring their tensors into the form they run on. REQUIRES none missing."""
        for action in self._when_loaded:
            action()
        self._when_loaded.clear()
