"""What holds for every operator alike on CUDA tensors: the CPU's result, opcheck, torch.compile
without a graph break, CUDA graphs, any stream, any device, empty batches, refusal of what the
kernels could not address."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable

import pytest
import torch
from calls import CALLS, Call, paged_attention, workspace_of
from operands import assert_same
from torch import Tensor

from pagedkv import ops
from pagedkv.ops import library

ON_CPU = ("pairs",)  # on every device
SCRATCH = ("workspace",)


def tensors(call: Call) -> dict[str, Tensor]:
    return {name: value for name, value in call.items() if isinstance(value, Tensor)}


def moved(call: Call, device: torch.device | str) -> Call:
    """A copy of the call with its tensors there, but those that are on the CPU on every device."""
    made = {
        name: value.to(device, copy=True)
        if isinstance(value, Tensor) and name not in ON_CPU
        else copy.deepcopy(value)
        for name, value in call.items()
    }
    if isinstance(call.get("workspace"), Tensor):
        made["workspace"] = workspace_of(made, device)
    return made


def written(op: str, call: Call) -> list[str]:
    schema = getattr(torch.ops.pagedkv, op).default._schema
    return [a.name for a in schema.arguments if a.alias_info and a.name in tensors(call)]


def assert_call_has(op: str, call: Call, want: Call) -> None:
    """The operands of `call` are those of `want`: what is written within rounding, the rest
    exactly."""
    for name, tensor in tensors(call).items():
        if name in SCRATCH:
            continue
        got, expected = tensor.cpu(), want[name].cpu()
        if name in written(op, call):
            torch.testing.assert_close(got.float(), expected.float(), atol=2e-5, rtol=2e-5)
        else:
            assert_same(got, expected, name)


@pytest.fixture(params=CALLS)
def op_and_call(request: pytest.FixtureRequest, device: torch.device) -> tuple[str, Call, Call]:
    """(op, call on the GPU, the same call after it has run on the CPU)."""
    op, make = CALLS[request.param]
    on_cpu = make()
    on_gpu = moved(on_cpu, device)
    getattr(ops, op)(**on_cpu)
    return op, on_gpu, on_cpu


def test_the_result_is_the_cpu_s(op_and_call) -> None:
    op, call, want = op_and_call
    getattr(ops, op)(**call)
    assert_call_has(op, call, want)


def test_opcheck_on_the_gpu(op_and_call) -> None:
    op, call, _ = op_and_call
    checks = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if not any(t.dtype == torch.float8_e4m3fn for t in tensors(call).values()):
        checks.append("test_schema")  # torch's own comparison in it has no float8
    torch.library.opcheck(
        getattr(torch.ops.pagedkv, op).default, (), call, test_utils=tuple(checks)
    )


def test_it_compiles_without_a_graph_break_on_the_gpu(op_and_call) -> None:
    op, call, want = op_and_call
    function = getattr(ops, op)

    def inside(call: Call) -> Tensor:
        function(**call)
        return sum(value.float().sum().cpu() for value in tensors(call).values())

    torch._dynamo.reset()
    torch.compile(inside, fullgraph=True, backend="aot_eager")(call)
    assert_call_has(op, call, want)


def test_inductor_compiles_a_layer_of_them_on_the_gpu(device) -> None:
    pytest.importorskip("triton")
    call = moved(paged_attention(), device)
    x, weight = torch.randn(5, 32, device=device), torch.rand(32, device=device)
    positions = torch.tensor([0, 1, 2, 4, 0], device=device)
    table = torch.rand(8, 8, device=device)
    slots = torch.tensor([10, 11, 4, 6, -1], device=device)

    def layer(x: Tensor, weight: Tensor) -> Tensor:
        normed = torch.empty_like(x)
        ops.rms_norm(normed, x, weight, 1e-5)
        query = normed.view(5, 4, 8).clone()
        key, value = query[:, :2].clone(), query[:, 2:].clone()
        caches = call["key_cache"].clone(), call["value_cache"].clone()
        ops.fused_rotary_reshape_and_cache(positions, query, key, value, table, *caches, slots)
        out = torch.empty_like(query)
        ops.paged_attention(
            out,
            None,
            query,
            *caches,
            call["block_tables"],
            call["seq_lens"],
            call["query_start_loc"],
            max_query_len=3,
            scale=0.5,
        )
        return out.view(5, 32) + x

    torch._dynamo.reset()
    torch.testing.assert_close(
        torch.compile(layer, fullgraph=True)(x, weight), layer(x, weight), atol=1e-4, rtol=1e-4
    )


def test_it_can_be_captured_in_a_graph(op_and_call) -> None:
    op, call, want = op_and_call
    before = {name: tensor.clone() for name, tensor in tensors(call).items()}
    getattr(ops, op)(**call)  # loads the kernel
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        getattr(ops, op)(**call)
    for name, tensor in before.items():
        call[name].copy_(tensor)
    graph.replay()
    torch.cuda.synchronize()
    assert_call_has(op, call, want)


def test_it_runs_in_the_order_of_the_current_stream(op_and_call, device) -> None:
    # Operands that arrive late, on a side stream: run on another stream, the op would miss them.
    op, call, want = op_and_call
    late = {name: tensor.clone() for name, tensor in tensors(call).items() if tensor.is_cuda}
    for name in late:
        call[name].copy_(torch.zeros_like(call[name]))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        for name, tensor in late.items():
            call[name].copy_(tensor)
        getattr(ops, op)(**call)
    stream.synchronize()
    assert_call_has(op, call, want)


def test_any_device_and_the_current_one_stays(op_and_call) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    op, call, want = op_and_call
    other = (torch.cuda.current_device() + 1) % torch.cuda.device_count()
    call = moved(call, torch.device("cuda", other))
    current = torch.cuda.current_device()
    getattr(ops, op)(**call)
    assert torch.cuda.current_device() == current
    torch.cuda.synchronize(other)
    assert_call_has(op, call, want)


@pytest.mark.parametrize("name", CALLS)
def test_operands_on_two_devices_are_refused(name: str, device) -> None:
    op, make = CALLS[name]
    call = moved(make(), device)
    stays = [n for n in tensors(call) if n not in (*ON_CPU, "source", "destination", "workspace")]
    if len(stays) < 2:
        pytest.skip("one operand, or pools that may be on two devices")
    call[stays[-1]] = call[stays[-1]].cpu()
    with pytest.raises(
        RuntimeError, match=rf"{op}: \w+ is on (cpu|cuda:\d), expected (cpu|cuda:\d)"
    ):
        getattr(ops, op)(**call)


def transposed(tensor: Tensor) -> Tensor:
    return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)


@pytest.mark.parametrize("name", CALLS)
def test_a_last_dimension_that_is_not_contiguous_is_refused(name: str, device) -> None:
    op, make = CALLS[name]
    for operand, tensor in tensors(make()).items():
        if tensor.dim() < 2 or operand in (*ON_CPU, "prefix_groups"):
            continue
        call = moved(make(), device)
        call[operand] = transposed(call[operand])
        if call[operand].is_contiguous():
            continue
        expected = re.escape(f"{op}: {operand} has strides")
        if operand in ("lse", "lse_a", "lse_b"):
            continue  # any strides: an element a row is read
        with pytest.raises(RuntimeError, match=expected):
            getattr(ops, op)(**call)


def empty_calls() -> dict[str, Callable[[], Call]]:
    """Calls of no tokens, no sequences, no pairs."""

    def without(make: Callable[[], Call], names: tuple[str, ...], **more: Tensor) -> Call:
        call = make()
        return call | {name: call[name][:0] for name in names} | more

    make = {name: CALLS[name][1] for name in CALLS}
    rows = {
        "reshape_and_cache": ("key", "value", "slot_mapping"),
        "fused_rotary_reshape_and_cache": ("query", "key", "value", "positions", "slot_mapping"),
        "fused_norm_rotary_reshape_and_cache": (
            "query",
            "key",
            "value",
            "positions",
            "slot_mapping",
        ),
        "merge_attention_states": ("out", "lse", "out_a", "lse_a", "out_b", "lse_b"),
        "copy_blocks": ("pairs",),
        "swap_blocks": ("pairs",),
        "rms_norm": ("out", "input"),
        "fused_add_rms_norm": ("input", "residual"),
        "rotary_embedding": ("positions", "query", "key"),
        "silu_and_mul": ("out", "input"),
        "gelu_and_mul": ("out", "input"),
        "streamed_linear": ("out", "input"),
        "score_tokens": tuple(CALLS["score_tokens"][1]()),
    }
    made = {name: lambda n=name, r=r: without(make[n], r) for name, r in rows.items()}
    no_starts = torch.zeros(1, dtype=torch.int32)
    made["gather_blocks"] = lambda: without(
        make["gather_blocks"], ("key", "value", "block_tables"), seq_start_loc=no_starts
    )
    made["paged_attention"] = lambda: without(
        make["paged_attention"],
        ("out", "lse", "query", "block_tables", "seq_lens"),
        query_start_loc=no_starts,
        max_query_len=0,
    )
    made["advance_step"] = lambda: without(
        make["advance_step"],
        ("block_tables", "seq_lens", "slots", "samples", "filters", "inverse_temperatures"),
        samples=torch.zeros(6, 0, dtype=torch.int64),
        filters=torch.zeros(2, 0, dtype=torch.float64),
        query_start_loc=no_starts,
        sample_start_loc=no_starts,
    )
    made["advance_edits"] = lambda: without(
        make["advance_edits"],
        ("ids", "counts", "values", "is_limited", "rows"),
        start_loc=no_starts,
    )
    made["sample_tokens"] = lambda: without(
        make["sample_tokens"],
        tuple(set(make["sample_tokens"]()) - {"edit_start_loc", "is_limited"}),
        edit_start_loc=no_starts,
        is_limited=no_starts[:0],
    )
    return made


def test_every_op_has_an_empty_call() -> None:
    assert set(empty_calls()) == set(library.OPS)


@pytest.mark.parametrize("op", library.OPS)
def test_an_empty_batch_is_no_work(op: str, device) -> None:
    call = moved(empty_calls()[op](), device)
    before = {name: tensor.clone() for name, tensor in tensors(call).items()}
    getattr(ops, op)(**call)
    torch.cuda.synchronize()
    for name, tensor in before.items():
        assert_same(call[name].cpu(), tensor.cpu(), name)
