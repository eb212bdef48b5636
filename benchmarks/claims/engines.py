"""An engine on each of the systems: the same model, kernels, graphs and scheduler; what differs is
the manager, and with it where a request's blocks are and when it may start.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

from claims.simulated import Window
from claims.step_tables import ContiguousTables
from claims.systems import System
from claims.workloads import Job
from pagedkv.config import EngineConfig
from pagedkv.engine import Engine
from pagedkv.engine.loading import LoadedModel
from pagedkv.sampling_params import SamplingParams


@contextmanager
def _built_for(system: System) -> Iterator[None]:
    """While an engine is made: it has no say in what its manager is."""
    if system.policy is None:
        yield
        return
    with (
        mock.patch("pagedkv.engine.engine.build_scheduler", system.build),
        mock.patch("pagedkv.engine.input_builder.StepTables", ContiguousTables),
    ):
        yield


def make_engine(system: System, loaded: LoadedModel, config: EngineConfig) -> Engine:
    with _built_for(system):
        return Engine(loaded, config)


def run_window(
    engine: Engine,
    system: System,
    jobs: Sequence[Job],
    seconds: float,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> Window:
    """Queue all jobs, run for so many seconds, and abort the rest."""
    for i, job in enumerate(jobs):
        salt = None
        if system.policy is not None:
            lens = job.prompt.size, job.output_len, job.n, engine.max_model_len
            salt = system.salt(str(i), *lens)
        params = SamplingParams(temperature=0, max_tokens=job.output_len, ignore_eos=True)
        engine.add_request(str(i), job.prompt.tolist(), params, cache_salt=salt)
    begin = now = clock()
    running = num_steps = num_tokens = 0
    left = dict.fromkeys(map(str, range(len(jobs))))
    while engine.has_work and now - begin < seconds:
        for output in engine.step().finished:
            del left[output.request_id]
            num_tokens += len(output.outputs[0].token_ids)
        running += engine.num_running
        num_steps += 1
        now = clock()
    for name in left:
        output_so_far = engine.abort(name)
        if output_so_far is not None:
            num_tokens += len(output_so_far.outputs[0].token_ids)
    while engine.has_work:
        engine.step()
    num_ended = len(jobs) - len(left)
    return Window(now - begin, num_tokens, num_ended, running / num_steps, num_steps)
