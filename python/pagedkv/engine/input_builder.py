"""A scheduled step as the tensors of one forward pass and of the draws behind it. One C++ call
writes the tables, one copy takes everything to the device; the rest is a fixed number of array
operations, whatever the number of sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from pagedkv.block_manager import BlockManager, PrefixGrouper, StepTables
from pagedkv.config import SchedulerConfig
from pagedkv.engine.step_arrays import StepArrays
from pagedkv.models import AttentionMetadata
from pagedkv.records import PENDING, ScheduledStep
from pagedkv.sampling import RowTensors, SlotParams

# Bytes of a step's arrays: for each token, sampled row, sequence; and for aligning each of them.
_PER_TOKEN, _PER_SAMPLE, _PER_SEQ, _ALIGNING = 4 * 8, 2 * 8 + 4 + 6 * 8, 2 * 4, 17 * 16 + 4
_PER_GROUP = 3 * 4  # of two sequences at least


@dataclass(frozen=True, slots=True, eq=False)
class StepTensors:
    """On the model's device: input_ids, positions, token_slots int64 [num_tokens]; where an id is
    PENDING, the token that the step before chose for the slot stands for it. logit_rows int64
    [num_samples], the token whose hidden state gives each sampled row's logits; sample_slots int64
    [num_samples]; draws: how each of them is drawn. has_pending: whether any id is PENDING.

    On the CPU: sample_positions int64 [num_samples], the index in its sequence of the token to be
    sampled; row_lens int64 [num_rows], tokens of each row's sequence, this step included.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    token_slots: torch.Tensor
    attn_metadata: AttentionMetadata
    logit_rows: torch.Tensor
    sample_slots: torch.Tensor
    draws: RowTensors
    has_pending: bool
    sample_positions: NDArray[np.int64]
    row_lens: NDArray[np.int64]


