"""One engine: schedule, run, update, text. It owns scheduler, block manager and cache; one thread.

Errors of a request are refused in add_request, before it is queued; errors of a step end the
requests of that step and the engine goes on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagedkv.block_manager import Snapshot, Statistics
from pagedkv.config import EngineConfig
from pagedkv.engine.input_builder import InputBuilder
from pagedkv.engine.loading import LoadedModel, load
from pagedkv.engine.model_runner import ModelRunner
from pagedkv.engine.observer import NoObserver, RunObserver
from pagedkv.engine.output_processor import OutputProcessor
from pagedkv.engine.pool_size import free_bytes, log_pool
from pagedkv.engine.requests import Prompt, RequestBuilder
from pagedkv.kv_cache import KVCache, num_blocks_for, num_cpu_blocks_for
from pagedkv.records import (
    Explanation,
    FinishedRequest,
    OutputDelta,
    RequestOutput,
    RunFacts,
    ScheduledStep,
    StepResult,
)
from pagedkv.request import Request
from pagedkv.sampling_params import SamplingParams
from pagedkv.scheduler import build_scheduler
from pagedkv.text import Tokenizer

logger = logging.getLogger(__name__)


class CacheView(NamedTuple):
    """The paged cache at one moment: an immutable copy, and seq_id -> request_id."""

    snapshot: Snapshot
    names: dict[int, str]


class Engine:
    """Continuous batching over one model.

    Example::

        engine = Engine.from_config(EngineConfig.from_options("smollm2"))
        engine.add_request("a", "Hello", SamplingParams(max_tokens=8), stream=True)
        while engine.has_work:
            for delta in engine.step().deltas:
                print(delta.text, end="")
    """

    def __init__(
        self,
        loaded: LoadedModel,
        config: EngineConfig,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """clock: seconds that never run backwards; what is measured and recorded goes by it."""
        self._config = config
        self._clock = clock
        self._observer: RunObserver | NoObserver = NoObserver()
        self._has_begun = False
        self.tokenizer: Tokenizer | None = loaded.tokenizer
        self.max_model_len = loaded.max_model_len
        shape, max_num_seqs = loaded.cache_shape, config.scheduler.max_num_seqs
        num_blocks = num_blocks_for(
            config.cache,
            shape,
            max_num_seqs=max_num_seqs,
            max_model_len=loaded.max_model_len,
            num_free_bytes=free_bytes(loaded, config),
        )
        kv_cache = KVCache(
            shape,
            num_blocks,
            config.cache.block_size,
            num_cpu_blocks_for(config.cache, shape),
            device=loaded.device,
        )
        self._facts = RunFacts(
            model=config.model,
            dtype=str(shape.dtype).removeprefix("torch."),
            num_layers=shape.num_layers,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            bytes_per_token=shape.bytes_per_token,
            max_model_len=loaded.max_model_len,
            num_blocks=num_blocks,
            num_cpu_blocks=kv_cache.num_cpu_blocks,
            window=loaded.window,
        )
        self._manager, self._scheduler = build_scheduler(
            config.cache, config.scheduler, self._facts
        )
        self._runner = ModelRunner(
            loaded.model,
            kv_cache,
            InputBuilder(
                self._manager,
                config.scheduler,
                max_model_len=loaded.max_model_len,
                device=loaded.device,
            ),
            max_num_seqs=max_num_seqs,
            vocab_size=loaded.sampled_vocab_size,
            clock=clock,
        )
        self._requests = RequestBuilder(
            loaded.tokenizer,
            eos_token_ids=loaded.eos_token_ids,
            vocab_size=loaded.vocab_size,
            max_model_len=loaded.max_model_len,
            num_cache_tokens=self._scheduler.window.longest(loaded.max_model_len),
            seed=config.seed,
        )
        self._outputs = OutputProcessor(loaded.tokenizer, max_num_seqs)
        log_pool(self._facts, config.cache.block_size, loaded.device)

    @classmethod
    def from_config(cls, config: EngineConfig) -> Engine:
        """Load the model that config names and make an engine of it."""
        return cls(load(config), config)

    def observe(self, observer: RunObserver) -> None:
        """Tell an observer all that happens here from now on: pagedkv.replay's Recorder, say, which
        writes it to a file.

        Raises RuntimeError: there is one already, or requests have come before it.
        """
        if not isinstance(self._observer, NoObserver) or self._has_begun:
            raise RuntimeError("a run is observed by one observer, from before its first request")
        observer.begins(self._config, self._facts, self._clock())
        self._observer = observer
        self._scheduler.log.listener = observer.noted

    # -- requests ----------------------------------------------------------------------

    def make_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        prompt_text: str | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
    ) -> Request:
        """Check a request as add_request does, without queueing it. prompt_text: what its output
        shows of a prompt given as ids. priority: lower is more urgent (scheduling_policy
        "priority").
        """
        request = self._requests.build(
            request_id,
            prompt,
            params,
            prompt_text=prompt_text,
            cache_salt=cache_salt,
            priority=priority,
        )
        self._scheduler.check_admissible(request)
        return request

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        stream: bool = False,
        cache_salt: str | None = None,
        priority: int = 0,
    ) -> None:
        """Queue a prompt (text or token ids).

        Args:
            stream: its text comes in pieces in step().deltas.
            cache_salt: share cached prefixes only with requests of the same salt (one per tenant).
            priority: lower is more urgent (scheduling_policy "priority").

        Raises:
            ValueError, TypeError: what is wrong, in words; nothing was queued then.
        """
        request = self.make_request(
            request_id, prompt, params, cache_salt=cache_salt, priority=priority
        )
        self.add(request, stream=stream)

    def add(self, request: Request, *, stream: bool = False) -> None:
        """Queue a request of make_request. stream: its text comes in pieces in step().deltas."""
        self._scheduler.check_admissible(request)
        self._outputs.add(request, streams=stream)
        self._scheduler.add(request)
        self._has_begun = True
        self._observer.added(request, self._clock())

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now; its output so far, or None if it is not here (any more)."""
        if request_id not in self._scheduler:
            return None
        output = None
        for finished in self._scheduler.finish(request_id, "abort"):
            _, output = self._outputs.finish(finished)
        self._observer.aborted(request_id, self._clock())
        return output

    def fork(
        self,
        request_id: str,
        n: int = 1,
        params: SamplingParams | None = None,
        *,
        stream: bool = False,
    ) -> list[str]:
        """Make n copies of an unfinished request that go on from where it is, beside it.

        A fork shares every block so far; only the last, partial one is copied, when either writes.
        Fork k of request "a" is called "a-k" (forks of forks too, k counts on) and draws with
        (seed, k), so each goes its own way where temperature is above 0. Its output holds the
        tokens from before the fork too. Without a free slot (max_num_seqs) a fork queues, and then
        finds its full blocks in the prefix cache.

        Args:
            n: 1 to 128.
            params: how the forks go on: another temperature, seed or max_tokens, other stop strings
                (looked for in the text from before the fork too). max_tokens counts the tokens from
                before the fork; without a seed it is the parent's. The token ids that end them
                (stop_token_ids, ignore_eos) are the parent's. None: all as for the parent.
            stream: the text that each adds comes in pieces in step().deltas.

        Returns:
            the ids of the new requests.

        Raises:
            ValueError, TypeError: n is out of range, the request is not here or asks for several
                answers itself, one of the new ids is in use, or params ask for what a fork cannot
                have. Nothing was forked then.
        """
        self._outputs.check_stream(request_id, streams=stream)
        parent = self._scheduler.request(request_id)
        like = None
        if params is not None and parent is not None:
            like = self._requests.branch(parent, params)
        forks = self._scheduler.fork(request_id, n, like)
        for request, token_ids in forks:
            self._outputs.add(request, streams=stream, token_ids=token_ids.tolist())
        names = [request.request_id for request, _ in forks]
        request, token_ids = forks[0]
        self._observer.forked(request_id, names, token_ids.size, request.max_tokens, self._clock())
        return names

    # -- steps -------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    def step(self) -> StepResult:
        """Run one step; empty when there is nothing to do.

        An exception in the step ends the step's requests with an error; others go on. An interrupt
        does the same and is passed on.
        """
        begin_s = self._clock()
        rates = self._scheduler.rates = self._runner.meter.rates
        step = self._scheduler.schedule()
        if step is None:
            return StepResult([], [])
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
        table = self._scheduler.slots
        try:
            sampled = self._runner.run(step, table.token_ids)
        except BaseException as error:
            text = "interrupted"
            if isinstance(error, Exception):
                logger.exception("step %d failed; its requests end", step.step_id)
                text = f"the step failed: {type(error).__name__}: {error}"
            self._observer.step_failed(step, table, rates, text)
            ended = self._scheduler.fail(step, text)
            self._observer.step_ended(self._manager, [], ended, begin_s, self._clock())
            result = self._collect([], ended)
            if isinstance(error, Exception):
                return result
            raise
        self._observer.sampled(
            step, table, rates, sampled.token_ids, sampled.failed, sampled.candidates
        )
        ended = self._scheduler.update(step, *sampled)
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
        self._observer.step_ended(self._manager, stopped, ended, begin_s, self._clock())
        return result

    def _new_tokens(
        self, step: ScheduledStep, token_ids: NDArray[np.int64]
    ) -> list[tuple[Request, int]]:
        """What the step has added to watched requests that go on."""
        slots = step.slots[step.sample_rows]
        news = []
        for i in self._outputs.watched(slots).tolist():
            request = self._scheduler.request_at(int(slots[i]))
            if request is not None and request.draw == step.sample_draws[i]:
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

    # -- looking in --------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        return self._scheduler.num_running

    @property
    def num_waiting(self) -> int:
        return self._scheduler.num_waiting

    @property
    def num_swapped(self) -> int:
        return self._scheduler.num_swapped

    def statistics(self) -> Statistics:
        """The block manager's counters. In tokens: what prompts looked up in the prefix cache is
        prefix_cache_queries, what they found prefix_cache_hits, the rest prefix_cache_misses; what
        the cache gave up for others is prefix_cache_evictions.
        """
        return self._manager.statistics()

    def reset_prefix_cache(self) -> int:
        """Forget every cached prefix; requests that run keep their blocks and go on. Returns how
        many blocks were findable.
        """
        num_blocks = self._manager.reset_prefix_cache()
        self._observer.cache_reset(self._clock())
        return num_blocks

    def cache_view(self) -> CacheView:
        """The cache as it is now, for pictures."""
        return CacheView(self._manager.snapshot(), self._scheduler.names_by_seq_id())

    def explain(self, request_id: str) -> list[Explanation]:
        """Why a request is where it is: every decision about it, with numbers and in plain words
        (`.text`). One explanation, or one for each of several answers. The last 256 requests that
        have ended are known too.

        Raises KeyError for a request that is not known (any more).
        """
        explanations = self._scheduler.log.explain(request_id)
        if not explanations:
            raise KeyError(f"request {request_id!r} is not known, or ended long ago")
        return explanations

    def check_invariants(self) -> None:
        """Raise if the manager's or the scheduler's books are wrong. For tests and idle moments."""
        self._manager.check_invariants()
        self._scheduler.check_invariants()
