"""CUDA graphs of steps: of decodes alone, one for each of a few numbers of rows, and of short steps
with prompts, one for each of a few numbers of tokens and of rows. A step is padded to the next
larger one, and all its kernels, the choice of tokens included, are one launch. Where that choice
needs more than the step's inputs, a graph ends with the logits.

Captured at start for what is common, otherwise when a step first asks for it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from pagedkv.engine.input_builder import PaddedSize, StepTensors
from pagedkv.records import ScheduledStep

# From the inputs of a step to its tokens int64 [num_samples] or, if it is not to choose them, to
# its logits [num_samples, vocab_size], padding included.
Body = Callable[[StepTensors, bool], torch.Tensor]

_STEP = 8  # rows between two sizes; fewer than one tile of a matrix product
_TOKEN_STEP = 32  # tokens of steps with prompts between two sizes


class GraphKey(NamedTuple):
    """num_groups: that share a prefix; everything padding included."""

    size: PaddedSize
    chooses: bool
    num_groups: int


def sizes_for(max_num_seqs: int) -> list[int]:
    """Rows of the graphs of decodes, padding included."""
    few = [size for size in (1, 2, 4) if size < max_num_seqs]
    return [*few, *range(_STEP, max_num_seqs, _STEP), max_num_seqs]


def token_sizes_for(max_num_tokens: int) -> list[int]:
    """Tokens of the graphs of steps with prompts, padding included; none for 0."""
    if max_num_tokens == 0:
        return []
    few = [16] if max_num_tokens > 16 else []
    return [*few, *range(_TOKEN_STEP, max_num_tokens, _TOKEN_STEP), max_num_tokens]


class GraphSizes:
    """Which sizes there are, padding included. decodes: rows of steps of decodes alone; tokens,
    rows: of steps with prompts.
    """

    def __init__(self, max_num_seqs: int, max_num_tokens: int) -> None:
        """max_num_tokens: of steps with prompts that are captured; 0: none is."""
        self.decodes = sizes_for(max_num_seqs)
        self.tokens = token_sizes_for(max_num_tokens)
        # Rows beside and of prompts: one more is always padding, which takes the tokens left.
        self.rows = [2**i for i in range(1, 24) if 2**i < max_num_seqs]
        if max_num_seqs > 1:
            self.rows.append(max_num_seqs)

    def of(self, step: ScheduledStep) -> PaddedSize | None:
        """The smallest that holds the step; None: it is run kernel by kernel."""
        # Prompts with several answers have several samples a row; beside rows that have none they
        # may be as many as the rows.
        if bool((np.diff(step.sample_rows) == 0).any()):
            return None
        num_rows, num_samples = step.slots.size, step.sample_rows.size
        if step.num_tokens == num_rows == num_samples:
            return decode_size(next(size for size in self.decodes if size >= num_rows))
        num_tokens = next((size for size in self.tokens if size >= step.num_tokens), None)
        most_rows = next((size for size in self.rows if size > num_rows), None)
        if num_tokens is None or most_rows is None:
            return None
        return PaddedSize(num_tokens, most_rows, num_tokens)


class StepGraphs:
    """Owner of the graphs. Everything runs on one stream, so the graphs share their memory: what
    one leaves there is read before the next one runs. What they read beside it is the device's
    state, at addresses that stay.
    """

    def __init__(self, body: Body, max_num_seqs: int, max_num_tokens: int) -> None:
        """max_num_tokens: of steps with prompts that are captured; 0: none is."""
        self._body = body
        self.sizes = GraphSizes(max_num_seqs, max_num_tokens)
        self._graphs: dict[GraphKey, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def capture_common(self, padding: Callable[[PaddedSize], StepTensors]) -> None:
        """padding: the inputs of a step of that size which has no rows of its own."""
        sizes = [decode_size(size) for size in self.sizes.decodes]
        if self.sizes.rows:  # one prompt alone
            sizes += [PaddedSize(size, self.sizes.rows[0], size) for size in self.sizes.tokens]
        sizes.sort(key=lambda size: size.num_tokens)
        # Libraries set themselves up, and kernels are loaded.
        for largest in {size.max_query_len > 1: size for size in sizes}.values():
            self._body(padding(largest), True)
        for size in reversed(sizes):  # the largest first: the others fit in its memory
            self._capture(padding(size), chooses=True)

    def graph_for(
        self, tensors: StepTensors, *, chooses: bool
    ) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        """What to replay, and what then has the tokens of the step, or its logits, padding
        included, until the next replay of any graph.
        """
        key = _key(tensors, chooses)
        if key not in self._graphs:
            self._capture(tensors, chooses=chooses)
        return self._graphs[key]

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
        # Logits are large: those of all graphs have the same memory, which all graphs share.
        kept = result if chooses else _borrowed(result)
        self._graphs[_key(tensors, chooses)] = graph, kept


class _Memory:
    """num_bytes on a GPU from an address on, as torch.as_tensor takes it."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _borrowed(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements, without holding their memory. REQUIRES that others keep it mapped."""
    storage = tensor.untyped_storage()
    memory = torch.as_tensor(_Memory(storage.data_ptr(), storage.nbytes()), device=tensor.device)
    elements = memory.view(tensor.dtype)
    return elements.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def decode_size(num_rows: int) -> PaddedSize:
    return PaddedSize(num_rows, num_rows, 1)


def _key(tensors: StepTensors, chooses: bool) -> GraphKey:
    metadata = tensors.attn_metadata
    size = PaddedSize(tensors.input_ids.numel(), metadata.seq_lens.numel(), metadata.max_query_len)
    groups = metadata.prefix_groups
    return GraphKey(size, chooses, 0 if groups is None else groups.shape[0])