class InputBuilder:
    """Owner of the step buffers. What build() returns is valid until the next build(); on a GPU the
    copy of a step must have ended before the next but one is built.

    block_tables has one row per slot, kept between steps and written only where it changed; a step
    gathers its rows from it.
    """

    def __init__(
        self,
        manager: BlockManager,
        config: SchedulerConfig,
        *,
        max_model_len: int,
        device: torch.device | str = "cpu",
        grouper: PrefixGrouper | None = None,
        workspace: torch.Tensor | None = None,
    ) -> None:
        """grouper: finds the decodes that attend to a shared prefix once; None: each alone.
        workspace: attention's, of steps without such groups; None: each layer takes its own.
        """
        self._grouper = grouper
        self._workspace = workspace
        # Tokens of a step whose decodes are grouped: attention then keeps states of all tokens, and
        # beside more of them the time of the decodes counts little.
        self._most_grouped = 2 * config.max_num_seqs
        self._block_size = manager.block_size
        max_num_blocks = -(-max_model_len // manager.block_size)
        num_seqs, num_tokens = config.max_num_seqs, config.max_num_batched_tokens
        self.max_num_blocks = max_num_blocks
        self._tables = StepTables(manager, num_seqs, max_num_blocks)
        self._block_tables = np.zeros((num_seqs, max_num_blocks), dtype=np.int32)
        self._arrays = StepArrays(
            _num_bytes(num_tokens, num_seqs, num_seqs, max_num_blocks), torch.device(device)
        )

    def build(
        self,
        step: ScheduledStep,
        token_ids: NDArray[np.int32],
        params: SlotParams,
        *,
        num_padded: int | None = None,
    ) -> StepTensors:
        """The step on the device.

        Args:
            token_ids: the slot table's [max_num_seqs, max_model_len].
            params: of the rows that sample, in their order.
            num_padded: of a step of decodes alone, which all sample: that many rows, those beyond
                the step's own being padding, which writes nothing and reads nothing. The tensors
                of equal num_padded are at equal addresses, but for the block tables.
        """
        take = self._arrays.take
        num_rows, num_samples = step.slots.size, step.sample_rows.size
        sizes = step.num_tokens, num_samples, num_rows
        if num_padded is not None:
            sizes = num_padded, num_padded, num_padded
        num_tokens, most_samples, most_rows = sizes
        self._arrays.begin(_num_bytes(*sizes, self._block_tables.shape[1]))
        ids, input_ids = take(np.int64, num_tokens)
        places, positions = take(np.int64, num_tokens)
        slots, slot_mapping = take(np.int64, num_tokens)
        owners, token_slots = take(np.int64, num_tokens)
        lens, seq_lens = take(np.int32, most_rows)
        starts, query_start_loc = take(np.int32, most_rows + 1)
        num_own = 0
        if num_rows:
            num_own = self._tables.write(
                step.seq_ids,
                step.query_lens,
                step.slots,
                block_tables=self._block_tables,
                slot_mapping=slots,
                positions=places,
                seq_lens=lens,
                query_start_loc=starts,
                only_changed=True,
            )
        owners[:num_own] = np.repeat(step.slots, step.query_lens)
        ids[:num_own] = token_ids[owners[:num_own], places[:num_own]]
        last, logit_rows = take(np.int64, most_samples)
        targets, sample_slots = take(np.int64, most_samples)
        if num_padded is not None or num_rows == 0:
            for array, nothing in ((ids, 0), (places, 0), (slots, -1), (owners, 0)):
                array[num_own:] = nothing
            lens[num_rows:] = 0
            starts[num_rows:] = np.arange(num_own, num_own + most_rows - num_rows + 1)
            last[num_samples:] = 0
            targets[num_samples:] = self._block_tables.shape[0]  # nobody's
        last[:num_samples] = starts[step.sample_rows + 1] - 1
        targets[:num_samples] = step.slots[step.sample_rows]
        sample_positions = lens[step.sample_rows].astype(np.int64)
        draws = self._draws(params, sample_positions, most_samples)
        prefix_groups = None
        if self._grouper is not None and num_tokens <= self._most_grouped:
            prefix_groups = self._groups(self._grouper, step, lens[:num_rows], most_rows)
        width = -(-int(lens.max(initial=0)) // self._block_size)
        rows, block_tables = take(np.int32, num_rows, width)
        rows[:] = self._block_tables[step.slots, :width]
        self._arrays.send()
        return StepTensors(
            input_ids=input_ids,
            positions=positions,
            token_slots=token_slots,
            attn_metadata=AttentionMetadata(
                block_tables=block_tables,
                seq_lens=seq_lens,
                query_start_loc=query_start_loc,
                slot_mapping=slot_mapping,
                max_query_len=int(step.query_lens.max(initial=1)),
                prefix_groups=prefix_groups,
                workspace=self._workspace if prefix_groups is None else None,
            ),
            logit_rows=logit_rows,
            sample_slots=sample_slots,
            draws=draws,
            has_pending=bool((ids == PENDING).any()),
            sample_positions=sample_positions,
            row_lens=lens[:num_rows].astype(np.int64),
        )

    def written_blocks(self, step: ScheduledStep) -> NDArray[np.int64]:
        """int64 [n], each once: the blocks of the pool that the step's tokens are written to."""
        slots = np.empty(step.num_tokens, dtype=np.int64)
        num_rows = step.slots.size
        self._tables.write(
            step.seq_ids,
            step.query_lens,
            step.slots,
            block_tables=self._block_tables,
            slot_mapping=slots,
            positions=np.empty_like(slots),
            seq_lens=np.empty(num_rows, dtype=np.int32),
            query_start_loc=np.empty(num_rows + 1, dtype=np.int32),
            only_changed=True,
        )
        return np.unique(slots // self._block_size)

    def _groups(
        self,
        grouper: PrefixGrouper,
        step: ScheduledStep,
        seq_lens: NDArray[np.generic],
        num_rows: int,
    ) -> torch.Tensor | None:
        """Decodes that share a prefix, if that pays; at an address that depends on num_rows alone.
        Empty entries fill them up to 1, 8, 64, ..: a graph is for one number of them, and kernels
        look at each.
        """
        groups, prefix_groups = self._arrays.take(np.int32, num_rows // 2, 3)
        if seq_lens.size < 2:
            return None
        found = grouper.find(self._block_tables, seq_lens, step.query_lens, step.slots)
        groups[: len(found)] = found
        groups[len(found) :] = 0
        size = 1
        while size < len(found):
            size *= 8
        return prefix_groups[:size] if len(found) else None

    def _draws(self, params: SlotParams, positions: NDArray[np.int64], num_rows: int) -> RowTensors:
        """Rows beyond those of params are greedy, whatever their other options are."""
        if not self._arrays.on_gpu and positions.size == num_rows:
            return RowTensors.of(params, positions)  # they are where they are read
        columns: tuple[tuple[type, NDArray[np.generic], float], ...] = (
            (np.float32, params.inverse_temperatures, 0),
            (np.int64, params.top_k, 0),
            (np.float64, params.top_p, 1),
            (np.float64, params.min_p, 0),
            (np.int64, params.seeds.view(np.int64), 0),
            (np.int64, positions, 0),
            (np.int64, params.draws, 0),
        )
        tensors = []
        for dtype, column, nothing in columns:
            array, tensor = self._arrays.take(dtype, num_rows)
            array[: positions.size] = column
            array[positions.size :] = nothing
            tensors.append(tensor)
        return RowTensors(*tensors)


def _num_bytes(num_tokens: int, num_samples: int, num_seqs: int, num_blocks: int) -> int:
    """Of the arrays of a step, at most."""
    per_seq = _PER_SEQ + 4 * num_blocks + _PER_GROUP // 2
    return _PER_TOKEN * num_tokens + _PER_SAMPLE * num_samples + per_seq * num_seqs + _ALIGNING
