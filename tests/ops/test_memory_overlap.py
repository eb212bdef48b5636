"""What an operator writes is memory of its own: operands that overlap are refused by name, those
that only lie between each other are not, and an operand may be another whole one where that is
documented."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from calls import CALLS, Call
from operands import raw
from refusing import Refusal, assert_refused, changed

from pagedkv import ops

# Written operand -> operands that it may be, whole.
IN_PLACE = {
    ("rms_norm", "out"): ("input",),
    ("merge_attention_states", "out"): ("out_a", "out_b"),
    ("merge_attention_states", "lse"): ("lse_a", "lse_b"),
}


def pairs(may_be: bool) -> list[tuple[str, str, str]]:
    """(call, written operand, other operand) of every two tensors of one call."""
    found = []
    for call, (op, make) in CALLS.items():
        schema = getattr(torch.ops.pagedkv, op).default._schema
        written = [a.name for a in schema.arguments if a.alias_info]
        names = [n for n, value in make().items() if isinstance(value, torch.Tensor)]
        found += [
            (call, one, other)
            for one in written
            for other in names
            if one in names
            and one != other
            and (other in IN_PLACE.get((op, one), ())) == may_be
            # Each two written operands once.
            and not (other in written and written.index(other) < written.index(one))
        ]
    return found


def in_one_buffer(call: Call, one: str, other: str, distance: int) -> None:
    """Move two operands into one buffer, `other` beginning `distance` bytes after `one`."""
    a, b = call[one], call[other]
    bytes_of = [t.numel() * t.element_size() for t in (a, b)]
    buffer = torch.zeros(max(bytes_of[0], distance + bytes_of[1]) + 64, dtype=torch.uint8)
    for name, begin, size in ((other, distance, bytes_of[1]), (one, 0, bytes_of[0])):
        tensor = call[name]
        place = buffer[begin : begin + size].view(tensor.dtype).view(tensor.shape)
        place.copy_(tensor)
        call[name] = place


@pytest.mark.parametrize(("call", "one", "other"), pairs(may_be=False))
def test_a_written_operand_that_overlaps_another_is_refused_by_name(call, one, other) -> None:
    op, make = CALLS[call]
    size = make()[one].nbytes
    for distance in (0, min(16, (size - 1) // 8 * 8)):  # that is inside, and aligned for any dtype
        operands = make()
        in_one_buffer(operands, one, other, distance)
        before = {n: v.clone() for n, v in operands.items() if isinstance(v, torch.Tensor)}
        either = rf"({one} overlaps {other}|{other} overlaps {one})"
        with pytest.raises(RuntimeError, match=rf"pagedkv::{op}: {either} in memory, expected"):
            getattr(ops, op)(**operands)
        for name, tensor in before.items():
            assert (raw(operands[name]) == raw(tensor)).all(), f"{name} was written"


@pytest.mark.parametrize(("call", "one", "other"), pairs(may_be=True))
def test_a_part_of_the_operand_that_it_may_be_is_refused(call, one, other) -> None:
    op, make = CALLS[call]
    operands = make()
    in_one_buffer(operands, one, other, 16)
    message = f"{one} overlaps {other} in memory, expected {other} itself or memory of its own"
    with pytest.raises(RuntimeError, match=f"pagedkv::{op}: {message}"):
        getattr(ops, op)(**operands)
    operands[one] = operands[other]
    getattr(ops, op)(**operands)


def test_rows_shifted_by_one_are_refused() -> None:
    x = torch.randn(4, 8)
    with pytest.raises(RuntimeError, match="out overlaps input in memory, expected input itself"):
        ops.rms_norm(x[1:], x[:3], torch.ones(8), 1e-5)
    ops.rms_norm(x[1:], x[1:], torch.ones(8), 1e-5)


OVERLAPPING_ITSELF: list[tuple[str, str, Callable[[torch.Tensor], torch.Tensor]]] = [
    ("rms_norm", "out", lambda t: t.flatten().as_strided((3, 8), (4, 1))),
    ("rms_norm", "out", lambda t: t.flatten().as_strided((3, 8), (7, 1))),
    ("merge_attention_states", "lse", lambda t: t.flatten().as_strided((3, 2), (1, 1))),
    ("rotary_embedding", "key", lambda t: t.flatten().as_strided((3, 2, 8), (8, 8, 1))),
    ("copy_blocks", "kv_cache", lambda t: t.as_strided(t.shape, (128, 64, 8, 8, 4, 1))),
]


@pytest.mark.parametrize(("call", "operand", "change"), OVERLAPPING_ITSELF)
def test_rows_that_overlap_each_other_are_refused(call, operand, change) -> None:
    strides = list(change(CALLS[call][1]()[operand]).stride())
    message = f"{operand} has strides {strides}, expected no overlap in a tensor that is written"
    assert_refused(Refusal(call, {operand: change}, message))


def test_parts_of_one_projection_are_apart() -> None:
    # The rows of query and key lie between each other in memory and share none of it.
    rows = torch.randn(3, (4 + 2 + 2) * 8)
    query, key, _ = (part.unflatten(1, (-1, 8)) for part in rows.split([32, 16, 16], dim=1))
    call = CALLS["rotary_embedding"][1]() | {"query": query, "key": key}
    apart = changed(call, {"query": torch.clone, "key": torch.clone})
    ops.rotary_embedding(**apart)
    ops.rotary_embedding(**call)
    assert torch.equal(query, apart["query"])
    assert torch.equal(key, apart["key"])
    out = rows[:, 48:]
    ops.silu_and_mul(out.view(3, 16), rows[:, :32])  # beside its own input


@pytest.mark.parametrize(
    "order",
    [(0, 1, 2, 3, 4), (1, 0, 2, 3, 4), (1, 2, 0, 3, 4), (1, 2, 3, 0, 4), (2, 1, 3, 0, 4)],
)
def test_keys_and_values_of_one_pool_are_apart_in_any_order(order) -> None:
    # [2, num_blocks, num_kv_heads, block_size, head_dim], stored in another order.
    shape = [2, 4, 2, 2, 4]
    stored = torch.zeros([shape[d] for d in order])
    pool = stored.permute([order.index(d) for d in range(5)])
    call = CALLS["reshape_and_cache"][1]() | {"key_cache": pool[0], "value_cache": pool[1]}
    ops.reshape_and_cache(**call)
    assert torch.equal(pool[0][3, :, 1], call["key"][0])
    assert torch.equal(pool[1][0, :, 0], call["value"][2])


def elements(tensor: torch.Tensor) -> set[int]:
    """Addresses of its elements, in elements of its buffer."""
    index = torch.arange(tensor.untyped_storage().nbytes() // tensor.element_size())
    places = index.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return set(places.flatten().tolist())


def random_view(rng: random.Random, buffer: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """[num_tokens, 1 to 3, 4] without an overlap in itself, tokens or heads outermost."""
    num_heads, dim = rng.randint(1, 3), 4
    inner = rng.randint(dim, 9)
    if rng.random() < 0.5:
        strides = (inner * num_heads + rng.randint(0, 9), inner)
    else:
        strides = (inner, inner * num_tokens + rng.randint(0, 3))
    last = (num_tokens - 1) * strides[0] + (num_heads - 1) * strides[1] + dim
    offset = rng.randint(0, buffer.numel() - last)
    return buffer.as_strided((num_tokens, num_heads, dim), (*strides, 1), offset)


def test_two_views_are_refused_exactly_when_they_share_an_element() -> None:
    rng = random.Random(0)
    buffer = torch.zeros(160)
    outcomes = {True: 0, False: 0}
    while min(outcomes.values()) < 400:
        num_tokens = rng.randint(1, 4)
        query, key = (random_view(rng, buffer, num_tokens) for _ in range(2))
        call = {
            "positions": torch.zeros(num_tokens, dtype=torch.int64),
            "query": query,
            "key": key,
            "cos_sin_cache": torch.ones(1, 4),
        }
        shares = bool(elements(query) & elements(key))
        outcomes[shares] += 1
        if not shares:
            ops.rotary_embedding(**call)
            continue
        with pytest.raises(RuntimeError, match="query overlaps key in memory"):
            ops.rotary_embedding(**call)


def test_views_too_intricate_to_compare_are_refused() -> None:
    # Even and odd places, in steps of 6 and of 4: apart, which takes a look at each pair of rows.
    buffer = torch.zeros(60_000)
    out, input = buffer.as_strided((9_000, 1), (6, 1), 0), buffer.as_strided((9_000, 1), (4, 1), 1)
    with pytest.raises(RuntimeError, match="out overlaps input in memory"):
        ops.rms_norm(out, input, torch.ones(1), 1e-5)
    ops.rms_norm(out[:50], input[:50], torch.ones(1), 1e-5)


def test_operands_without_elements_overlap_nothing() -> None:
    x = torch.randn(4, 8)
    ops.rms_norm(x[2:2], x[2:2], torch.ones(8), 1e-5)
    ops.silu_and_mul(x[:0, :4], x[:0])
