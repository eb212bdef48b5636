"""A scheduled step as the tensors of one forward pass and of the draws behind it. One C++ call
writes the tables, one copy takes everything to the device; the rest is a fixed number of array
operations, whatever the number of sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from pagedkv.block_manager import BlockManager, StepTables
from pagedkv.config import SchedulerConfig
from pagedkv.engine.step_arrays import StepArrays
from pagedkv.models import AttentionMetadata
from pagedkv.records import ScheduledStep
from pagedkv.sampling import RowTensors, SlotParams, uniform

# Bytes of a step's arrays: for each token, sampled row, sequence; and for aligning each of them.
_PER_TOKEN, _PER_SAMPLE, _PER_SEQ, _ALIGNING = 3 * 8, 8 + 4 + 3 * 8, 2 * 4, 11 * 16 + 4


@dataclass(frozen=True, slots=True, eq=False)
class StepTensors:
    """input_ids, positions int64 [num_tokens]; logit_rows int64 [num_samples], the token whose
    hidden state gives each sampled row's logits; draws: how each of them is drawn. On the model's
    device. sample_positions int64 [num_samples], the index in its sequence of the token to be
    sampled.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    attn_metadata: AttentionMetadata
    logit_rows: torch.Tensor
    draws: RowTensors
    sample_positions: NDArray[np.int64]


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
    ) -> None:
        self._block_size = manager.block_size
        max_num_blocks = -(-max_model_len // manager.block_size)
        num_seqs, num_tokens = config.max_num_seqs, config.max_num_batched_tokens
        self._tables = StepTables(manager, num_seqs, max_num_blocks)
        self._block_tables = np.zeros((num_seqs, max_num_blocks), dtype=np.int32)
        self._arrays = StepArrays(
            _num_bytes(num_tokens, num_seqs, num_seqs, max_num_blocks), torch.device(device)
        )

    def build(
        self, step: ScheduledStep, token_ids: NDArray[np.int32], params: SlotParams
    ) -> StepTensors:
        """The step on the device.

        Args:
            token_ids: the slot table's [max_num_seqs, max_model_len].
            params: of the rows that sample, in their order.
        """
        take = self._arrays.take
        num_tokens, num_rows, num_samples = step.num_tokens, step.slots.size, step.sample_rows.size
        longest = self._block_tables.shape[1]
        self._arrays.begin(_num_bytes(num_tokens, num_samples, num_rows, longest))
        ids, input_ids = take(np.int64, num_tokens)
        places, positions = take(np.int64, num_tokens)
        slots, slot_mapping = take(np.int64, num_tokens)
        lens, seq_lens = take(np.int32, num_rows)
        starts, query_start_loc = take(np.int32, num_rows + 1)
        self._tables.write(
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
        ids[:] = token_ids[np.repeat(step.slots, step.query_lens), places]
        last, logit_rows = take(np.int64, num_samples)
        last[:] = starts[step.sample_rows + 1] - 1
        sample_positions = lens[step.sample_rows].astype(np.int64)
        draws = self._draws(params, sample_positions)
        width = -(-int(lens.max()) // self._block_size)
        rows, block_tables = take(np.int32, num_rows, width)
        rows[:] = self._block_tables[step.slots, :width]
        self._arrays.send()
        return StepTensors(
            input_ids=input_ids,
            positions=positions,
            attn_metadata=AttentionMetadata(
                block_tables=block_tables,
                seq_lens=seq_lens,
                query_start_loc=query_start_loc,
                slot_mapping=slot_mapping,
                max_query_len=int(step.query_lens.max()),
            ),
            logit_rows=logit_rows,
            draws=draws,
            sample_positions=sample_positions,
        )

    def _draws(self, params: SlotParams, positions: NDArray[np.int64]) -> RowTensors:
        take, count = self._arrays.take, positions.size
        inverse, inverse_temperatures = take(np.float32, count)
        is_drawn = params.temperature > 0
        inverse[:] = np.divide(1.0, params.temperature, out=np.zeros(count), where=is_drawn)
        ks, top_k = take(np.int64, count)
        ks[:] = params.top_k
        ps, top_p = take(np.float64, count)
        ps[:] = params.top_p
        draws, numbers = take(np.float64, count)
        draws[:] = uniform(params.seeds, positions, params.draws)
        return RowTensors(inverse_temperatures, top_k, top_p, numbers)


def _num_bytes(num_tokens: int, num_samples: int, num_seqs: int, num_blocks: int) -> int:
    """Of the arrays of a step, at most."""
    per_seq = _PER_SEQ + 4 * num_blocks
    return _PER_TOKEN * num_tokens + _PER_SAMPLE * num_samples + per_seq * num_seqs + _ALIGNING
