"""A run of jobs in the replay simulator: the real scheduler on a paged or a contiguous manager,
with step times that are modelled. Nothing is recorded before; jobs are the events.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class Window:
    """What came out in the first seconds of a run. mean_running: sequences."""

    seconds: float
    num_tokens: int
    num_ended: int
    mean_running: float
    num_steps: int

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def requests_per_s(self) -> float:
        return self.num_ended / self.seconds


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


def open_run(
    system: System, jobs: Sequence[Job], setting: Setting
) -> tuple[Drive, Sequence[Event], BlockManager, Scheduler]:
    """A run that has not begun: its steps come one by one; job i is called str(i)."""
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

    def build(
        cache: CacheConfig, config: SchedulerConfig, facts: RunFacts
    ) -> tuple[BlockManager, Scheduler]:
        built.append(system.build(cache, config, facts))
        return built[0]

    drive = Drive(source, cache, config, facts, build=build)
    return drive, source.events, *built[0]


def simulate(
    system: System, jobs: Sequence[Job], setting: Setting, *, watches: bool = True
) -> Outcome:
    """Run all jobs to their ends. watches: look at the waste after each step."""
    drive, events, manager, scheduler = open_run(system, jobs, setting)
    totals = {str(i): _total(job) for i, job in enumerate(jobs)}
    watch = Waste(manager, scheduler, totals, is_paged=system.policy is None)
    ends: dict[str, float] = {}
    running: list[tuple[float, int]] = []

    def steps() -> Iterator[Step]:
        for step in drive.steps():
            if watches:
                watch.look(step.end_s, step.seconds)
            running.append((step.seconds, scheduler.num_running))
            ends.update((key, step.end_s) for key, _, _ in step.ends)
            yield step

    metrics = measure(events, steps(), setting.block_size)
    manager.check_invariants()
    assert manager.statistics().num_sequences == 0, "sequences are left"
    assert not drive.refused, drive.refused
    took = [(ends[str(i)] - job.time_s) / job.output_len for i, job in enumerate(jobs)]
    seconds = sum(one for one, _ in running)
    return Outcome(
        metrics,
        watch.mean(),
        watch.over_time(),
        float(np.mean(took)),
        sum(one * count for one, count in running) / seconds,
    )


def simulate_window(
    system: System, jobs: Sequence[Job], setting: Setting, seconds: float
) -> Window:
    """What comes out in the first seconds."""
    drive, _, _, scheduler = open_run(system, jobs, setting)
    num_tokens = num_ended = running = num_steps = 0
    for step in drive.steps():
        num_tokens += len(step.token_ids)
        num_ended += len(step.ends)
        running += scheduler.num_running
        num_steps += 1
        if step.end_s >= seconds:
            break
    return Window(step.end_s, num_tokens, num_ended, running / num_steps, num_steps)


def _total(job: Job) -> int:
    """Tokens whose K/V it has at its end."""
    return int(job.prompt.size) + job.output_len - 1
