"""A run of jobs in the replay simulator: the real scheduler on a paged or a contiguous manager,
with step times that are modelled. Nothing is recorded before; jobs are the events.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from claims import h200
from claims.systems import System
from claims.waste import Waste, Wasted
from claims.workloads import MAX_MODEL_LEN, Job
from pagedkv.block_manager import BlockManager
from pagedkv.config import CacheConfig, SchedulerConfig
from pagedkv.records import FinishReason, RunFacts, ScheduledStep
from pagedkv.replay.driving import Drive
from pagedkv.replay.metrics import Metrics, measure
from pagedkv.replay.recording import Abort, Arrival, Event, Fork, Step
from pagedkv.replay.sources import Answers
from pagedkv.replay.step_times import StepTimes
from pagedkv.replay.work import StepWork
from pagedkv.request import Request
from pagedkv.sampling_params import SamplingParams
from pagedkv.scheduler import Rates, Scheduler


@dataclass(frozen=True, slots=True)
class Setting:
    """Everything of a run but its system and its jobs. pool_tokens: as much memory for each."""

    pool_tokens: int
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_model_len: int = MAX_MODEL_LEN
    enable_prefix_caching: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """waste: of each step with its seconds, while somebody waited for room, and in all.
    latencies_s: of a request, over its output's tokens.
    """

    metrics: Metrics
    waste: Wasted
    over_time: list[tuple[float, Wasted]]
    per_token_s: float
    mean_running: float
    refused: list[tuple[str, str]] = field(default_factory=list)


class _Jobs:
    """A Source of pagedkv.replay: every job ends with its output's length, whatever its tokens."""

    def __init__(self, jobs: Sequence[Job], system: System, setting: Setting) -> None:
        self._times: StepTimes = h200.step_times(setting.block_size)
        self.events: Sequence[Event] = [
            Arrival(job.time_s, 0, [], _request(i, job, system, setting), str(i))
            for i, job in enumerate(jobs)
        ]

    def request(self, arrival: Arrival) -> Request:
        return arrival.request

    def aborted_id(self, abort: Abort) -> str:
        return abort.key

    def begin(self, now_s: float) -> float:
        return now_s

    def wakes(self, event: Event) -> float:
        return event.time_s

    def is_due(self, event: Event, begin_s: float) -> bool:
        return event.time_s <= begin_s

    def forks_due(self, key: str) -> list[Fork]:
        return []

    def rates(self, begin_s: float) -> Rates:
        return Rates()

    def answers(self, scheduler: Scheduler, step: ScheduledStep, keys: list[str]) -> Answers:
        count = step.sample_rows.size
        return Answers(np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.bool_), None)

    def cuts(self, keys: list[str]) -> list[tuple[str, FinishReason]]:
        return []

    def end(self, begin_s: float, work: StepWork) -> float:
        return begin_s + self._times.seconds(work)


def _request(i: int, job: Job, system: System, setting: Setting) -> Request:
    salt = None
    if system.policy is not None:
        lens = job.prompt.size, job.output_len, job.n, setting.max_model_len
        salt = system.salt(str(i), *lens)
    params = SamplingParams(temperature=1, n=job.n, max_tokens=job.output_len, ignore_eos=True)
    return Request(str(i), job.prompt, job.output_len, sampling_params=params, cache_salt=salt)


def simulate(system: System, jobs: Sequence[Job], setting: Setting) -> Outcome:
    """Run all jobs to their ends."""
    num_blocks = setting.pool_tokens // setting.block_size
    facts: RunFacts = h200.facts(num_blocks, setting.max_model_len)
    cache = CacheConfig(
        block_size=setting.block_size,
        num_gpu_blocks_override=num_blocks,
        enable_prefix_caching=setting.enable_prefix_caching,
    )
    config = SchedulerConfig(
        max_num_seqs=setting.max_num_seqs,
        max_num_batched_tokens=setting.max_num_batched_tokens,
        preemption_mode="recompute",
    )
    source = _Jobs(jobs, system, setting)
    built: list[tuple[BlockManager, Scheduler]] = []

    def build(*arguments: object) -> tuple[BlockManager, Scheduler]:
        built.append(system.build(*arguments))  # type: ignore[arg-type]
        return built[0]

    drive = Drive(source, cache, config, facts, build=build)
    (manager, scheduler), totals = built[0], {str(i): _total(job) for i, job in enumerate(jobs)}
    watch = Waste(manager, scheduler, totals, is_paged=system.policy is None)
    ends: dict[str, float] = {}
    running: list[tuple[float, int]] = []

    def steps() -> Iterator[Step]:
        for step in drive.steps():
            watch.look(step.end_s, step.seconds)
            running.append((step.seconds, scheduler.num_running))
            ends.update((key, step.end_s) for key, _, _ in step.ends)
            yield step

    metrics = measure(source.events, steps(), setting.block_size)
    manager.check_invariants()
    assert manager.statistics().num_sequences == 0, "sequences are left"
    took = [(ends[str(i)] - job.time_s) / job.output_len for i, job in enumerate(jobs)]
    seconds = sum(one for one, _ in running)
    return Outcome(
        metrics,
        watch.mean(),
        watch.over_time(),
        float(np.mean(took)),
        sum(one * count for one, count in running) / seconds,
        drive.refused,
    )


def _total(job: Job) -> int:
    """Tokens whose K/V it has at its end."""
    return int(job.prompt.size) + job.output_len - 1
