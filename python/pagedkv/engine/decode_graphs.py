"""CUDA graphs of decode steps: one for each of a few numbers of rows and each kind of choice. A
step is padded to the next larger one, and all its kernels are one launch.

Captured at start for what is common, otherwise when a step first asks for it.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable

import torch

from pagedkv.engine.input_builder import StepTensors
from pagedkv.sampling import Kinds

# From the inputs of a step of decodes to its tokens int64 [num_padded].
Body = Callable[[StepTensors, Kinds], torch.Tensor]

# Rows, padding included; what they ask for; groups that share a prefix, empty ones included.
_Key = tuple[int, Kinds, int]
COMMON = (Kinds(False, False, False), Kinds(True, False, False))
_STEP = 8  # rows between two sizes; fewer than one tile of a matrix product


def sizes_for(max_num_seqs: int) -> list[int]:
    """Rows of the graphs, padding included."""
    few = [size for size in (1, 2, 4) if size < max_num_seqs]
    return [*few, *range(_STEP, max_num_seqs, _STEP), max_num_seqs]


def num_common_graphs(max_num_seqs: int) -> int:
    """Those that are captured at start."""
    return len(COMMON) * len(sizes_for(max_num_seqs))


class DecodeGraphs:
    """Owner of the graphs and of the block tables that they read. Everything runs on one stream, so
    the graphs share their memory: what one leaves there is read before the next one runs.
    """

    def __init__(
        self, body: Body, max_num_seqs: int, max_num_blocks: int, device: torch.device
    ) -> None:
        self._body = body
        self.sizes = sizes_for(max_num_seqs)
        self._tables = torch.zeros(max_num_seqs, max_num_blocks, dtype=torch.int32, device=device)
        self._graphs: dict[_Key, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def size_for(self, num_rows: int) -> int:
        """The smallest size that is not below num_rows."""
        return next(size for size in self.sizes if size >= num_rows)

    def capture_common(self, padding: Callable[[int], StepTensors]) -> None:
        """padding: the inputs of a step of that size which has no rows of its own."""
        largest = padding(self.sizes[-1])
        for kinds in COMMON:
            self._body(self._with_own_tables(largest), kinds)  # libraries set themselves up
        for size in reversed(self.sizes):  # the largest first: the others fit in its memory
            tensors = padding(size)
            for kinds in COMMON:
                self._capture(tensors, kinds)

    def run(self, tensors: StepTensors, num_rows: int, kinds: Kinds) -> torch.Tensor:
        """The tokens of a step's own rows; valid until the next run."""
        tables = tensors.attn_metadata.block_tables
        self._tables[:num_rows, : tables.shape[1]].copy_(tables)
        key = _key(tensors, kinds)
        if key not in self._graphs:
            self._capture(tensors, kinds)
        graph, chosen = self._graphs[key]
        graph.replay()
        return chosen[:num_rows]

    def _capture(self, tensors: StepTensors, kinds: Kinds) -> None:
        tensors = self._with_own_tables(tensors)
        graph = torch.cuda.CUDAGraph()
        # Garbage may be the graphs of another engine, and to free one now would spoil this one.
        was_collecting = gc.isenabled()
        gc.disable()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            chosen = self._body(tensors, kinds)
        finally:
            if was_collecting:
                gc.enable()
            graph.capture_end()
        self._graphs[_key(tensors, kinds)] = graph, chosen

    def _with_own_tables(self, tensors: StepTensors) -> StepTensors:
        """The inputs at addresses that stay: tables in a step's arrays are as wide as it needs. Ids
        may be PENDING in any later step.
        """
        rows = self._tables[: tensors.input_ids.shape[0]]
        metadata = dataclasses.replace(tensors.attn_metadata, block_tables=rows)
        return dataclasses.replace(tensors, attn_metadata=metadata, has_pending=True)


def _key(tensors: StepTensors, kinds: Kinds) -> _Key:
    groups = tensors.attn_metadata.prefix_groups
    return tensors.input_ids.shape[0], kinds, 0 if groups is None else groups.shape[0]
