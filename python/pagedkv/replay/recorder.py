"""Writes a run as it happens: an observer of an engine (Engine.observe).

A line is whole or is the last: whatever stops the process leaves a file that loads. An error of the
recording ends the recording, is logged once, and never reaches the engine.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from pagedkv.block_manager import BlockManager
from pagedkv.config import EngineConfig
from pagedkv.records import Candidates, DecisionKind, FinishedRequest, RunFacts, ScheduledStep
from pagedkv.replay import lines
from pagedkv.replay.token_names import PlainIds, Pseudonyms, TokenNames
from pagedkv.replay.work import work_of
from pagedkv.request import Request
from pagedkv.scheduler import Rates, SlotTable

logger = logging.getLogger(__name__)

Method = TypeVar("Method", bound=Callable[..., None])


def _harmless(method: Method) -> Method:
    """Nothing once the recording has ended; an error ends it."""

    @functools.wraps(method)
    def guarded(self: Recorder, *args: Any) -> None:
        if not self.is_open:
            return
        try:
            method(self, *args)
        except Exception as error:
            self._drop()
            logger.error(
                "the recording %s ends here, the run goes on: %s: %s",
                self.path,
                type(error).__name__,
                error,
                exc_info=not isinstance(error, OSError),
            )

    return cast(Method, guarded)


class Recorder:
    """One file of one run.

    Args:
        path: of the file, which must not exist yet. Only its owner may read it.
        keep_token_ids: write token ids as they are, instead of keyed pseudonyms.

    Raises:
        OSError: it cannot be made, or exists.

    Example::

        engine.observe(Recorder("run.jsonl"))
    """

    def __init__(self, path: str | os.PathLike[str], *, keep_token_ids: bool = False) -> None:
        self.path = Path(path)
        try:
            number = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            raise FileExistsError(
                f"{self.path} exists already: a recording is never written over another file"
            ) from None
        self._file = open(number, "wb")  # noqa: SIM115 - it stays open as long as the run
        self.is_open = True
        self._is_plain = keep_token_ids
        self._names: TokenNames = PlainIds() if keep_token_ids else Pseudonyms()
        self._salts: dict[str, str] = {}
        self._at: dict[int, Request] = {}  # slot -> the request that holds it, or held it last
        self._notes: list[dict[str, Any]] = []  # since the last line
        self._step: dict[str, Any] = {}  # the line of the step that runs
        self._zero_s = 0.0
        self._window = 0

    def close(self) -> None:
        """End the recording. What happens later is not written."""
        self.is_open = False
        self._file.close()

    # -- what the engine tells -----------------------------------------------------------

    def begins(self, config: EngineConfig, facts: RunFacts, time_s: float) -> None:
        """Raises OSError: the first line cannot be written."""
        self._zero_s, self._window = time_s, facts.window
        self._write(lines.header(config, facts, is_plain=self._is_plain))

    @_harmless
    def noted(
        self, request: Request, kind: DecisionKind, num_step: int, numbers: dict[str, Any]
    ) -> None:
        self._notes.append(lines.note_line(request, kind, num_step, numbers))

    @_harmless
    def added(self, request: Request, time_s: float) -> None:
        salt = request.cache_salt
        if salt is not None:
            salt = self._salts.setdefault(salt, f"salt {len(self._salts) + 1}")
        prompt, stop_ids = self._names.prompt(request), self._names.stop_ids(request)
        self._write_event("added", time_s, lines.request_line(request, prompt, stop_ids, salt))

    @_harmless
    def aborted(self, request_id: str, time_s: float) -> None:
        self._write_event("aborted", time_s, {"request_id": request_id})

    @_harmless
    def forked(
        self,
        request_id: str,
        fork_ids: list[str],
        num_generated: int,
        max_tokens: int,
        time_s: float,
    ) -> None:
        facts = {
            "request_id": request_id,
            "fork_ids": fork_ids,
            "num_generated": num_generated,
            "max_tokens": max_tokens,
        }
        self._write_event("forked", time_s, facts)

    @_harmless
    def cache_reset(self, time_s: float) -> None:
        self._write_event("cache_reset", time_s, {})

    @_harmless
    def sampled(
        self,
        step: ScheduledStep,
        table: SlotTable,
        rates: Rates,
        token_ids: NDArray[np.int64],
        failed: NDArray[np.bool_],
        candidates: Candidates | None,
    ) -> None:
        self._begin_step(step, table, rates)
        slots = step.slots[step.sample_rows].tolist()
        names = []
        # A row without usable logits has no token, whatever stands there.
        for slot, token_id in zip(slots, np.where(failed, 0, token_ids).tolist(), strict=True):
            known = table.token_ids[slot, : table.num_tokens[slot]]
            names += self._names.next_ids(slot, self._at[slot], known, [token_id])
        self._step["token_ids"] = names
        self._step["failed"] = np.flatnonzero(failed).tolist()
        if candidates is not None:
            self._step["candidates"] = self._candidates(slots, table, candidates)

    @_harmless
    def step_failed(self, step: ScheduledStep, table: SlotTable, rates: Rates, error: str) -> None:
        self._begin_step(step, table, rates)
        self._step |= {"token_ids": [], "failed": [], "failure": error}

    @_harmless
    def step_ended(
        self,
        manager: BlockManager,
        stopped: list[str],
        ended: list[FinishedRequest],
        begin_s: float,
        end_s: float,
    ) -> None:
        self._write(
            {
                "kind": "step",
                "start": self._since(begin_s),
                "seconds": round(end_s - begin_s, 7),
                **self._step,
                "stopped": stopped,
                "ended": lines.ended_lines(ended),
                "statistics": lines.counters(manager),
                "notes": self._take_notes(),
            }
        )

    # -- parts ---------------------------------------------------------------------------

    def _begin_step(self, step: ScheduledStep, table: SlotTable, rates: Rates) -> None:
        for one in (*step.admitted, *step.forked):
            self._at[one.slot] = one.request
            self._names.forget_slot(one.slot)
        self._step = {
            "step": lines.plain(step),
            "rates": lines.plain(rates),
            "work": lines.plain(work_of(step, table, self._window)),
        }

    def _candidates(
        self, slots: list[int], table: SlotTable, candidates: Candidates
    ) -> dict[str, Any]:
        """A beam is told from the others by its mark. No probability: null, since JSON has no
        infinity.
        """
        marks, names = [], []
        for i, token_ids in zip(
            candidates.samples.tolist(), candidates.token_ids.tolist(), strict=True
        ):
            slot, request = slots[i], self._at[slots[i]]
            known = table.token_ids[slot, : table.num_tokens[slot]]
            marks.append(self._names.mark(slot, request, known))
            names.append(self._names.next_ids(slot, request, known, token_ids))
        logprobs = [
            [one if math.isfinite(one) else None for one in row]
            for row in candidates.logprobs.tolist()
        ]
        return {
            "samples": candidates.samples.tolist(),
            "marks": marks,
            "token_ids": names,
            "logprobs": logprobs,
        }

    def _since(self, time_s: float) -> float:
        return round(time_s - self._zero_s, 7)

    def _take_notes(self) -> list[dict[str, Any]]:
        taken, self._notes = self._notes, []
        return taken

    def _write_event(self, kind: str, time_s: float, facts: dict[str, Any]) -> None:
        time = self._since(time_s)
        self._write({"kind": kind, "time": time, **facts, "notes": self._take_notes()})

    def _write(self, line: dict[str, Any]) -> None:
        text = json.dumps(line, separators=(",", ":"), allow_nan=False)
        self._file.write(text.encode() + b"\n")
        self._file.flush()

    def _drop(self) -> None:
        """End it although what is buffered may not be writable any more."""
        with contextlib.suppress(OSError, ValueError):
            self.close()
