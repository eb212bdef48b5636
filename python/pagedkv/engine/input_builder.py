"""A scheduled step as the tensors of one forward pass. One C++ call writes the tables; the rest is
a fixed number of array operations, whatever the number of sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from pagedkv.block_manager import BlockManager, StepTables
from pagedkv.config import SchedulerConfig
from pagedkv.models import AttentionMetadata
from pagedkv.records import ScheduledStep


@dataclass(frozen=True, slots=True, eq=False)
class StepTensors:
    """input_ids, positions int64 [num_tokens]; logit_rows int64 [num_samples], the token whose
    hidden state gives each sampled row's logits; sample_positions int64 [num_samples], the index in
    its sequence of the token to be sampled.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    attn_metadata: AttentionMetadata
    logit_rows: torch.Tensor
    sample_positions: NDArray[np.int64]


class InputBuilder:
    """Owner of the step buffers. What build() returns is valid until the next build().

    block_tables has one row per slot, kept between steps and written only where it changed; a step
    gathers its rows from it.
    """

    def __init__(
        self, manager: BlockManager, config: SchedulerConfig, *, max_model_len: int
    ) -> None:
        self._block_size = manager.block_size
        max_num_blocks = -(-max_model_len // manager.block_size)
        num_seqs, num_tokens = config.max_num_seqs, config.max_num_batched_tokens
        self._tables = StepTables(manager, num_seqs, max_num_blocks)
        self._block_tables = np.zeros((num_seqs, max_num_blocks), dtype=np.int32)
        self._slot_mapping = np.zeros(num_tokens, dtype=np.int64)
        self._positions = np.zeros(num_tokens, dtype=np.int64)
        self._seq_lens = np.zeros(num_seqs, dtype=np.int32)
        self._query_start_loc = np.zeros(num_seqs + 1, dtype=np.int32)

    def build(self, step: ScheduledStep, token_ids: NDArray[np.int32]) -> StepTensors:
        """Args: token_ids: the slot table's [max_num_seqs, max_model_len]."""
        num_tokens = self._tables.write(
            step.seq_ids,
            step.query_lens,
            step.slots,
            block_tables=self._block_tables,
            slot_mapping=self._slot_mapping,
            positions=self._positions,
            seq_lens=self._seq_lens,
            query_start_loc=self._query_start_loc,
            only_changed=True,
        )
        num_rows = step.slots.size
        positions = self._positions[:num_tokens]
        seq_lens = self._seq_lens[:num_rows]
        query_start_loc = self._query_start_loc[: num_rows + 1]
        width = -(-int(seq_lens.max()) // self._block_size)
        input_ids = token_ids[np.repeat(step.slots, step.query_lens), positions].astype(np.int64)
        metadata = AttentionMetadata(
            block_tables=torch.from_numpy(self._block_tables[step.slots, :width]),
            seq_lens=torch.from_numpy(seq_lens),
            query_start_loc=torch.from_numpy(query_start_loc),
            slot_mapping=torch.from_numpy(self._slot_mapping[:num_tokens]),
            max_query_len=int(step.query_lens.max()),
        )
        return StepTensors(
            input_ids=torch.from_numpy(input_ids),
            positions=torch.from_numpy(positions),
            attn_metadata=metadata,
            logit_rows=torch.from_numpy(query_start_loc[step.sample_rows + 1].astype(np.int64) - 1),
            sample_positions=seq_lens[step.sample_rows].astype(np.int64),
        )
