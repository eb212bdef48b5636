"""Runs one scheduled step on the model: tables, copies, forward, logits of the rows that sample,
and their tokens. launch() puts it on the device, collect() waits for what it chose.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from pagedkv.engine.input_builder import InputBuilder, PaddedSize, StepTensors
from pagedkv.engine.layer_caches import layer_caches
from pagedkv.engine.model import Model
from pagedkv.engine.rate_meter import RateMeter
from pagedkv.engine.step_graphs import StepGraphs
from pagedkv.engine.step_parts import (
    is_out_of_memory,
    join_samples,
    join_scores,
    run_in_parts,
)
from pagedkv.engine.stopwatch import Span, Stopwatch
from pagedkv.engine.swaps import Swaps
from pagedkv.kv_cache import KVCache
from pagedkv.records import Candidates, ScheduledStep, empty_step
from pagedkv.sampling import (
    EditLists,
    LogitRules,
    SlotParams,
    TokenScores,
    best_candidates,
    call_functions,
    choose,
    chosen_logprobs,
    score_tokens,
)

logger = logging.getLogger(__name__)

_SCORED_AT_ONCE = 256  # tokens of prompts


class Sampled(NamedTuple):
    """token_ids int64, failed bool, logprobs float64, each [num_samples]. The token of a row that
    has failed means nothing. logprobs None: none is wanted. scores: of the chosen tokens that want
    them, rows being indices of samples; prompt_scores: of tokens of prompts, rows being one row of
    the step, and the position of the first of them. unfit: rows of the step for which the device's
    memory does not suffice; what stands for their samples means nothing.
    """

    token_ids: NDArray[np.int64]
    failed: NDArray[np.bool_]
    logprobs: NDArray[np.float64] | None
    candidates: Candidates | None = None
    scores: TokenScores | None = None
    prompt_scores: Sequence[tuple[TokenScores, int]] = ()
    unfit: Sequence[int] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Launched:
    """A step on its way. token_ids int64 [num_samples], -1 where a row has failed, in CPU memory
    once done has passed; logits and params of the rows that sample, where more than their tokens is
    wanted, else None; prefilling: what the rate of prompts is measured on.
    """

    token_ids: torch.Tensor
    logits: torch.Tensor | None
    params: SlotParams | None
    done: torch.cuda.Event | None
    prefilling: tuple[int, Span] | None  # tokens
    prompt_scores: Sequence[tuple[TokenScores, int]] = ()
    unfit: Sequence[int] = ()


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
        enforce_eager: bool = False,
        max_captured_tokens: int = 0,
    ) -> None:
        """enforce_eager: without CUDA graphs; as always on a CPU. max_captured_tokens: most tokens
        of steps with prompts that are graphs."""
        self._model = model
        self._kv_cache = kv_cache
        self._layers = layer_caches(kv_cache)
        self._inputs = inputs
        self._params = SlotParams(max_num_seqs)
        self._edits = EditLists(max_num_seqs, kv_cache.tensor.device)
        self._num_prompt_logprobs = np.full(max_num_seqs, -1, dtype=np.int64)
        self._prompt_lens = np.zeros(max_num_seqs, dtype=np.int64)
        self._vocab_size = vocab_size
        device = kv_cache.tensor.device
        self._watch = Stopwatch(device, clock)
        self.meter = RateMeter()
        # Not the default stream: there the copy engines would have to wait for everything.
        self._stream: torch.cuda.Stream | None = None
        self._graphs: StepGraphs | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            # Weights and pool may still be on their way there.
            self._stream.wait_stream(torch.cuda.current_stream(device))
            if not enforce_eager:
                self._capture(max_num_seqs, max_captured_tokens)
        self._swaps = Swaps(kv_cache, self._watch, self._stream)

    @torch.inference_mode()
    def _capture(self, max_num_seqs: int, max_captured_tokens: int) -> None:
        device = self._kv_cache.tensor.device
        graphs = StepGraphs(self._captured, max_num_seqs, max_captured_tokens)

        def padding(size: PaddedSize) -> StepTensors:
            torch.cuda.synchronize(device)  # the memory that is written may still be read
            ids = np.empty((max_num_seqs, 0), dtype=np.int32)
            return self._inputs.build(empty_step(), ids, self._params, padded=size)

        torch.cuda.synchronize(device)
        with torch.cuda.stream(self._stream):
            graphs.capture_common(padding)
        torch.cuda.synchronize(device)
        self._graphs = graphs

    def run(self, step: ScheduledStep, token_ids: NDArray[np.int32]) -> Sampled:
        """What step.sample_rows chose; launch() and collect()."""
        return self.collect(self.launch(step, token_ids))

    @torch.inference_mode()
    def launch(self, step: ScheduledStep, token_ids: NDArray[np.int32]) -> Launched:
        """Start a step. On a GPU it runs on from here by itself. At most one other is on its way.

        Args:
            token_ids: the slot table's [max_num_seqs, max_model_len]. Where one is PENDING, the
                step before chooses it.
        """
        for admitted in (*step.admitted, *step.forked):
            request = admitted.request
            self._params.set(
                admitted.slot, request.sampling_params, request.seed, request.num_candidates
            )
            self._edits.set(admitted.slot, LogitRules.of(request, self._vocab_size))
            num_wanted = request.sampling_params.prompt_logprobs
            self._num_prompt_logprobs[admitted.slot] = -1 if num_wanted is None else num_wanted
            self._prompt_lens[admitted.slot] = request.prompt_len
        on_stream = (
            contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        )
        with on_stream, self._swaps.around(step, lambda: self._inputs.written_blocks(step)):
            if step.copies.size:  # may read what has come in
                self._kv_cache.copy_blocks(torch.from_numpy(step.copies))
            launched = self._try(step, token_ids, self._graphs)
            return self._in_parts(step, token_ids) if launched is None else launched

    def _try(
        self, step: ScheduledStep, token_ids: NDArray[np.int32], graphs: StepGraphs | None
    ) -> Launched | None:
        """None: the device's memory does not suffice, and nothing has happened but that the step's
        K/V may have been written, as they will be again.
        """
        try:
            return self._compute(step, token_ids, graphs)
        except BaseException as error:
            self._inputs.forget()
            self._edits.forget()
            if not (isinstance(error, RuntimeError) and is_out_of_memory(error)):
                raise
            logger.warning(
                "step %d: %d tokens of %d requests do not fit: %s",
                step.step_id,
                step.num_tokens,
                step.slots.size,
                str(error).partition(". ")[0],
            )
        # Outside the handler: there the error keeps alive what was computed so far.
        if self._stream is not None:
            self._stream.synchronize()  # pinned arrays of this and the step before may be written
        return None

    def _in_parts(self, step: ScheduledStep, token_ids: NDArray[np.int32]) -> Launched:
        """The step kernel by kernel, in as many parts as it takes; waits for each."""

        def run(part: ScheduledStep) -> Launched | None:
            launched = self._try(part, token_ids, None)
            if launched is None or self._stream is None:
                return launched
            self._stream.synchronize()
            logits = launched.logits
            return dataclasses.replace(launched, logits=None if logits is None else logits.cpu())

        done, unfit = run_in_parts(step, run)
        params = self._wanted(step)
        tokens = join_samples(step, [(part, one.token_ids) for part, one in done], nothing=-1)
        logits = [(part, one.logits) for part, one in done if one.logits is not None]
        scores = join_scores([(part, one.prompt_scores) for part, one in done])
        kept = join_samples(step, logits) if logits else None
        return Launched(tokens, kept, params, None, None, scores, unfit)

    def _compute(
        self, step: ScheduledStep, token_ids: NDArray[np.int32], graphs: StepGraphs | None
    ) -> Launched:
        params = self._wanted(step)
        padded = None
        has_rules = bool(self._edits.has_rules[step.slots].any())
        if not has_rules:
            self._edits.forget()
        if graphs is not None and not self._scores_prompts(step):
            padded = graphs.sizes.of(step)
        tensors = self._inputs.build(step, token_ids, self._params, padded=padded)
        prefilling = None
        if graphs is not None and padded is not None:
            num_samples = step.sample_rows.size
            chooses = params is None and not has_rules
            graph, result = graphs.graph_for(tensors, chooses=chooses)
            begin = self._watch.mark()
            graph.replay()
            if padded.max_query_len > 1:
                prefilling = step.num_tokens, Span(begin, self._watch.mark())
            # The next run of a graph writes where the logits are.
            logits = None if params is None else result[:num_samples].clone()
            chosen = result if chooses else self._choose(result, step, tensors, token_ids)
            return self._launched(chosen[:num_samples], logits, params, prefilling)
        begin = self._watch.mark()
        hidden = self._hidden(tensors)
        if tensors.attn_metadata.max_query_len > 1:
            prefilling = step.num_tokens, Span(begin, self._watch.mark())
        prompt_scores = self._prompt_scores(step, tensors, hidden, token_ids)
        logits = None
        chosen = torch.empty(0, dtype=torch.int64)
        if step.sample_rows.size:
            logits = self._logits(hidden[tensors.logit_rows])
            chosen = self._choose(logits, step, tensors, token_ids)
        launched = self._launched(chosen, None if params is None else logits, params, prefilling)
        return dataclasses.replace(launched, prompt_scores=prompt_scores)

    def _wanted(self, step: ScheduledStep) -> SlotParams | None:
        """Of the rows that sample, where any wants more than its token."""
        slots = step.slots[step.sample_rows]
        if not self._params.wants_more[slots].any():
            return None
        return self._params.rows(slots, step.sample_draws)

    def _launched(
        self,
        chosen: torch.Tensor,
        logits: torch.Tensor | None,
        params: SlotParams | None,
        prefilling: tuple[int, Span] | None,
    ) -> Launched:
        done = None
        if self._stream is not None:
            chosen = chosen.to("cpu", non_blocking=True)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
        return Launched(chosen, logits, params, done, prefilling)

    def _captured(self, tensors: StepTensors, chooses: bool) -> torch.Tensor:
        """A step from its inputs to its tokens, or to its logits where the choice needs more than
        the inputs: what a CUDA graph holds."""
        hidden = self._hidden(tensors)
        if tensors.attn_metadata.max_query_len > 1:
            hidden = hidden[tensors.logit_rows]
        logits = self._logits(hidden)
        return self._keep(choose(logits, tensors.draws), tensors) if chooses else logits

    def _hidden(self, tensors: StepTensors) -> torch.Tensor:
        self._inputs.advance(tensors)
        return self._model.forward(
            tensors.input_ids, tensors.positions, self._layers, tensors.attn_metadata
        )

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        # Rows of the embedding beyond the tokenizer's vocabulary are padding, never a token.
        return self._model.compute_logits(hidden)[:, : self._vocab_size]

    def _keep(self, chosen: torch.Tensor, tensors: StepTensors) -> torch.Tensor:
        """For the next step. A row that has failed goes on with a token that is thrown away."""
        self._inputs.state.latest.index_copy_(0, tensors.sample_slots, chosen.clamp(min=0))
        return chosen

    @torch.inference_mode()
    def collect(self, launched: Launched) -> Sampled:
        """Wait for a step and take what it chose. Steps are collected in the order of launching."""
        if launched.done is not None:
            launched.done.synchronize()
        for num_bytes, seconds in self._swaps.ended():
            self.meter.swapped(num_bytes, seconds)
        if launched.prefilling is not None:
            num_tokens, span = launched.prefilling
            self.meter.prefilled(num_tokens, span.seconds())
        failed = launched.token_ids.numpy() < 0
        chosen = np.maximum(launched.token_ids.numpy(), 0)
        sampled = Sampled(
            chosen, failed, None, prompt_scores=launched.prompt_scores, unfit=launched.unfit
        )
        if launched.logits is None or launched.params is None:
            return sampled
        try:
            return self._scored(sampled, launched.logits, launched.params)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        # Outside the handler: there the error keeps alive what was computed so far.
        return self._scored(sampled, launched.logits.cpu(), launched.params)

    def _scored(self, sampled: Sampled, logits: torch.Tensor, params: SlotParams) -> Sampled:
        """With what is wanted beside the tokens."""
        best = best_candidates(logits, params)
        return sampled._replace(
            logprobs=chosen_logprobs(logits, params, sampled.token_ids),
            candidates=None if best is None else Candidates(*best),
            scores=self._scores(logits, params, sampled.token_ids),
        )

    @staticmethod
    def _scores(
        logits: torch.Tensor, params: SlotParams, chosen: NDArray[np.int64]
    ) -> TokenScores | None:
        wanted = np.flatnonzero(params.num_logprobs >= 0)
        if wanted.size == 0:
            return None
        num_top = int(params.num_logprobs[wanted].max())
        rows = logits[torch.from_numpy(wanted).to(logits.device)]
        scores = score_tokens(rows, wanted, chosen[wanted], num_top)
        return scores._replace(num_tops=params.num_logprobs[wanted])

    def _scores_prompts(self, step: ScheduledStep) -> bool:
        """Whether tokens of the step's prompts may be wanted with their logprobs."""
        if step.num_tokens == step.slots.size:
            return False
        return bool((self._num_prompt_logprobs[step.slots] >= 0).any())

    def _prompt_scores(
        self,
        step: ScheduledStep,
        tensors: StepTensors,
        hidden: torch.Tensor,
        token_ids: NDArray[np.int32],
    ) -> list[tuple[TokenScores, int]]:
        """Of the tokens of prompts that follow those of this step, where they are wanted. A few at
        a time: their logits are many times as large as their hidden states.
        """
        begins = np.cumsum(step.query_lens) - step.query_lens
        found = []
        for row in np.flatnonzero(self._num_prompt_logprobs[step.slots] >= 0).tolist():
            slot = int(step.slots[row])
            first = int(tensors.row_lens[row] - step.query_lens[row]) + 1
            end = min(int(tensors.row_lens[row]) + 1, int(self._prompt_lens[slot]))
            for at in range(first, end, _SCORED_AT_ONCE):
                count = min(end - at, _SCORED_AT_ONCE)
                place = int(begins[row]) + at - first
                scores = score_tokens(
                    self._logits(hidden[place : place + count]),
                    np.full(count, row, dtype=np.int64),
                    token_ids[slot, at : at + count].astype(np.int64),
                    int(self._num_prompt_logprobs[slot]),
                )
                found.append((scores, at))
        return found

    def _choose(
        self,
        logits: torch.Tensor,
        step: ScheduledStep,
        tensors: StepTensors,
        token_ids: NDArray[np.int32],
    ) -> torch.Tensor:
        """int64 [logits.shape[0]], -1 where a row has failed. Last of what may lack memory: a step
        that is tried again reads the tokens that this replaces.
        """
        slots = step.slots[step.sample_rows]
        lens = tensors.row_lens[step.sample_rows].astype(np.int64)
        logits = call_functions(logits, self._edits.rows_with_functions(slots, lens, token_ids))
        latest, num_rows = self._inputs.state.latest, logits.shape[0]
        edits = self._edits.advance(slots, lens, token_ids, latest, num_rows)
        return self._keep(choose(logits, tensors.draws, edits), tensors)
