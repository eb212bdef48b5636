"""The edits of logits of the running sequences, kept on the device from step to step: the token
that a row chose last is counted there, before the host knows it (op advance_edits). So a step with
penalties is launched ahead like any other, and in steady decode nothing is sent.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from pagedkv import ops
from pagedkv.records import PENDING
from pagedkv.sampling.edits import EditTensors, RuledRow, edits_of
from pagedkv.sampling.logit_rules import LogitRules

_ROOM = 32  # tokens that a list can take before its place is given out anew
# A row as advance_edits has it.
_ROW = np.dtype(
    [
        ("source", np.int32),
        ("source_len", np.int32),
        ("slot", np.int32),
        ("repetition", np.float32),
        ("frequency", np.float64),
        ("presence", np.float64),
    ]
)
_NO_EDITS = np.array([(0, 0, -1, 1.0, 0.0, 0.0)], dtype=_ROW)


class _Samples(NamedTuple):
    """Operands of EditLists.advance()."""

    slots: NDArray[np.int64]
    lens: NDArray[np.int64]
    token_ids: NDArray[np.int32]


class _Layout(NamedTuple):
    """Where the lists of a batch are and what they come from: as advance_edits has it, on the
    device.
    """

    num_edits: int
    start_loc: torch.Tensor
    is_limited: torch.Tensor
    rows: torch.Tensor
    sent: torch.Tensor


class EditLists:
    """Owner of the rules by slot, and of the lists of the last step whose samples had any.

    A list goes on if the slot had one in that step, of one token less; otherwise it is made anew of
    the tokens that the host knows. In either case the one that it does not know, the slot's latest,
    is counted on the device. Whoever does not get to draw from what advance() returns calls
    forget().
    """

    def __init__(self, max_num_seqs: int, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._rules: list[LogitRules | None] = [None] * max_num_seqs
        # By slot. has_rules: whether there are any. Of those: _params, a row but for its source and
        # slot; _goes_on: whether the next list can be made of one; _counts: whether tokens are
        # counted in it; _grows: whether these are put in; _lifted_at as LogitRules.
        self.has_rules = np.zeros(max_num_seqs, dtype=np.bool_)
        self._has_functions = np.zeros(max_num_seqs, dtype=np.bool_)
        self._is_limited = np.zeros(max_num_seqs, dtype=np.bool_)
        self._goes_on = np.zeros(max_num_seqs, dtype=np.bool_)
        self._counts = np.zeros(max_num_seqs, dtype=np.bool_)
        self._grows = np.zeros(max_num_seqs, dtype=np.bool_)
        self._lifted_at = np.zeros(max_num_seqs, dtype=np.int64)
        self._params = np.zeros(max_num_seqs, dtype=_ROW)
        # By slot, of the last step: where its list begins, -1: nowhere; its entries, how many of
        # them may have an id, and tokens of the sequence.
        self._begins = np.full(max_num_seqs, -1, dtype=np.int64)
        self._sizes = np.zeros(max_num_seqs, dtype=np.int64)
        self._used = np.zeros(max_num_seqs, dtype=np.int64)
        self._num_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        # Of the last step: slots of its samples, its layout, and whether this is its own source.
        self._slots = np.empty(0, dtype=np.int64)
        self._layout: _Layout | None = None
        self._is_steady = False
        self._ids, self._entry_counts, self._values = _no_entries(self._device)
        self.num_bytes_sent = 0  # by all steps so far

    def set(self, slot: int, rules: LogitRules | None) -> None:
        """A sequence got the slot."""
        self._rules[slot] = rules
        self.has_rules[slot] = rules is not None
        self._begins[slot] = -1
        self._slots = self._slots[:0]  # what it had there must go, too
        if rules is None:
            return
        params = rules.params
        self._has_functions[slot] = bool(rules.processors)
        self._is_limited[slot] = rules.allowed_ids.size > 0
        self._goes_on[slot] = not rules.processors and not rules.bad_behind
        self._counts[slot] = params.has_penalties and not rules.processors
        self._grows[slot] = self._counts[slot] and not self._is_limited[slot]
        self._lifted_at[slot] = rules.lifted_at
        self._params["repetition"][slot] = params.repetition_penalty
        self._params["frequency"][slot] = params.frequency_penalty
        self._params["presence"][slot] = params.presence_penalty

    def forget(self) -> None:
        """Nothing is certain of what is on the device, or nobody needs it."""
        if self._layout is not None:
            self._begins[:] = -1
            self._layout = None
            self._ids, self._entry_counts, self._values = _no_entries(self._device)

    def rows_with_functions(
        self, slots: NDArray[np.int64], lens: NDArray[np.int64], token_ids: NDArray[np.int32]
    ) -> list[RuledRow]:
        """Samples whose logits functions of the caller's change; operands as of advance()."""
        samples = _Samples(slots, lens, token_ids)
        return [
            self._row(row, samples)
            for row in np.flatnonzero(self.has_rules[slots] & self._has_functions[slots]).tolist()
        ]

    def advance(
        self,
        slots: NDArray[np.int64],
        lens: NDArray[np.int64],
        token_ids: NDArray[np.int32],
        latest: torch.Tensor,
        num_rows: int,
    ) -> EditTensors | None:
        """The edits of a step's samples; None: there are none. Those of a row with functions are
        those behind them: call_functions() has made the others.

        Args:
            slots: [num_samples], of each sample.
            lens: [num_samples]: tokens of its sequence.
            token_ids: the slot table's [max_num_seqs, max_model_len].
            latest: int64 [num_slots], on the device: the token that each slot got last, for those
                that are PENDING and for lists that go on.
            num_rows: of the logits, padding included.
        """
        ruled = np.flatnonzero(self.has_rules[slots])
        if ruled.size == 0:
            return None
        own = slots[ruled]
        goes_on = (
            self._goes_on[own]
            & (self._begins[own] >= 0)
            & (self._num_tokens[own] + 1 == lens[ruled])
            & (self._lifted_at[own] != lens[ruled])
        )
        fits = self._used[own] + self._grows[own] <= self._sizes[own]
        is_same = (
            bool((goes_on & fits).all())
            and self._layout is not None
            and self._layout.is_limited.numel() == num_rows
            and np.array_equal(slots, self._slots)
        )
        if is_same and self._is_steady:
            self._used[own] += self._grows[own]
        elif is_same:
            self._stay(ruled, own, num_rows)
        else:
            self._move(ruled, _Samples(slots, lens, token_ids), goes_on, num_rows)
        self._is_steady = is_same
        self._slots = slots
        self._num_tokens[slots] = lens
        return self._advanced(latest)

    def _stay(self, ruled: NDArray[np.int64], own: NDArray[np.int64], num_rows: int) -> None:
        """Each list becomes the next one at its own place: so it does until one lacks room."""
        rows = np.repeat(_NO_EDITS, num_rows)
        rows[ruled] = self._params[own]
        rows["source"][ruled] = self._begins[own]
        rows["source_len"][ruled] = self._sizes[own]
        rows["slot"][ruled] = np.where(self._counts[own], own, -1)
        self._used[own] += self._grows[own]
        self._send(ruled, own, rows, self._sizes[own], np.empty((0, 3), dtype=np.int32))

    def _move(
        self,
        ruled: NDArray[np.int64],
        samples: _Samples,
        goes_on: NDArray[np.bool_],
        num_rows: int,
    ) -> None:
        """All lists get new places, with room; those that do not go on are made of what the host
        knows.
        """
        own = samples.slots[ruled]
        rows = np.repeat(_NO_EDITS, num_rows)
        rows[ruled] = self._params[own]
        rows["source"][ruled] = self._begins[own]
        rows["source_len"][ruled] = self._used[own]
        has_token = self._counts[own] & goes_on
        sent, num_sent = [np.empty((0, 3), dtype=np.int32)], 0
        for i in np.flatnonzero(~goes_on).tolist():
            one = self._row(int(ruled[i]), samples)
            edits = edits_of(one, before=not self._has_functions[own[i]])
            rows["source"][one.row], rows["source_len"][one.row] = -1 - num_sent, edits.ids.size
            has_token[i] = self._counts[own[i]] and one.token_ids[-1] == PENDING
            sent.append(np.stack([edits.ids, edits.counts, edits.bias.view(np.int32)], axis=1))
            num_sent += edits.ids.size
        rows["slot"][ruled] = np.where(has_token, own, -1)
        used = rows["source_len"][ruled] + (has_token & self._grows[own])
        self._used[own] = used
        sizes = used + _ROOM * (self._grows[own] & self._goes_on[own])
        self._send(ruled, own, rows, sizes, np.concatenate(sent))

    def _send(
        self,
        ruled: NDArray[np.int64],
        own: NDArray[np.int64],
        rows: NDArray[np.void],
        sizes: NDArray[np.int64],
        sent: NDArray[np.int32],
    ) -> None:
        """To the device in one copy, which nobody waits for."""
        num_rows = rows.size
        start_loc = np.zeros(num_rows + 1, dtype=np.int32)
        start_loc[ruled + 1] = sizes
        start_loc = np.cumsum(start_loc, dtype=np.int32)
        is_limited = np.zeros(num_rows, dtype=np.int32)
        is_limited[ruled] = self._is_limited[own]
        self._begins[:] = -1
        self._begins[own] = start_loc[ruled]
        # Which of a prompt's answers the slot goes on with, the host knows.
        self._begins[own[1:][own[1:] == own[:-1]]] = -1
        self._sizes[own] = sizes
        # The rows first: they are read by 8 bytes.
        parts = rows.view(np.int32), sent.reshape(-1), start_loc, is_limited
        counts = [one.size for one in parts]
        # torch keeps pinned memory as it is until the copy that reads it has ended.
        packed = torch.empty(sum(counts), dtype=torch.int32, pin_memory=self._device.type == "cuda")
        np.concatenate(parts, out=packed.numpy())
        self.num_bytes_sent += packed.numel() * packed.itemsize
        there = torch.split(packed.to(self._device, non_blocking=True), counts)
        self._layout = _Layout(
            int(start_loc[-1]), there[2], there[3], there[0].view(-1, 8), there[1].view(-1, 3)
        )

    def _advanced(self, latest: torch.Tensor) -> EditTensors:
        layout = self._layout
        assert layout is not None
        ids, counts = torch.empty(2, layout.num_edits, dtype=torch.int32, device=self._device)
        values = torch.empty(layout.num_edits, 3, device=self._device)
        ops.advance_edits(
            ids,
            counts,
            values,
            layout.start_loc,
            layout.is_limited,
            layout.rows,
            latest,
            self._ids,
            self._entry_counts,
            self._values,
            layout.sent,
        )
        self._ids, self._entry_counts, self._values = ids, counts, values
        return EditTensors(layout.start_loc, ids, values, layout.is_limited)

    def _row(self, row: int, samples: _Samples) -> RuledRow:
        slot = samples.slots[row]
        rules = self._rules[int(slot)]
        assert rules is not None
        return RuledRow(row, rules, samples.token_ids[slot, : samples.lens[row]])


def _no_entries(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """ids, counts, values of advance_edits."""
    ids, counts = torch.empty(2, 0, dtype=torch.int32, device=device)
    return ids, counts, torch.empty(0, 3, device=device)
