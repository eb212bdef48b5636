"""What penalties cost: steps of decodes on one GPU where no request, one, or all have a presence, a
frequency and a repetition penalty. Random weights; prompts of 600 tokens, so that lists are as long
as they are in use. Medians of steps in one process, taking turns.
"""

from __future__ import annotations

import random
import statistics
import sys
import time

import torch

import rows
from bench_short_steps import engine_of
from pagedkv import SamplingParams
from pagedkv.engine import Engine

PROMPT_LEN = 600
NUM_STEPS = 60
NUM_TIMES = 3
PENALTIES = {"presence_penalty": 0.3, "frequency_penalty": 0.2, "repetition_penalty": 1.1}


def step_us(engine: Engine, num_rows: int, num_penalised: int, turn: int) -> float:
    """Of steps of num_rows decodes."""
    source = random.Random(0)
    for i in range(num_rows):
        prompt = [source.randrange(10_000) for _ in range(PROMPT_LEN)]
        options = PENALTIES if i < num_penalised else {}
        params = SamplingParams(
            temperature=0.6, seed=i, max_tokens=NUM_STEPS + 60, ignore_eos=True, **options
        )
        engine.add_request(f"{turn}-{i}", prompt, params)
    while engine.num_waiting:
        engine.step()
    for _ in range(20):  # graphs that are not there yet are captured
        engine.step()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(NUM_STEPS):
        engine.step()
    seconds = time.perf_counter() - begin
    while engine.has_work:
        engine.step()
    return seconds * 1e6 / NUM_STEPS


def main() -> int:
    parser = rows.parser(__doc__ or "")
    parser.add_argument("--shapes", nargs="+", default=["Qwen3-0.6B", "Llama-3.1-8B"])
    parser.add_argument("--rows", nargs="+", type=int, default=[32, 256])
    args = parser.parse_args()
    found: list[rows.Row] = []
    for shape in args.shapes:
        engine = engine_of(shape, num_gpu_blocks_override=14_000, max_num_batched_tokens=8192)
        turn = 0
        for num_rows in args.rows:
            counts = {"none": 0, "one": 1, "all": num_rows}
            times: dict[str, list[float]] = {name: [] for name in counts}
            for _ in range(NUM_TIMES):
                for name, count in counts.items():
                    turn += 1
                    times[name].append(step_us(engine, num_rows, count, turn))
            plain = statistics.median(times["none"])
            for name, some in times.items():
                us = statistics.median(some)
                found.append(
                    rows.Row(
                        name=shape,
                        shape=f"{num_rows} decodes, penalties: {name}",
                        us=us,
                        rate=f"+{us - plain:.0f} us",
                        baseline=plain / us,
                    )
                )
        del engine
        torch.cuda.empty_cache()
    return rows.report("penalties", found, save=args.save)


if __name__ == "__main__":
    sys.exit(main())
