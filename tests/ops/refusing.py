"""How refusals are tested: one valid call, one change, the message word for word, and no trace of
the call in any operand."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from calls import CALLS, Call
from operands import raw

from pagedkv import ops


@dataclass(frozen=True, slots=True)
class Refusal:
    """A valid call by name, operands to put instead (a value, or a function of the valid one), and
    the message after "pagedkv::<op>: "."""

    call: str
    changes: dict[str, Any]
    message: str

    @property
    def name(self) -> str:
        return f"{self.call}: {self.message}"[:90]


def changed(call: Call, changes: dict[str, Any]) -> Call:
    made = dict(call)
    for name, change in changes.items():
        assert name in made, f"{name} is no operand"
        made[name] = change(made[name]) if callable(change) else change
    return made


def assert_refused(refusal: Refusal, call_op: Callable[..., None] | None = None) -> None:
    torch.manual_seed(0)
    op_name, make = CALLS[refusal.call]
    call = changed(make(), refusal.changes)
    before = {n: v.clone() for n, v in call.items() if isinstance(v, torch.Tensor) and v.is_cpu}
    with pytest.raises(RuntimeError, match=re.escape(f"pagedkv::{op_name}: {refusal.message}")):
        (call_op or getattr(ops, op_name))(**call)
    for name, tensor in before.items():
        unchanged = raw(call[name].contiguous()) == raw(tensor.contiguous())
        assert unchanged.all(), f"{name} was written by a call that was refused"


def int32_like(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def transposed_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with a last dimension that is not contiguous."""
    return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)


def repeated(tensor: torch.Tensor) -> torch.Tensor:
    """The same shape, all of the first dimension at one address."""
    return tensor[:1].expand_as(tensor)
