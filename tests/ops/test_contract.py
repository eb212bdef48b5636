"""What holds for every operator alike: opcheck, torch.compile without a graph break, documented
examples that are true, and the words and order of the schema in Python."""

from __future__ import annotations

import copy
import doctest
import inspect

import pytest
import torch
from calls import CALLS, Call, paged_attention, paged_attention_with_everything
from operands import assert_same

from pagedkv import ops
from pagedkv.ops import attention, cache, layers, library, linear, reference, sampling, step


def overload(name: str) -> torch._ops.OpOverload:
    return getattr(torch.ops.pagedkv, name).default


def tensors(call: Call) -> dict[str, torch.Tensor]:
    return {name: value for name, value in call.items() if isinstance(value, torch.Tensor)}


@pytest.fixture(params=CALLS)
def op_and_call(request: pytest.FixtureRequest) -> tuple[str, Call]:
    torch.manual_seed(0)
    name, make = CALLS[request.param]
    return name, make()


def test_every_operator_is_called_here() -> None:
    assert {name for name, _ in CALLS.values()} == set(library.OPS)


def test_opcheck(op_and_call) -> None:
    name, call = op_and_call
    checks = ["test_schema", "test_autograd_registration", "test_faketensor"]
    checks.append("test_aot_dispatch_dynamic")
    if any(t.dtype == torch.float8_e4m3fn for t in tensors(call).values()):
        # torch's own comparison in this check has no float8; the plain calls run it.
        checks.remove("test_schema")
    torch.library.opcheck(overload(name), (), call, test_utils=checks)


def test_workspace_size_opcheck() -> None:
    torch.library.opcheck(overload("paged_attention_workspace_size"), (2, 8, 4, 64, 2, 0))


def test_compiles_without_a_graph_break(op_and_call) -> None:
    # aot_eager functionalises and runs the fake kernels, as every back end does.
    name, call = op_and_call
    function = getattr(ops, name)
    expected = copy.deepcopy(call)

    def inside(call: Call) -> torch.Tensor:
        function(**call)
        # The graph goes on with what the operator wrote.
        return sum(value.float().sum() for value in tensors(call).values())

    expected_total = inside(expected)
    torch._dynamo.reset()
    total = torch.compile(inside, fullgraph=True, backend="aot_eager")(call)
    for operand, tensor in tensors(call).items():
        if operand != "workspace":
            assert_same(tensor, expected[operand], operand)
    if "workspace" not in tensors(call):
        assert total.item() == pytest.approx(expected_total.item())


def test_inductor_compiles_a_layer_of_them() -> None:
    # Several operators in one graph that writes through their arguments, compiled to C++.
    torch.manual_seed(0)
    call = paged_attention()
    x, weight = torch.randn(5, 32), torch.rand(32)
    positions, table = torch.tensor([0, 1, 2, 4, 0]), torch.rand(8, 8)
    slots = torch.tensor([10, 11, 4, 6, -1])

    def layer(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        normed = torch.empty_like(x)
        ops.rms_norm(normed, x, weight, 1e-5)
        query = normed.view(5, 4, 8).clone()
        key, value = query[:, :2].clone(), query[:, 2:].clone()
        ops.rotary_embedding(positions, query, key, table)
        key_cache, value_cache = call["key_cache"].clone(), call["value_cache"].clone()
        ops.reshape_and_cache(key, value, key_cache, value_cache, slots)
        out = torch.empty_like(query)
        ops.paged_attention(
            out,
            None,
            query,
            key_cache,
            value_cache,
            call["block_tables"],
            call["seq_lens"],
            call["query_start_loc"],
            max_query_len=3,
            scale=0.5,
        )
        return out.view(5, 32) + x

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True)
    torch.testing.assert_close(compiled(x, weight), layer(x, weight))


@pytest.mark.parametrize(
    "module", [attention, cache, layers, linear, sampling, step], ids=lambda m: m.__name__
)
def test_documented_examples_are_true(module) -> None:
    results = doctest.testmod(module)
    assert results.attempted > 0
    assert results.failed == 0


@pytest.mark.parametrize("name", library.OPS)
def test_python_has_the_schema_s_names_in_its_order(name) -> None:
    schema = overload(name)._schema
    for module in (ops, reference):
        parameters = list(inspect.signature(getattr(module, name)).parameters.values())
        assert [p.name for p in parameters] == [a.name for a in schema.arguments]
        for parameter, argument in zip(parameters, schema.arguments, strict=True):
            keyword_only = parameter.kind is inspect.Parameter.KEYWORD_ONLY
            assert keyword_only == argument.kwarg_only, argument.name
            if argument.has_default_value():
                assert parameter.default == argument.default_value, argument.name
            else:
                assert parameter.default is inspect.Parameter.empty, argument.name


@pytest.mark.parametrize("name", library.OPS)
def test_docstrings_have_every_section(name) -> None:
    text = inspect.getdoc(getattr(ops, name)) or ""
    for section in ("Args:", "Returns:", "Mutates:", "Raises:", "Example:", "Source:"):
        assert section in text, section
    written = [a.name for a in overload(name)._schema.arguments if a.alias_info]
    mutates = text.split("Mutates:")[1].split("Raises:")[0]
    assert all(argument in mutates for argument in written), written


def test_workspace_size_is_what_the_operator_wants() -> None:
    call = paged_attention_with_everything() | {"num_splits": 3}
    call["prefix_groups"] = torch.tensor([[0, 2, 1]], dtype=torch.int32)
    size = ops.paged_attention_workspace_size(5, 4, 8, num_splits=3, num_prefix_groups=1)
    # States of 8 + 2 numbers of 4 bytes: of each row 3 pieces, the prefix and its own keys; of one
    # worker (a thread) two tiles of 128 rows. A record of 16 bytes for the group, counters of 64.
    num_states = 5 * 4 * (3 + 1 + 1) + 2 * 128
    assert size == num_states * (8 + 2) * 4 + 16 + 64
    ops.paged_attention(**call | {"workspace": torch.empty(size, dtype=torch.uint8)})
    with pytest.raises(RuntimeError, match=f"workspace has {size - 1} bytes, expected at least"):
        ops.paged_attention(**call | {"workspace": torch.empty(size - 1, dtype=torch.uint8)})


def test_workspace_size_does_not_grow_with_the_batch_without_splits() -> None:
    for num_splits in (0, 1):
        sizes = {
            ops.paged_attention_workspace_size(tokens, 32, 128, num_splits=num_splits)
            for tokens in (1, 64, 8192)
        }
        assert len(sizes) == 1


def test_workspace_size_of_another_device_is_refused() -> None:
    with pytest.raises(ValueError, match="device is 'meta', expected a cpu or cuda device"):
        ops.paged_attention_workspace_size(1, 1, 64, device="meta")


def test_workspace_size_refuses_what_no_call_can_have() -> None:
    for bad, message in (
        ({"num_tokens": -1}, "num_tokens is -1, expected at least 0"),
        ({"num_heads": 0}, "num_heads is 0, expected at least 1"),
        ({"head_dim": 257}, "head_dim is 257, expected 1 to 256"),
        ({"num_splits": 257}, "num_splits is 257, expected 0 to 256"),
        ({"num_prefix_groups": -1}, "num_prefix_groups is -1, expected at least 0"),
    ):
        sizes = {"num_tokens": 1, "num_heads": 1, "head_dim": 64} | bad
        with pytest.raises(RuntimeError, match=message):
            ops.paged_attention_workspace_size(**sizes)
