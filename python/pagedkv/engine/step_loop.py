"""The engine's steps: schedule, launch, collect, update, text; pipelined where asked for: the next
step is scheduled and launched while one runs, and its results are waited for after that.

A step that could not be planned ahead is scheduled when the one before it has ended.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagedkv.block_manager import BlockManager
from pagedkv.engine.model_runner import Launched, ModelRunner
from pagedkv.engine.observer import NoObserver, RunObserver, StepWatcher
from pagedkv.engine.output_processor import OutputProcessor
from pagedkv.engine.step_times import StepTimes
from pagedkv.records import (
    FinishedRequest,
    OutputDelta,
    RequestOutput,
    ScheduledStep,
    StepResult,
)
from pagedkv.request import Request
from pagedkv.scheduler import Rates, Scheduler

logger = logging.getLogger(__name__)

OUT_OF_MEMORY = (
    "the device's memory does not suffice for its part of a step even alone: lower "
    "max_num_batched_tokens or gpu_memory_utilization"
)


@dataclass(frozen=True, slots=True, eq=False)
class _Flight:
    """A step that was scheduled: on its way, or why it could not be launched."""

    step: ScheduledStep
    rates: Rates
    begin_s: float
    launched: Launched | BaseException

    @property
    def is_whole(self) -> bool:
        """Whether all its rows are on their way."""
        return isinstance(self.launched, Launched) and not self.launched.unfit


class StepLoop:
    """Owner of the step that is on its way between two calls of step(): at most one."""

    def __init__(
        self,
        manager: BlockManager,
        scheduler: Scheduler,
        runner: ModelRunner,
        outputs: OutputProcessor,
        clock: Callable[[], float],
        *,
        is_pipelined: bool,
    ) -> None:
        self._manager = manager
        self._scheduler = scheduler
        self._runner = runner
        self._outputs = outputs
        self._clock = clock
        self._is_pipelined = is_pipelined
        self._flight: _Flight | None = None
        self._settled = StepResult([], [])
        self.observer: RunObserver | NoObserver = NoObserver()
        self.watchers: list[StepWatcher] = []
        self.times = StepTimes()

    @property
    def has_results(self) -> bool:
        """Whether a step is on its way, or one that has ended has something to tell."""
        return bool(self._flight or self._settled.deltas or self._settled.finished)

    def step(self) -> StepResult:
        """One step's results, and those of steps that were settled before it."""
        flight = self._flight or self._launch(self._scheduler.schedule)
        self._flight = None
        if flight is not None:
            is_pipelined = self._is_pipelined and isinstance(self.observer, NoObserver)
            if is_pipelined and flight.is_whole:
                self._flight = self._launch(self._scheduler.schedule_ahead)
            self._keep(self._land(flight))
        if not self._scheduler.has_work:
            self.settle()  # what is left has rows of requests that have ended
        result, self._settled = self._settled, StepResult([], [])
        return result

    def settle(self) -> None:
        """Wait for the step that is on its way; its results come with the next step()."""
        flight, self._flight = self._flight, None
        if flight is not None:
            self._keep(self._land(flight))

    def _keep(self, result: StepResult) -> None:
        self._settled = StepResult(
            self._settled.deltas + result.deltas, self._settled.finished + result.finished
        )

    def _launch(self, schedule: Callable[[], ScheduledStep | None]) -> _Flight | None:
        begin_s = self._clock()
        self.times.start()
        rates = self._scheduler.rates = self._runner.meter.rates
        step = schedule()
        self.times.lap("schedule")
        if step is None:
            return None
        for one in step.preempted:
            logger.info(
                "preempted %r: the step needed %d blocks, %d were available; %s (%s)",
                one.request_id,
                one.num_blocks_needed,
                one.num_blocks_available,
                "swapped out" if one.choice.swaps else "will be computed again",
                one.choice.why,
            )
        self._outputs.admit((*step.admitted, *step.forked))
        launched: Launched | BaseException
        try:
            launched = self._runner.launch(step, self._scheduler.slots.token_ids)
        except BaseException as error:
            launched = error  # told when the steps before it have ended
        self.times.lap("launch")
        return _Flight(step, rates, begin_s, launched)

    def _land(self, flight: _Flight) -> StepResult:
        """Wait for a step and pass on what it chose."""
        step, table = flight.step, self._scheduler.slots
        self.times.start()
        try:
            if isinstance(flight.launched, BaseException):
                raise flight.launched
            sampled = self._runner.collect(flight.launched)
            self.times.lap("wait")
            if sampled.unfit and not isinstance(self.observer, NoObserver):
                # A recording has failed steps and failed samples, and a chunk may have no sample.
                raise MemoryError(OUT_OF_MEMORY)
        except BaseException as error:
            text = "interrupted"
            if isinstance(error, Exception):
                logger.exception("step %d failed; its requests end", step.step_id)
                text = f"the step failed: {type(error).__name__}: {error}"
            self.observer.step_failed(step, table, flight.rates, text)
            ended = self._scheduler.fail(step, text)
            self._ended(flight, [], ended)
            result = self._collect([], ended)
            if isinstance(error, Exception):
                return result
            raise
        ended = self._scheduler.fail_rows(step, sampled.unfit, OUT_OF_MEMORY)
        self.observer.sampled(
            step, table, flight.rates, sampled.token_ids, sampled.failed, sampled.candidates
        )
        self._outputs.logprobs.take(step, sampled, self._scheduler)
        ended += self._scheduler.update(
            step, sampled.token_ids, sampled.failed, sampled.logprobs, sampled.candidates
        )
        stopped: list[str] = []
        deltas: list[OutputDelta] = []
        for request, token_id in self._new_tokens(step, sampled.token_ids):
            delta, has_stop = self._outputs.push(request, token_id)
            if delta is not None:
                deltas.append(delta)
            if has_stop:
                ended += self._scheduler.finish(request.request_id, "stop")
                stopped.append(request.request_id)
        result = self._collect(deltas, ended)
        self._ended(flight, stopped, ended)
        self.times.lap("update")
        return result

    def _ended(self, flight: _Flight, stopped: list[str], ended: list[FinishedRequest]) -> None:
        end_s = self._clock()
        self.observer.step_ended(self._manager, stopped, ended, flight.begin_s, end_s)
        for watcher in self.watchers:
            watcher.landed(flight.step, ended, flight.begin_s, end_s)

    def _new_tokens(
        self, step: ScheduledStep, token_ids: NDArray[np.int64]
    ) -> list[tuple[Request, int]]:
        """What the step has added to watched requests that go on."""
        slots = step.slots[step.sample_rows]
        seq_ids = step.seq_ids[step.sample_rows]
        news = []
        for i in self._outputs.watched(slots).tolist():
            request = self._scheduler.request_at(int(slots[i]))
            is_same = self._scheduler.slots.seq_ids[slots[i]] == seq_ids[i]
            if request is not None and is_same and request.draw == step.sample_draws[i]:
                news.append((request, int(token_ids[i])))
        news += [
            (request, token_id)
            for request, token_id in self._scheduler.take_first_tokens()
            if self._outputs.is_watched(request.request_id)
            and request.request_id in self._scheduler
        ]
        return news

    def _collect(self, deltas: list[OutputDelta], ended: list[FinishedRequest]) -> StepResult:
        outputs: list[RequestOutput] = []
        for finished in ended:
            delta, output = self._outputs.finish(finished)
            if delta is not None:
                deltas.append(delta)
            if output is not None:
                outputs.append(output)
        return StepResult(deltas, outputs)
