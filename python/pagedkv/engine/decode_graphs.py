"""CUDA graphs of decode steps: one for each of a few numbers of rows. A step is padded to the next
larger one, and all its kernels, the choice of tokens included, are one launch. Where that choice
needs more than the step's inputs, a graph ends with the logits.

Captured at start for what is common, otherwise when a step first asks for it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

from pagedkv.engine.input_builder import StepTensors

# From the inputs of a step of decodes to its tokens int64 [num_padded] or, if it is not to choose
# them, to its logits [num_padded, vocab_size].
Body = Callable[[StepTensors, bool], torch.Tensor]

# Rows and groups that share a prefix, each with padding; between them, whether tokens are chosen.
_Key = tuple[int, bool, int]
_STEP = 8  # rows between two sizes; fewer than one tile of a matrix product


def sizes_for(max_num_seqs: int) -> list[int]:
    """Rows of the graphs, padding included."""
    few = [size for size in (1, 2, 4) if size < max_num_seqs]
    return [*few, *range(_STEP, max_num_seqs, _STEP), max_num_seqs]


class DecodeGraphs:
    """Owner of the graphs. Everything runs on one stream, so the graphs share their memory: what
    one leaves there is read before the next one runs. What they read beside it is the device's
    state, at addresses that stay.
    """

    def __init__(self, body: Body, max_num_seqs: int) -> None:
        self._body = body
        self.sizes = sizes_for(max_num_seqs)
        self._graphs: dict[_Key, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def size_for(self, num_rows: int) -> int:
        """The smallest size that is not below num_rows."""
        return next(size for size in self.sizes if size >= num_rows)

    def capture_common(self, padding: Callable[[int], StepTensors]) -> None:
        """padding: the inputs of a step of that size which has no rows of its own."""
        # Libraries set themselves up.
        self._body(padding(self.sizes[-1]), True)
        for size in reversed(self.sizes):  # the largest first: the others fit in its memory
            self._capture(padding(size), chooses=True)

    def run(self, tensors: StepTensors, *, chooses: bool) -> torch.Tensor:
        """The tokens of a step, or its logits, padding included; valid until the next run."""
        key = _key(tensors, chooses)
        if key not in self._graphs:
            self._capture(tensors, chooses=chooses)
        graph, result = self._graphs[key]
        graph.replay()
        return result

    def _capture(self, tensors: StepTensors, *, chooses: bool) -> None:
        graph = torch.cuda.CUDAGraph()
        # Garbage may be the graphs of another engine, and to free one now would spoil this one.
        was_collecting = gc.isenabled()
        gc.disable()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            result = self._body(tensors, chooses)
        finally:
            if was_collecting:
                gc.enable()
            graph.capture_end()
        self._graphs[_key(tensors, chooses)] = graph, result


def _key(tensors: StepTensors, chooses: bool) -> _Key:
    groups = tensors.attn_metadata.prefix_groups
    return tensors.input_ids.shape[0], chooses, 0 if groups is None else groups.shape[0]
