"""A recorded run beside the same requests under other settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pagedkv.config import CacheConfig, SchedulerConfig, unknown_option
from pagedkv.records import RunFacts
from pagedkv.replay.checking import first_difference
from pagedkv.replay.driving import Drive
from pagedkv.replay.metrics import Metrics, measure
from pagedkv.replay.modelled import AsModelled
from pagedkv.replay.recording import Recording, RecordingError
from pagedkv.replay.step_times import StepTimes, fit

CACHE_OPTIONS = (
    "block_size",
    "num_gpu_blocks_override",
    "enable_prefix_caching",
    "watermark",
    "swap_space",
    "enable_kv_offloading",
)
SCHEDULER_OPTIONS = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "scheduling_policy",
    "preemption_mode",
)


@dataclass(frozen=True, slots=True)
class Settings:
    """What a run is driven under."""

    cache: CacheConfig
    scheduler: SchedulerConfig
    facts: RunFacts

    @property
    def bytes_per_block(self) -> int:
        return self.facts.bytes_per_token * self.cache.block_size

    def differences(self, other: Settings) -> list[str]:
        """`name was -> is` of every setting that other has otherwise."""
        mine, others = self._values(), other._values()
        return [
            f"{name} {mine[name]} -> {others[name]}" for name in mine if mine[name] != others[name]
        ]

    def _values(self) -> dict[str, Any]:
        sizes = {"num_blocks": self.facts.num_blocks, "num_cpu_blocks": self.facts.num_cpu_blocks}
        cache = {
            name: getattr(self.cache, name)
            for name in (
                "block_size",
                "enable_prefix_caching",
                "watermark",
                "enable_kv_offloading",
            )
        }
        return {
            **cache,
            **sizes,
            **{name: getattr(self.scheduler, name) for name in SCHEDULER_OPTIONS},
        }


@dataclass(frozen=True, slots=True)
class Played:
    """A modelled run. refused: (request, why) that its settings do not admit; largest: tokens of
    its largest step.
    """

    metrics: Metrics
    refused: tuple[tuple[str, str], ...]
    largest: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """difference: None, or where driving the run again under its own settings decided otherwise.
    modelled: the recorded settings under modelled times; changed: the new ones, None if there are
    none.
    """

    recording: Recording
    before: Settings
    after: Settings
    difference: str | None
    times: StepTimes
    recorded: Metrics
    modelled: Played
    changed: Played | None


def settings_of(recording: Recording) -> Settings:
    """As they were."""
    return Settings(recording.cache, recording.scheduler, recording.facts)


def changed_settings(settings: Settings, **options: Any) -> Settings:
    """Other settings, by the names of CACHE_OPTIONS and SCHEDULER_OPTIONS. Without
    num_gpu_blocks_override the pool keeps its bytes when block_size changes, and so does the CPU
    pool without swap_space.

    Raises:
        ValueError, TypeError: an option that is not one of them, or a value that is not allowed.
    """
    names = (*CACHE_OPTIONS, *SCHEDULER_OPTIONS)
    for name in options:
        if name not in names:
            raise ValueError(unknown_option(name, list(names)))
    facts, old = settings.facts, settings.cache
    in_cache = {name: options[name] for name in CACHE_OPTIONS if name in options}
    block_size = in_cache.get("block_size", old.block_size)
    # First of all, so that a bad value is named as the user wrote it.
    cache = dataclasses.replace(old, **({"kv_cache_memory_bytes": None} | in_cache))
    num_blocks = in_cache.get("num_gpu_blocks_override")
    if num_blocks is None:
        num_blocks = max(1, facts.num_blocks * old.block_size // block_size)
    if "swap_space" in options:
        num_bytes = int(cache.swap_space * 2**30)
        num_cpu_blocks = num_bytes // (facts.bytes_per_token * block_size)
        if num_bytes and not num_cpu_blocks:
            raise ValueError(
                f"swap_space is {cache.swap_space} GiB, but one block of {block_size} tokens takes "
                f"{facts.bytes_per_token * block_size} bytes"
            )
    else:
        num_cpu_blocks = facts.num_cpu_blocks * old.block_size // block_size
        if facts.num_cpu_blocks and not num_cpu_blocks:
            raise ValueError(
                f"the recorded CPU pool of {facts.num_cpu_blocks} blocks of {old.block_size} "
                f"tokens holds no block of {block_size}: give a swap_space"
            )
    in_scheduler = {name: options[name] for name in SCHEDULER_OPTIONS if name in options}
    return Settings(
        cache,
        dataclasses.replace(settings.scheduler, **in_scheduler),
        dataclasses.replace(facts, num_blocks=num_blocks, num_cpu_blocks=num_cpu_blocks),
    )


def compare(
    recording: Recording, after: Settings, *, on_step: Callable[[], None] = lambda: None
) -> Comparison:
    """Drive the recorded requests under their own settings and under others: twice as many steps as
    were recorded, or, where after differs, about three times. on_step is called behind each.

    Raises:
        RecordingError: a step of the recording lacks a number that is needed.
        ValueError: step times cannot be fitted to it.
    """
    before = settings_of(recording)
    has_changed = bool(before.differences(after))
    try:
        times = fit(recording, before.bytes_per_block)
        return Comparison(
            recording=recording,
            before=before,
            after=after,
            difference=first_difference(recording, on_step),
            times=times,
            recorded=measure(recording.events, recording.steps, before.cache.block_size),
            modelled=play(recording, before, times, on_step),
            changed=play(recording, after, times, on_step) if has_changed else None,
        )
    except (KeyError, TypeError, IndexError, ArithmeticError, AssertionError) as error:
        raise RecordingError(f"{recording.path}: a step is not whole: {error!r}") from error


def play(
    recording: Recording,
    settings: Settings,
    times: StepTimes,
    on_step: Callable[[], None] = lambda: None,
) -> Played:
    """The recorded requests under these settings, in modelled time."""
    times = dataclasses.replace(times, bytes_per_block=settings.bytes_per_block)
    has_priorities = settings.scheduler.scheduling_policy == "priority"
    source = AsModelled(recording, times, has_priorities=has_priorities)
    drive = Drive(source, settings.cache, settings.scheduler, settings.facts)
    steps = []
    for step in drive.steps():
        steps.append(step)
        on_step()
    return Played(
        measure(recording.events, steps, settings.cache.block_size),
        tuple(drive.refused),
        max((one.work.num_decode_rows + one.work.num_prefill_tokens for one in steps), default=0),
    )
