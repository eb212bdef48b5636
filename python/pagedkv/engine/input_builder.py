"""A scheduled step as the tensors of one forward pass and of the draws behind it. One C++ call
writes the tables, one finds what the device does not know, one copy takes that there; a step costs
a fixed number of calls, whatever the number of sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from pagedkv.block_manager import BlockManager, PrefixGrouper, StepTables
from pagedkv.config import SchedulerConfig
from pagedkv.engine.device_state import DeviceState, StepInputs
from pagedkv.models import AttentionMetadata
from pagedkv.records import ScheduledStep
from pagedkv.sampling import RowTensors, SlotParams


class PaddedSize(NamedTuple):
    """A step with rows of padding behind its own, which write nothing and read nothing: as many as
    there are up to num_rows, each with a token up to num_tokens, the last with all that are left.
    A row has a sample, padding all that are left. max_query_len: 1, or what no row exceeds.
    """

    num_tokens: int
    num_rows: int
    max_query_len: int


@dataclass(frozen=True, slots=True, eq=False)
class StepTensors:
    """On the model's device, written by InputBuilder.advance(): input_ids, positions int64
    [num_tokens]; logit_rows int64 [num_samples], the token whose hidden state gives each sampled
    row's logits; sample_slots int64 [num_samples]; draws: how each of them is drawn. inputs: the
    memory that all of them are views of.

    On the CPU: row_lens int32 [num_rows], tokens of each row's sequence, this step included.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    attn_metadata: AttentionMetadata
    logit_rows: torch.Tensor
    sample_slots: torch.Tensor
    draws: RowTensors
    inputs: StepInputs
    row_lens: NDArray[np.int32]


class InputBuilder:
    """Owner of the step's arrays and of the device's state. What build() returns is valid until the
    next build(); on a GPU the copy of a step must have ended before the next but one is built.
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
        self._tables = StepTables(manager, num_seqs, max_num_blocks)
        self.state = DeviceState(
            num_seqs, num_tokens, max_num_blocks, manager.block_size, torch.device(device)
        )
        # What one call writes: by token slot_mapping, positions; by row seq_lens, first_written.
        self._by_token = np.empty((2, num_tokens), dtype=np.int64)
        self._by_row = np.empty((2, num_seqs), dtype=np.int32)
        self._starts = np.empty(num_seqs + 1, dtype=np.int32)
        self._asked_tables: NDArray[np.int32] | None = None  # of written_blocks()

    def build(
        self,
        step: ScheduledStep,
        token_ids: NDArray[np.int32],
        params: SlotParams,
        *,
        padded: PaddedSize | None = None,
    ) -> StepTensors:
        """The step's state on the device, and where its tensors will be; advance() writes them.

        Args:
            token_ids: the slot table's [max_num_seqs, max_model_len].
            params: by slot.
            padded: of a step whose rows have one sample at most: how large it is made. The tensors
                of equal sizes are at equal addresses.
        """
        num_rows = step.slots.size
        lens, first_written = self._by_row[:, :num_rows]
        if num_rows:
            self._write(step, self.state.block_tables, first_written)
        self.state.update(
            step.slots,
            step.query_lens,
            lens,
            first_written,
            step.sample_rows,
            step.sample_draws,
            params,
            token_ids,
            None if padded is None else padded[:2],
        )
        size = step.num_tokens, step.sample_rows.size, num_rows
        max_query_len = int(step.query_lens.max(initial=1))
        if padded is not None:
            size = padded.num_tokens, padded.num_rows, padded.num_rows
            max_query_len = padded.max_query_len
        prefix_groups = None
        if self._grouper is not None and size[0] <= self._most_grouped:
            prefix_groups = self._groups(self._grouper, step, lens)
        self.state.send()
        inputs = self.state.inputs(*size)
        return StepTensors(
            input_ids=inputs.input_ids,
            positions=inputs.positions,
            attn_metadata=AttentionMetadata(
                block_tables=inputs.block_tables,
                seq_lens=inputs.seq_lens,
                query_start_loc=inputs.query_start_loc,
                slot_mapping=inputs.slot_mapping,
                max_query_len=max_query_len,
                prefix_groups=prefix_groups,
                workspace=self._workspace if prefix_groups is None else None,
            ),
            logit_rows=inputs.logit_rows,
            sample_slots=inputs.sample_slots,
            draws=inputs.draws,
            inputs=inputs,
            row_lens=lens,
        )

    def advance(self, tensors: StepTensors) -> None:
        """Write the tensors, on the device; once for each build()."""
        self.state.advance(tensors.inputs)

    def forget(self) -> None:
        """A build() was not followed by its advance(), or nobody knows: all is sent again."""
        self._tables.forget(self.state.block_tables)
        self.state.forget()

    def written_blocks(self, step: ScheduledStep) -> NDArray[np.int64]:
        """int64 [n], each once: the blocks of the pool that the step's tokens are written to."""
        if self._asked_tables is None:
            self._asked_tables = np.empty_like(self.state.block_tables)
        num_tokens = self._write(step, self._asked_tables, None)
        return np.unique(self._by_token[0, :num_tokens] // self._block_size)

    def _write(
        self,
        step: ScheduledStep,
        block_tables: NDArray[np.int32],
        first_written: NDArray[np.int32] | None,
    ) -> int:
        slot_mapping, positions = self._by_token
        return self._tables.write(
            step.seq_ids,
            step.query_lens,
            step.slots,
            block_tables=block_tables,
            slot_mapping=slot_mapping,
            positions=positions,
            seq_lens=self._by_row[0],
            query_start_loc=self._starts,
            only_changed=True,
            first_written=first_written,
        )

    def _groups(
        self, grouper: PrefixGrouper, step: ScheduledStep, seq_lens: NDArray[np.int32]
    ) -> torch.Tensor | None:
        """Decodes that share a prefix, if that pays. Empty entries fill them up to 1, 8, 64, ..: a
        graph is for one number of them, and kernels look at each.
        """
        if seq_lens.size < 2:
            return None
        found = grouper.find(self.state.block_tables, seq_lens, step.query_lens, step.slots)
        if not len(found):
            return None
        size = 1
        while size < len(found):
            size *= 8
        return self.state.prefix_groups(found, size)
