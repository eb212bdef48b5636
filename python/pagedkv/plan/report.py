"""A plan in words for people, and as plain values for programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from pagedkv.plan.floors import Floor
from pagedkv.plan.planning import Fit, Plan


def json_report(plan: Plan) -> dict[str, Any]:
    """The plan's fields under their names, nested alike; units are in the names. `fits` tells
    whether there is a pool.
    """
    found = dataclasses.asdict(plan)
    found["fits"] = plan.fit.reason is None
    for name, floors in (("decode", plan.decode), ("prefill", plan.prefill)):
        for row, floor in zip(found[name], floors, strict=True):
            row["tokens_per_s"] = floor.tokens_per_s
    for row, fit in zip(
        (found["fit"], *found["variants"]), (plan.fit, *plan.variants), strict=True
    ):
        row["memory"]["used_bytes"] = fit.memory.used_bytes
    return found


def text_report(plan: Plan) -> str:
    """Several tables below each other, without colours."""
    parts = [_head(plan), _memory(plan), _cache(plan), _choices(plan), _waste(plan), *_floors(plan)]
    return "\n\n".join(parts)


def _head(plan: Plan) -> str:
    gpu = plan.gpu
    known = [] if gpu.memory_bytes is None else [f"{_gib(gpu.memory_bytes)} GiB"]
    known += [] if gpu.bandwidth is None else [f"{gpu.bandwidth / 1e12:.2f} TB/s"]
    known += [] if gpu.flops is None else [f"{gpu.flops / 1e12:.0f} TFLOP/s"]
    each = f", each of {plan.tensor_parallel_size}" if plan.tensor_parallel_size > 1 else ""
    return (
        f"{plan.model}: {plan.architecture}, {plan.num_layers} layers, {plan.num_heads} heads, "
        f"{plan.num_kv_heads} KV heads of {plan.head_dim}, {plan.dtype}\n"
        f"on {gpu.name}{each}: {', '.join([*known, gpu.source])}"
    )


def _memory(plan: Plan) -> str:
    memory, total = plan.fit.memory, plan.gpu.memory_bytes
    rows = [
        ("weights, tables of positions", _gib(memory.weights_bytes)),
        ("activations of the largest step", _gib(memory.step_bytes)),
        ("CUDA graphs", _gib(memory.graphs_bytes)),
        ("CUDA, its libraries, kernels", _gib(memory.libraries_bytes)),
        ("pool of blocks", _gib(memory.pool_bytes)),
        ("together", _gib(memory.used_bytes)),
    ]
    if memory.cpu_pool_bytes:
        cpu = f"({memory.num_cpu_blocks:,} blocks)"
        rows.append((f"on the host: swap space {cpu}", _gib(memory.cpu_pool_bytes)))
    text = table(("Memory", "GiB"), rows)
    if total is not None:
        text += f" of {_gib(total)}"
    if plan.fit.reason is not None:
        text += f"\nIt does not fit: {plan.fit.reason}"
    return text


def _cache(plan: Plan) -> str:
    fit, length = plan.fit, plan.max_model_len
    bounds = {"model": "the model's own limit", "memory": "the pool holds no longer one"}
    bound = bounds[plan.longest_bound] if plan.longest_model_len else "nothing fits"
    per_request = -(-length // plan.block_size)
    return (
        f"KV cache, kv_cache_dtype {plan.kv_cache_dtype}\n"
        f"  {fit.bytes_per_token:,} bytes a token, "
        f"{fit.bytes_per_token * plan.block_size:,} a block of {plan.block_size}\n"
        f"  {fit.memory.num_blocks:,} blocks: {fit.num_tokens:,} tokens\n"
        f"  Maximum concurrency for {length} tokens per request: "
        f"{fit.memory.num_blocks / per_request:.2f}x\n"
        f"  largest max_model_len that fits: {plan.longest_model_len:,} "
        f"({bound})"
    )


def _choices(plan: Plan) -> str:
    def row(fit: Fit) -> tuple[str, ...]:
        numbers = (
            f"{fit.bytes_per_token:,}",
            _gib(fit.memory.weights_bytes),
            _gib(fit.memory.pool_bytes),
            f"{fit.num_tokens:,}",
        )
        held = (f"{one:,}" for one in fit.concurrency)
        return (fit.name, *numbers, *(("does not fit",) if fit.reason else held))

    lengths = (f"x {length:,}" for length in plan.lengths)
    head = ("Sequences that fit", "bytes/token", "weights", "pool GiB", "tokens", *lengths)
    text = table(head, [row(one) for one in (plan.fit, *plan.variants)])
    if plan.num_kv_heads == plan.num_heads:
        text += "\n  Every head has keys and values of its own (MHA): GQA would take less."
    return f"{text}\n  max_num_seqs lets {plan.max_num_seqs:,} of them run at once."


def _waste(plan: Plan) -> str:
    rows = [
        (
            str(one.block_size),
            f"{one.bytes_per_block / 2**10:,.0f}",
            f"{one.num_blocks:,}",
            f"{one.waste_tokens:.1f}",
            f"{one.waste_bytes / 2**10:,.0f}",
            *(f"{100 * share:.2f} %" for share in one.waste_shares),
        )
        for one in plan.block_sizes
    ]
    lengths = (f"of {length:,}" for length in plan.lengths)
    head = ("Waste by block_size", "KiB", "blocks", "tokens lost", "KiB lost", *lengths)
    note = "  Lost in a sequence's last block, on the average: (block_size - 1) / 2 tokens."
    return f"{table(head, rows)}\n{note}"


def _floors(plan: Plan) -> list[str]:
    if not plan.prefill:
        return ["No floors: the rates of memory and products are not known (--bandwidth, --flops)."]
    names = ("ms at least", "tokens/s at most", "bound by")
    decode = [(f"{one.num_seqs:,} x {one.context_len:,}", *_floor(one)) for one in plan.decode]
    prefill = [(f"{one.context_len:,} tokens", *_floor(one)) for one in plan.prefill]
    tables = [table(("Prefill of one prompt", *names), prefill)]
    if decode:  # something fits
        tables.insert(0, table(("Decode: sequences x context", *names), decode))
    return tables


def _floor(one: Floor) -> tuple[str, str, str]:
    return f"{1e3 * one.seconds:.3f}", f"{one.tokens_per_s:,.0f}", one.bound


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they need: the first to the left, others to the right. Rows may be short.

    >>> print(table(("a", "b"), [("one", "10"), ("two", "5")]))
    a     b
      one 10
      two  5
    """
    lines = [tuple(head), *(("  " + row[0], *row[1:]) for row in rows)]
    widths = [max(len(line[i]) for line in lines if i < len(line)) for i in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=False))
        ).rstrip()
        for line in lines
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f}"
