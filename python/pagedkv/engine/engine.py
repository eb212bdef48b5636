"""One engine: schedule, run, update, text. It owns scheduler, block manager and cache; one thread.

Errors of a request are refused in add_request, before it is queued; errors of a step end the
requests of that step and the engine goes on.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from pagedkv.block_manager import Snapshot, Statistics
from pagedkv.config import EngineConfig
from pagedkv.engine.gpu_attention import attention_workspace, prefix_grouper
from pagedkv.engine.input_builder import InputBuilder
from pagedkv.engine.kv_scales import scales_for
from pagedkv.engine.loaded_model import LoadedModel
from pagedkv.engine.loading import load
from pagedkv.engine.model_runner import ModelRunner
from pagedkv.engine.observer import NoObserver, RunObserver, StepWatcher
from pagedkv.engine.output_processor import OutputProcessor
from pagedkv.engine.pool_size import free_bytes, log_pool
from pagedkv.engine.requests import Prompt, RequestBuilder
from pagedkv.engine.step_loop import StepLoop
from pagedkv.engine.step_times import StepSplit
from pagedkv.kv_cache import KVCache, num_blocks_for, num_cpu_blocks_for
from pagedkv.records import (
    Explanation,
    RequestOutput,
    RunFacts,
    StepResult,
)
from pagedkv.request import Request
from pagedkv.sampling_params import SamplingParams
from pagedkv.scheduler import RunView, build_scheduler
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
        self.vocab_size = loaded.vocab_size
        self.device = loaded.device
        self.max_num_seqs = config.scheduler.max_num_seqs
        is_pipelined = config.async_scheduling
        if is_pipelined is None:
            is_pipelined = loaded.device.type == "cuda"
        shape = loaded.cache_shape.stored_as(config.cache.kv_cache_dtype)
        max_num_seqs = config.scheduler.max_num_seqs
        scales = scales_for(loaded, shape)
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
            scales=scales,
        )
        self._facts = RunFacts(
            model=config.model,
            dtype=str(loaded.cache_shape.dtype).removeprefix("torch."),
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
                grouper=prefix_grouper(loaded, shape, config.cache.block_size),
                workspace=attention_workspace(loaded, shape),
            ),
            max_num_seqs=max_num_seqs,
            vocab_size=loaded.sampled_vocab_size,
            clock=clock,
            enforce_eager=config.enforce_eager,
            max_captured_tokens=config.max_captured_tokens,
        )
        self._requests = RequestBuilder(
            loaded.tokenizer,
            eos_token_ids=loaded.eos_token_ids,
            vocab_size=loaded.vocab_size,
            sampled_vocab_size=loaded.sampled_vocab_size,
            max_model_len=loaded.max_model_len,
            num_cache_tokens=self._scheduler.window.longest(loaded.max_model_len),
            seed=config.seed,
        )
        self._outputs = OutputProcessor(loaded.tokenizer, max_num_seqs)
        self._loop = StepLoop(
            self._manager,
            self._scheduler,
            self._runner,
            self._outputs,
            clock,
            is_pipelined=is_pipelined,
        )
        log_pool(self._facts, config.cache.block_size, loaded.device)

    @classmethod
    def from_config(cls, config: EngineConfig) -> Engine:
        """Load the model that config names and make an engine of it."""
        return cls(load(config), config)

    def observe(self, observer: RunObserver) -> None:
        """Tell an observer all that happens here from now on: pagedkv.replay's Recorder, say, which
        writes it to a file. Steps are not pipelined then: what is decided depends on the record
        alone, not on when a result came.

        Raises RuntimeError: there is one already, or requests have come before it.
        """
        if not isinstance(self._observer, NoObserver) or self._has_begun:
            raise RuntimeError("a run is observed by one observer, from before its first request")
        observer.begins(self._config, self._facts, self._clock())
        self._observer = self._loop.observer = observer
        self._scheduler.log.listener = observer.noted
        self._scheduler.pins.is_on = False  # replays know of none

    def watch(self, watcher: StepWatcher) -> None:
        """Tell a watcher of requests and steps from now on."""
        self._loop.watchers.append(watcher)

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
        user: str | None = None,
        keeps_blocks: bool = False,
    ) -> Request:
        """Check a request as add_request does, without queueing it. prompt_text: what its output
        shows of a prompt given as ids. priority: lower is more urgent (scheduling_policy
        "priority"). user: a label for records of the run. keeps_blocks: hold its blocks when it has
        ended until unpin() or until somebody needs them; not in a run that is observed.
        """
        request = self._requests.build(
            request_id,
            prompt,
            params,
            prompt_text=prompt_text,
            cache_salt=cache_salt,
            priority=priority,
            user=user,
            keeps_blocks=keeps_blocks,
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
        options: dict[str, Any] = {"cache_salt": cache_salt, "priority": priority}
        self.add(self.make_request(request_id, prompt, params, **options), stream=stream)

    def add(self, request: Request, *, stream: bool = False) -> None:
        """Queue a request of make_request. stream: its text comes in pieces in step().deltas."""
        self._scheduler.check_admissible(request)
        self._outputs.add(request, streams=stream)
        self._scheduler.add(request)
        self._has_begun = True
        now_s = self._clock()
        self._observer.added(request, now_s)
        for watcher in self._loop.watchers:
            watcher.added(request, now_s)

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now; its output so far, or None if it is not here (any more)."""
        if request_id not in self._scheduler:
            return None
        output = None
        ended, now_s = self._scheduler.finish(request_id, "abort"), self._clock()
        for finished in ended:
            _, output = self._outputs.finish(finished)
        self._observer.aborted(request_id, now_s)
        for watcher in self._loop.watchers:
            watcher.aborted(ended, now_s)
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
        self._loop.settle()
        parent = self._scheduler.request(request_id)
        like = None
        if params is not None and parent is not None:
            like = self._requests.branch(parent, params)
        forks = self._scheduler.fork(request_id, n, like)
        for request, token_ids in forks:
            self._outputs.add(
                request, streams=stream, token_ids=token_ids.tolist(), forked_from=request_id
            )
        names = [request.request_id for request, _ in forks]
        request, token_ids = forks[0]
        now_s = self._clock()
        self._observer.forked(request_id, names, token_ids.size, request.max_tokens, now_s)
        for watcher, fork in itertools.product(self._loop.watchers, forks):
            watcher.added(fork[0], now_s)
        return names

    def parent(self, request_id: str) -> tuple[Request, int] | None:
        """An unfinished request that can be forked, and how many tokens it has generated."""
        self._loop.settle()
        request = self._scheduler.request(request_id)
        return None if request is None else (request, self._scheduler.num_generated(request_id))

    def unpin(self, name: str) -> None:
        """Give up the blocks of a request or answer that has ended with keeps_blocks."""
        self._scheduler.pins.drop(name)

    # -- steps -------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether step() has something to do or to tell."""
        return self._scheduler.has_work or self._loop.has_results

    def step(self) -> StepResult:
        """Run one step; empty when there is nothing to do. Pipelined, the next step is on its way
        when this returns.

        An exception in the step ends the step's requests with an error; others go on. An interrupt
        does the same and is passed on.
        """
        return self._loop.step()

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

    @property
    def step_split(self) -> StepSplit:
        """Where the time of all steps so far went."""
        return self._loop.times.split

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
        self._scheduler.pins.drop_all()
        num_blocks = self._manager.reset_prefix_cache()
        self._observer.cache_reset(self._clock())
        return num_blocks

    def cache_view(self) -> CacheView:
        """The cache as it is now, for pictures."""
        return CacheView(self._manager.snapshot(), self._scheduler.names_by_seq_id())

    def open_view(self) -> RunView:
        """Whoever shows the run looks at it by this, between two steps, until close_view."""
        view = RunView(self._manager, self._scheduler)
        self._loop.watchers.append(view)
        return view

    def close_view(self, view: RunView) -> None:
        self._loop.watchers.remove(view)

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
