"""What a step costs the CPU beside the model: schedule, tables and input tensors, update.

A fake model: every row gets a token at once, drawn before. Steady decode: num_seqs sequences run,
each step adds a token to each, and in every step some of them take a block, since their prompts
differ in length. 1,024 requests more wait, as under load: for a slot, or for blocks. Thresholds:
256 sequences 0.5 ms a step in all, 1,024 sequences 1.0 ms; flat means that a sequence costs at
4,096 at most 1.2 times what it costs at 1,024. Each size runs NUM_RUNS times, sizes in turn; the
median over the steps of the quietest run counts, since what other processes do to the caches is no
cost of the scheduler's. The mean over all steps of all runs stands beside it.
"""

from __future__ import annotations

import statistics
import sys
import time

import numpy as np

import rows
from pagedkv.block_manager import BlockManager
from pagedkv.config import SchedulerConfig
from pagedkv.engine.input_builder import InputBuilder
from pagedkv.request import Request
from pagedkv.sampling import SlotParams
from pagedkv.scheduler import Scheduler

BLOCK_SIZE = 16
PROMPT_LEN = 256
NUM_STEPS = 200
NUM_WAITING = 1024
LIMITS_US = {256: 500.0, 1024: 1000.0}
NUM_RUNS = 7
FLAT = 1.2
CASES = (("slots", 64), ("slots", 256), ("slots", 1024), ("slots", 4096), ("blocks", 256))


def measure(num_seqs: int, *, lacking: str) -> dict[str, list[float]]:
    """Microseconds of each part in each of NUM_STEPS steps, while NUM_WAITING requests wait.

    Args:
        lacking: slots: max_num_seqs run. blocks: there are slots, but those that wait are large.
    """
    source = np.random.default_rng(0)
    blocks_per_seq = (PROMPT_LEN + NUM_STEPS + 64) // BLOCK_SIZE
    num_blocks = num_seqs * blocks_per_seq
    max_model_len = 1024 if lacking == "slots" else num_blocks * BLOCK_SIZE
    manager = BlockManager(num_blocks, BLOCK_SIZE, shuffle_seed=0)
    config = SchedulerConfig(
        max_num_seqs=num_seqs + (16 if lacking == "blocks" else 0),
        max_num_batched_tokens=2 * num_seqs * PROMPT_LEN,  # all prompts in the first step
        scheduling_policy="priority",
    )
    scheduler = Scheduler(manager, config, max_model_len=max_model_len)
    inputs = InputBuilder(manager, config, max_model_len=max_model_len)
    params = SlotParams(config.max_num_seqs)

    def prompt_of(length: int) -> np.ndarray:
        return source.integers(0, 30_000, length, dtype=np.int32)

    for i in range(num_seqs):
        prompt = prompt_of(PROMPT_LEN - int(source.integers(BLOCK_SIZE)))
        scheduler.add(Request(f"runs {i}", prompt, 2 * NUM_STEPS, stop_token_ids=(31_000,)))
    times: dict[str, list[float]] = {"schedule": [], "tables": [], "update": [], "in all": []}
    for number in range(NUM_STEPS + 1):
        begin = time.perf_counter()
        step = scheduler.schedule()
        scheduled = time.perf_counter()
        assert step is not None
        assert step.slots.size == num_seqs
        inputs.advance(inputs.build(step, scheduler.slots.token_ids, params))
        built = time.perf_counter()
        token_ids = source.integers(0, 30_000, num_seqs)
        ready = time.perf_counter()
        ended = scheduler.update(step, token_ids)
        end = time.perf_counter()
        assert not ended
        assert not step.preempted
        if number == 0:
            too_long = BLOCK_SIZE * manager.num_allocatable_blocks + 1
            prompt = prompt_of(PROMPT_LEN if lacking == "slots" else too_long)
            for i in range(NUM_WAITING):
                scheduler.add(Request(f"waits {i}", prompt, 2))
            continue
        assert step.num_tokens == num_seqs
        parts = (scheduled - begin, built - scheduled, end - ready)
        for name, seconds in zip(times, (*parts, sum(parts)), strict=True):
            times[name].append(seconds * 1e6)
    manager.check_invariants()
    scheduler.check_invariants()
    assert scheduler.num_waiting == NUM_WAITING
    return times


def main() -> int:
    options = rows.parser(__doc__.splitlines()[0]).parse_args()
    made: list[rows.Row] = []
    per_seq: dict[int, float] = {}
    measure(64, lacking="slots")  # warm-up
    all_runs: dict[tuple[str, int], list[dict[str, list[float]]]] = {case: [] for case in CASES}
    for _ in range(NUM_RUNS):
        for lacking, num_seqs in CASES:
            all_runs[lacking, num_seqs].append(measure(num_seqs, lacking=lacking))
    for (lacking, num_seqs), runs in all_runs.items():
        for name in runs[0]:
            us = min(statistics.median(run[name]) for run in runs)
            mean = statistics.mean([one for run in runs for one in run[name]])
            rate, limit, holds = f"mean {mean:.0f} us", "", True
            if name == "in all":
                rate = f"{us / num_seqs:.3f} us per sequence, {rate}"
                if lacking == "slots":
                    per_seq[num_seqs] = us / num_seqs
                if num_seqs in LIMITS_US:
                    limit, holds = f"<= {LIMITS_US[num_seqs]:.0f} us", us <= LIMITS_US[num_seqs]
                elif num_seqs == 4096:
                    flat = FLAT * per_seq[1024]
                    limit = f"<= {flat:.3f} us per sequence, {FLAT} times that of 1024"
                    holds = per_seq[4096] <= flat
            shape = f"{num_seqs} sequences, {NUM_WAITING} wait for {lacking}"
            made.append(rows.Row(name, shape, us, rate, limit=limit, holds=holds))
    return rows.report("scheduler", made, save=options.save)


if __name__ == "__main__":
    sys.exit(main())
