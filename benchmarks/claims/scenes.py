"""The moments of a paged cache's life that are worth a picture, each played on a live manager (the
beam search on the scheduler too) and kept as snapshots.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pagedkv.block_manager import BlockManager, Snapshot
from pagedkv.config import SchedulerConfig
from pagedkv.records import Candidates
from pagedkv.request import Request
from pagedkv.sampling_params import SamplingParams
from pagedkv.scheduler import Scheduler

BLOCK_SIZE = 4
NUM_BLOCKS = 16


@dataclass(frozen=True, slots=True)
class Moment:
    """A snapshot, what to say of it, and the sequences' names by seq_id."""

    title: str
    snapshot: Snapshot
    names: dict[int, str]


def _manager(num_cpu_blocks: int = 0) -> BlockManager:
    return BlockManager(
        NUM_BLOCKS, BLOCK_SIZE, watermark=0.0, num_cpu_blocks=num_cpu_blocks, shuffle_seed=3
    )


def tables() -> list[Moment]:
    """The pool is an array of blocks of one size; two requests' tables say which are theirs."""
    manager, names = _manager(), {0: "request A", 1: "request B"}
    moments = [Moment(f"The pool: {NUM_BLOCKS} blocks, all free", manager.snapshot(), names)]
    manager.allocate(0, list(range(10)))
    manager.allocate(1, list(range(50, 57)))
    manager.append(0, 4)
    title = "Two requests: 14 and 7 tokens. Their blocks lie anywhere, their tables give the order"
    return [*moments, Moment(title, manager.snapshot(), names)]


def shared_prefix() -> list[Moment]:
    """The second request finds the first one's full blocks in the prefix cache."""
    manager, names = _manager(), {0: "request A", 1: "request B"}
    prefix = list(range(8))
    manager.allocate(0, [*prefix, 20, 21])
    manager.publish(0, [], 10)
    first = Moment("A has computed a prefix of 8 tokens and 2 more", manager.snapshot(), names)
    found = manager.allocate(1, [*prefix, 30, 31, 32])
    title = f"B has the same prefix: {found} tokens found, 2 blocks have ref count 2"
    return [first, Moment(title, manager.snapshot(), names)]


def copy_on_write() -> list[Moment]:
    """A fork shares even the last block, until one of the two writes into it."""
    manager, names = _manager(), {0: "request A", 1: "fork of A"}
    manager.allocate(0, list(range(10)))
    manager.fork(0, 1)
    before = Moment("Before: the fork holds every block of A", manager.snapshot(), names)
    ((source, target),) = manager.append(1, 1)
    title = f"After the fork wrote a token: block {source} was copied to {target}, nothing else"
    return [before, Moment(title, manager.snapshot(), names)]


def beams(width: int = 3, num_steps: int = 9) -> list[Moment]:
    """A beam search as the scheduler runs it, with candidates drawn with a fixed seed."""
    manager = _manager()
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=32)
    scheduler = Scheduler(manager, config, max_model_len=64)
    params = SamplingParams(n=width, beam_width=width, temperature=0, max_tokens=num_steps + 1)
    prompt = np.arange(6, dtype=np.int32)
    scheduler.add(Request("search", prompt, num_steps + 1, sampling_params=params))
    source = np.random.default_rng(2)
    for _ in range(num_steps):
        step = scheduler.schedule()
        assert step is not None
        count = step.sample_rows.size
        ids = np.stack([source.permutation(50)[: 2 * width] for _ in range(count)])
        scores = -np.sort(source.exponential(1.5, (count, 2 * width)), axis=1)
        chosen = Candidates(np.arange(count), ids.astype(np.int64), scores)
        scheduler.update(step, np.zeros(count, dtype=np.int64), candidates=chosen)
    names = scheduler.names_by_seq_id()
    title = f"{width} beams after {num_steps} tokens: what they have in common is there once"
    return [Moment(title, manager.snapshot(), names)]


def swap() -> list[Moment]:
    """A preempted request's blocks go to the CPU pool and come back, to other places."""
    manager, names = _manager(num_cpu_blocks=8), {0: "request A", 1: "request B"}
    manager.allocate(0, list(range(10)))
    manager.allocate(1, list(range(50, 57)))
    moments = [Moment("Both run", manager.snapshot(), names)]
    out = manager.swap_out([0])
    title = f"A is swapped out: {len(out)} copies of whole blocks, and its table names CPU blocks"
    moments.append(Moment(title, manager.snapshot(), names))
    manager.append(1, 6)
    manager.swap_in([0])
    title = "A is back in other blocks (B has grown meanwhile); to the model nothing has changed"
    moments.append(Moment(title, manager.snapshot(), names))
    return moments


SCENES: dict[str, Callable[[], list[Moment]]] = {
    "tables": tables,
    "shared-prefix": shared_prefix,
    "copy-on-write": copy_on_write,
    "beams": beams,
    "swap": swap,
}
