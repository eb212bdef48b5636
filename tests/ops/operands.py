"""Operands for the operator tests: tensors in awkward memory, and proof of what was written.

`Arena.make` places a tensor into a larger buffer of poison (NaN) with the strides of a layout;
after an operator has run, `Arena.check_untouched` shows that nothing outside the tensors that it
may write has changed. `assert_matches` compares with the oracle.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

# contiguous: as torch makes it. sliced: part of wider rows, as q, k, v of one projection are.
# transposed: the leading dimensions lie the other way round. offset: starts at an odd address.
LAYOUTS = ("contiguous", "sliced", "transposed", "offset")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def raw(tensor: Tensor) -> Tensor:
    """The bits, as integers: NaN equals NaN."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(integers[tensor.element_size()])


@dataclass(frozen=True, slots=True)
class _Placed:
    buffer: Tensor
    tensor: Tensor


class Arena:
    """Makes operands and remembers what all their memory looked like."""

    def __init__(self) -> None:
        self._placed: list[_Placed] = []
        self._before: list[Tensor] = []

    def make(self, values: Tensor, layout: str = "contiguous") -> Tensor:
        """A tensor of these values in a buffer of poison, with the layout's strides."""
        shape = list(values.shape)
        order = list(range(len(shape)))
        if layout == "transposed":
            order = [*reversed(order[:-1]), order[-1]]
        padding, offset = {"sliced": (8, 16), "offset": (0, 1)}.get(layout, (0, 0))
        strides = [0] * len(shape)
        step = 1
        for position, dimension in enumerate(reversed(order)):
            strides[dimension] = step
            step *= max(shape[dimension], 1)
            if position == 0 or layout == "sliced":
                step += padding
        buffer = torch.full((step + offset + 8,), math.nan, dtype=torch.float32).to(values.dtype)
        if not values.dtype.is_floating_point:
            buffer.fill_(-77)
        tensor = buffer.as_strided(shape, strides, offset)
        tensor.copy_(values)
        self._placed.append(_Placed(buffer, tensor))
        return tensor

    def remember(self) -> None:
        """What is in all buffers now is what they should keep."""
        self._before = [placed.buffer.clone() for placed in self._placed]

    def check_untouched(self, written: Iterable[Tensor] = ()) -> None:
        """Everything is as remembered, but the elements of the tensors in `written`."""
        allowed = {id(tensor) for tensor in written}
        known = {id(placed.tensor) for placed in self._placed}
        assert allowed <= known, "a written tensor is not of this arena"
        for placed, before in zip(self._placed, self._before, strict=True):
            changed = raw(placed.buffer) != raw(before)
            if id(placed.tensor) in allowed:
                inside = torch.zeros_like(changed)
                inside.as_strided(
                    placed.tensor.shape, placed.tensor.stride(), placed.tensor.storage_offset()
                ).fill_(True)
                changed &= ~inside
            where = changed.nonzero().flatten().tolist()
            assert not where, (
                f"{tuple(placed.tensor.shape)} {placed.tensor.dtype}: memory outside the written "
                f"tensors changed at element {where[0]} of its buffer ({len(where)} in all)"
            )


def assert_matches(
    got: Tensor, oracle: Tensor, plain: Tensor | None = None, what: str = "out"
) -> None:
    """Compare with the fp32 oracle.

    Absolute error, relative error (norms) and cosine distance are each at most twice those of
    `plain`, the same mathematics carried out in got's dtype, plus that dtype's rounding. Infinities
    and NaN are in the same places.
    """
    assert got.shape == oracle.shape, f"{what}: shape {got.shape}, oracle {oracle.shape}"
    rounded = oracle.to(got.dtype).double()
    mine, truth = got.double(), oracle.double()
    for name, test in (("NaN", torch.isnan), ("infinity", torch.isinf)):
        differs = (test(mine) != test(rounded)).nonzero()
        assert not len(differs), f"{what}: {name} differs from the oracle at {differs[0].tolist()}"
    finite = torch.isfinite(rounded)
    mine, truth = mine[finite], truth[finite]
    if not mine.numel():
        return
    # Twice: the result and the oracle, which is fp32 itself, are both rounded.
    epsilon = 2 * torch.finfo(got.dtype).eps
    other = truth if plain is None else plain.double()[finite]
    largest = truth.abs().max().item()
    limit = 2 * (other - truth).abs().max().item() + epsilon * largest
    # The yardstick must be one: an oracle that is wrong would otherwise allow anything.
    assert limit <= 64 * epsilon * largest, f"{what}: the plain result is off by {limit / 2:.3g}"
    error = (mine - truth).abs()
    if error.max().item() > limit:
        bad = (((got.double() - oracle.double()).abs() > limit) & finite).nonzero()
        first = tuple(bad[0].tolist())
        raise AssertionError(
            f"{what}: {len(bad)} of {got.numel()} differ by more than {limit:.3g}; the first at "
            f"{list(first)}: got {got[first].item():.7g}, oracle {oracle[first].item():.7g}"
        )
    norm = truth.norm().item()
    relative = 2 * (other - truth).norm().item() + epsilon * norm
    assert (mine - truth).norm().item() <= relative, (
        f"{what}: norm of the error over {relative:.3g}"
    )
    if norm > 0:
        distance = 1 - torch.dot(mine, truth).item() / (mine.norm().item() * norm)
        plain_distance = 1 - torch.dot(other, truth).item() / (other.norm().item() * norm)
        assert distance <= 2 * plain_distance + epsilon, f"{what}: cosine distance {distance:.3g}"


def assert_same(got: Tensor, want: Tensor, what: str = "out") -> None:
    """Bitwise equality; NaN equals NaN of any kind."""
    assert got.shape == want.shape, f"{what}: shape {got.shape}, expected {want.shape}"
    assert got.dtype == want.dtype, f"{what}: dtype {got.dtype}, expected {want.dtype}"
    both_nan = torch.isnan(got.float()) & torch.isnan(want.float())
    differs = ((raw(got) != raw(want)) & ~both_nan).nonzero()
    if len(differs):
        first = tuple(differs[0].tolist())
        raise AssertionError(
            f"{what}: {len(differs)} of {got.numel()} differ, the first at {list(first)}: "
            f"got {got[first].item()}, expected {want[first].item()}"
        )
