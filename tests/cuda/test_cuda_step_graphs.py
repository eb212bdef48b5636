"""Graphs that end with logits: all have the same memory for them, whichever is captured when."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from pagedkv.engine.input_builder import StepTensors
from pagedkv.engine.step_graphs import StepGraphs, sizes_for

pytestmark = pytest.mark.cuda

VOCAB_SIZE = 50_000
MAX_ROWS = 64


def inputs_of(num_rows: int) -> StepTensors:
    """What a body and a graph's key need of a step's inputs."""
    metadata = SimpleNamespace(
        seq_lens=torch.ones(num_rows, dtype=torch.int32, device="cuda"),
        max_query_len=1,
        prefix_groups=None,
    )
    ids = torch.arange(num_rows, device="cuda")
    return cast(Any, SimpleNamespace(input_ids=ids, attn_metadata=metadata))


def body(tensors: StepTensors, chooses: bool) -> torch.Tensor:
    """Padded logits cut to the vocabulary, as a model's are; element (i, j) is id i + j."""
    assert not chooses
    columns = torch.arange(VOCAB_SIZE + 64, device="cuda", dtype=torch.float32)
    return (tensors.input_ids[:, None] + columns[None])[:, :VOCAB_SIZE]


def test_logits_of_all_graphs_are_where_those_of_one_are() -> None:
    with torch.cuda.stream(torch.cuda.Stream()):  # the default one cannot be captured
        check_shared_logits()


def check_shared_logits() -> None:
    graphs = StepGraphs(body, MAX_ROWS, 0)
    steps = {size: inputs_of(size) for size in sizes_for(MAX_ROWS)}
    for tensors in steps.values():
        body(tensors, False)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    for size in sorted(steps, reverse=True):
        graphs.graph_for(steps[size], chooses=False)
    grown = torch.cuda.memory_reserved() - before
    largest = MAX_ROWS * (VOCAB_SIZE + 64) * 4
    assert grown <= 4 * largest, f"{grown} bytes for {len(steps)} graphs of at most {largest}"
    columns = torch.arange(VOCAB_SIZE, device="cuda", dtype=torch.float32)
    for size in [*steps, *sorted(steps, reverse=True)]:
        steps[size].input_ids += 1
        graph, logits = graphs.graph_for(steps[size], chooses=False)
        graph.replay()
        assert torch.equal(logits, steps[size].input_ids[:, None] + columns[None])
