"""How the GPU benchmarks measure: rotating inputs larger than the L2, CUDA-graph replay, CUDA
events, the median; and the card's own ceilings, measured first."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

L2_BYTES = 60 * 2**20
REPLAYS = 7


def graph_us(calls: Sequence[Callable[[], object]], *, repeats: int = 1) -> float:
    """Median time of one call in microseconds, when all calls are replayed one after another. Each
    call has inputs of its own, so that together they exceed the L2."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for call in calls:
                call()
    graph.replay()
    times = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / (len(calls) * repeats))
    return statistics.median(times)


def stream_us(call: Callable[[], object], repeats: int = 5) -> float:
    """Median time of one call on the current stream in microseconds, without a graph."""
    call()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times)


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Rates of this card, measured here."""

    read: float  # bytes/s
    copy: float  # bytes/s, read and written ones counted
    matmul: float  # bf16 FLOP/s
    to_device: float  # bytes/s from pinned memory
    to_cpu: float  # bytes/s to pinned memory


def measure_ceilings() -> Ceilings:
    size = 2**31
    source = torch.randint(0, 2**30, (size // 4,), dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    copy = 2 * size / stream_us(lambda: target.copy_(source)) * 1e6
    total = torch.empty((), dtype=torch.int32, device="cuda")
    read = size / stream_us(lambda: torch.amax(source, dim=0, out=total)) * 1e6
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    c = torch.empty_like(a)
    matmul = 2 * 8192**3 / graph_us([lambda: torch.mm(a, b, out=c)] * 4) * 1e6
    pinned = torch.empty(2**28, dtype=torch.int8).pin_memory()
    place = torch.empty(2**28, dtype=torch.int8, device="cuda")
    to_device = 2**28 / stream_us(lambda: place.copy_(pinned, non_blocking=True)) * 1e6
    to_cpu = 2**28 / stream_us(lambda: pinned.copy_(place, non_blocking=True)) * 1e6
    return Ceilings(read, copy, matmul, to_device, to_cpu)
