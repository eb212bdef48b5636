"""What the device keeps of the running sequences from step to step, and the inputs that it makes of
that for each step. The host holds an image of it and sends the words that a step changes, in one
copy; what follows from the step before, the device works out by itself (op advance_step).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from pagedkv import ops
from pagedkv.block_manager import StepState
from pagedkv.engine.packed_copy import PackedCopy
from pagedkv.sampling import RowTensors, SlotParams

# Words that a step may change before its copy takes memory of its own, for each sequence.
_USUAL_CHANGES = 64
# Sizes of steps whose views are kept: to make a dozen of them costs more than all else of inputs().
_MAX_SIZES = 256


class StepInputs(NamedTuple):
    """Where advance() writes: views of memory that stays, so those of equal sizes are the same.
    tokens int64 [3, num_tokens] and its rows; block_tables int32 [num_rows, max_num_blocks],
    seq_lens int32 [num_rows]; samples int64 [6, num_samples], filters, inverse_temperatures as
    advance_step has them, and what of them is the choice's. slots, query_start_loc,
    sample_start_loc: of the state, by row.
    """

    tokens: torch.Tensor
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    samples: torch.Tensor
    filters: torch.Tensor
    inverse_temperatures: torch.Tensor
    slots: torch.Tensor
    query_start_loc: torch.Tensor
    sample_start_loc: torch.Tensor
    input_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    logit_rows: torch.Tensor
    sample_slots: torch.Tensor
    draws: RowTensors


class DeviceState:
    """Owner of the state, of its image, and of the inputs. A step is update(), prefix_groups() and
    send() on the host, then advance() on the device, perhaps in a CUDA graph. Whoever does not get
    that far calls forget(): nothing is certain then, and all is sent again.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_num_tokens: int,
        max_num_blocks: int,
        block_size: int,
        device: torch.device,
    ) -> None:
        self._image = StepState(max_num_seqs, max_num_blocks, block_size)
        self._block_size = block_size
        self._max_num_seqs = max_num_seqs
        # int32 [max_num_seqs, max_num_blocks] by slot: who has the sequences writes them here.
        self.block_tables = self._image.image[: max_num_seqs * max_num_blocks].reshape(
            max_num_seqs, max_num_blocks
        )
        words = self._image.image.size
        self._words = torch.zeros(words, dtype=torch.int32, device=device)
        self._copy = PackedCopy(4 * max_num_tokens + 12 * _USUAL_CHANGES * max_num_seqs, device)
        self._token_ids = self._copy.usual(torch.int32, max_num_tokens)
        # By slot, the token that was chosen last, and one for padding.
        self.latest = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=device)
        self._tokens = torch.zeros(3, max_num_tokens, dtype=torch.int64, device=device)
        self._block_tables = torch.zeros(
            max_num_seqs, max_num_blocks, dtype=torch.int32, device=device
        )
        self._seq_lens = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)
        self._drawn = _sample_inputs(max_num_seqs, device)
        self._by_row = [
            self._section(name) for name in ("slots", "query_start_loc", "sample_start_loc")
        ]
        self._prefix_groups = self._section("prefix_groups").view(-1, 3)
        self._advance = (
            self._section("counts"),
            self._section("tables").view(max_num_seqs, max_num_blocks),
            self._section("draws"),
            self._section("params").view(max_num_seqs, -1),
        )
        self._lens = self._section("lens")
        self._views: dict[tuple[int, int, int], StepInputs] = {}

    def _section(self, name: str) -> torch.Tensor:
        begin, size = self._image.section(name)
        return self._words[begin : begin + size]

    @property
    def num_bytes_sent(self) -> int:
        """By all steps so far."""
        return self._copy.num_bytes_sent

    def update(
        self,
        slots: NDArray[np.int64],
        query_lens: NDArray[np.int64],
        seq_lens: NDArray[np.generic],
        first_written: NDArray[np.generic],
        sample_rows: NDArray[np.int64],
        sample_draws: NDArray[np.int64],
        params: SlotParams,
        token_ids: NDArray[np.int32],
        padded: tuple[int, int] | None,
    ) -> None:
        """The next step, as StepState.update() has it. padded: its tokens and rows with padding."""
        self._image.update(
            slots,
            query_lens,
            seq_lens,
            first_written,
            sample_rows,
            sample_draws,
            params.words,
            token_ids,
            padded,
        )

    def prefix_groups(self, groups: NDArray[np.int32], num_groups: int) -> torch.Tensor:
        """The step's groups of a shared prefix, int32 [num_groups, 3] or as many as there can be,
        empty entries last.
        """
        there = self._prefix_groups[:num_groups]
        told = np.zeros(there.shape, dtype=np.int32)
        told[: len(groups)] = groups
        self._image.tell("prefix_groups", told.reshape(-1))
        return there

    def send(self) -> None:
        """Take to the device what the step changes."""
        token_ids, indices, values = self._image.take()
        copied = self._copy.send(token_ids, indices, values)
        if copied is None:
            return
        ids, at, words = copied
        if ids.data_ptr() != self._token_ids.data_ptr():  # a step that is larger than usual
            self._token_ids[: ids.numel()].copy_(ids)
        if at.numel():
            self._words.index_copy_(0, at, words)

    def inputs(self, num_tokens: int, num_samples: int, num_rows: int) -> StepInputs:
        """Where a step of this size finds its inputs."""
        size = num_tokens, num_samples, num_rows
        if size not in self._views:
            if len(self._views) >= _MAX_SIZES:
                self._views.clear()
            self._views[size] = self._view(*size)
        return self._views[size]

    def _view(self, num_tokens: int, num_samples: int, num_rows: int) -> StepInputs:
        samples, filters, inverse_temperatures = self._drawn
        if num_samples > self._max_num_seqs:  # prompts with several answers
            samples, filters, inverse_temperatures = _sample_inputs(num_samples, samples.device)
        tokens, samples = self._tokens[:, :num_tokens], samples[:, :num_samples]
        filters, inverse_temperatures = filters[:, :num_samples], inverse_temperatures[:num_samples]
        logit_rows, sample_slots, top_k, seeds, sampled_at, draws = samples.unbind()
        top_p, min_p = filters.unbind()
        input_ids, positions, slot_mapping = tokens.unbind()
        slots, query_start_loc, sample_start_loc = self._by_row
        return StepInputs(
            tokens,
            self._block_tables[:num_rows],
            self._seq_lens[:num_rows],
            samples,
            filters,
            inverse_temperatures,
            slots[:num_rows],
            query_start_loc[: num_rows + 1],
            sample_start_loc[: num_rows + 1],
            input_ids,
            positions,
            slot_mapping,
            logit_rows,
            sample_slots,
            RowTensors(inverse_temperatures, top_k, top_p, min_p, seeds, sampled_at, draws),
        )

    def advance(self, inputs: StepInputs) -> None:
        """Write them, and count the step: once for each update()."""
        counts, tables, draws, params = self._advance
        ops.advance_step(
            self._lens,
            inputs.tokens,
            inputs.block_tables,
            inputs.seq_lens,
            inputs.samples,
            inputs.filters,
            inputs.inverse_temperatures,
            counts,
            inputs.slots,
            inputs.query_start_loc,
            inputs.sample_start_loc,
            tables,
            draws,
            params,
            self.latest,
            self._token_ids,
            block_size=self._block_size,
        )

    def forget(self) -> None:
        """All words are zero again, here and there. Who writes the block tables forgets too."""
        self._image.forget()
        self._words.zero_()


def _sample_inputs(
    num_samples: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """samples, filters, inverse_temperatures of advance_step."""
    return (
        torch.zeros(6, num_samples, dtype=torch.int64, device=device),
        torch.zeros(2, num_samples, dtype=torch.float64, device=device),
        torch.zeros(num_samples, dtype=torch.float32, device=device),
    )
