"""Runs one scheduled step on the model: tables, copies, forward, logits of the rows that sample."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from pagedkv.engine.input_builder import InputBuilder
from pagedkv.engine.rate_meter import RateMeter
from pagedkv.kv_cache import KVCache
from pagedkv.models import AttentionMetadata
from pagedkv.records import Candidates, ScheduledStep
from pagedkv.sampling import SlotParams, best_candidates, chosen_logprobs, sample


class Sampled(NamedTuple):
    """token_ids int64, failed bool, logprobs float64, each [num_samples]; logprobs None: none is
    wanted.
    """

    token_ids: NDArray[np.int64]
    failed: NDArray[np.bool_]
    logprobs: NDArray[np.float64] | None
    candidates: Candidates | None = None


class Model(Protocol):
    """What the engine needs of a model."""

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: list[tuple[torch.Tensor, torch.Tensor]],
        attn_metadata: AttentionMetadata,
    ) -> torch.Tensor: ...

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor: ...


class ModelRunner:
    """Holds the model, its cache and the sampling parameters by slot. Decides nothing."""

    def __init__(
        self,
        model: Model,
        kv_cache: KVCache,
        inputs: InputBuilder,
        *,
        max_num_seqs: int,
        vocab_size: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._model = model
        self._kv_cache = kv_cache
        self._inputs = inputs
        self._params = SlotParams(max_num_seqs)
        self._vocab_size = vocab_size
        self._clock = clock
        self.meter = RateMeter()

    @torch.inference_mode()
    def run(self, step: ScheduledStep, token_ids: NDArray[np.int32]) -> Sampled:
        """What step.sample_rows chose.

        Args:
            token_ids: the slot table's [max_num_seqs, max_model_len].
        """
        for admitted in (*step.admitted, *step.forked):
            request = admitted.request
            self._params.set(
                admitted.slot, request.sampling_params, request.seed, request.num_candidates
            )
        tensors = self._inputs.build(step, token_ids)
        self._move_blocks(step)
        begin = self._clock()
        hidden = self._model.forward(
            tensors.input_ids, tensors.positions, self._kv_cache.layers, tensors.attn_metadata
        )
        if tensors.attn_metadata.max_query_len > 1:
            self.meter.prefilled(step.num_tokens, self._clock() - begin)
        if step.sample_rows.size == 0:
            return Sampled(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.bool_), None)
        logits = self._model.compute_logits(hidden[tensors.logit_rows])
        # Rows of the embedding beyond the tokenizer's vocabulary are padding, never a token.
        logits = logits[:, : self._vocab_size]
        params = self._params.rows(step.slots[step.sample_rows], step.sample_draws)
        chosen, failed = sample(logits, params, tensors.sample_positions)
        best = best_candidates(logits, params)
        return Sampled(
            chosen,
            failed,
            chosen_logprobs(logits, params, chosen),
            None if best is None else Candidates(*best),
        )

    def _move_blocks(self, step: ScheduledStep) -> None:
        """Run the step's pairs in their order: what a block swapped out held is overwritten by one
        that comes in or by a copy, and a copy may read what comes in.
        """
        cache = self._kv_cache
        begin = self._clock()
        if step.swap_out.size:
            cache.swap_out(torch.from_numpy(step.swap_out))
        if step.swap_in.size:
            cache.swap_in(torch.from_numpy(step.swap_in))
        num_moved = len(step.swap_out) + len(step.swap_in)
        self.meter.swapped(num_moved * cache.bytes_per_block, self._clock() - begin)
        if step.copies.size:
            cache.copy_blocks(torch.from_numpy(step.copies))
