"""A fake model for the scheduler: its K/V of a token is the token's id, and the next token is a
hash of the whole context as read back through the block tables. One wrong block, slot or position
changes the answer.

`Simulation` drives scheduler and manager as the engine does and checks every invariant it can after
every call; `solo` is the answer of a request that runs alone.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import numpy as np
from launched import LaunchedSteps
from step_checks import check_explained, check_reservations, check_step

from pagedkv.block_manager import BlockManager, BlockState, StepTables
from pagedkv.config import SchedulerConfig
from pagedkv.records import Candidates, FinishedRequest, ScheduledStep
from pagedkv.request import Request
from pagedkv.sampling_params import SamplingParams
from pagedkv.scheduler import Scheduler
from pagedkv.scheduler.beam_search import BeamSearch, Hypothesis

VOCAB = 97
STOP_ID = 5
NOTHING = -7  # in every slot that nobody has written
GARBAGE = -9  # what a failed step leaves behind


def next_token(context: np.ndarray, draw: int = 0) -> int:
    """The fake model: a hash of every visible token, in order, and of the draw."""
    return zlib.crc32(np.ascontiguousarray(context, dtype=np.int32).tobytes(), draw) % VOCAB


def logprobs_after(context: np.ndarray) -> np.ndarray:
    """The fake model's distribution, for beams. [VOCAB]"""
    seed = zlib.crc32(np.ascontiguousarray(context, dtype=np.int32).tobytes())
    logits = np.random.default_rng(seed).normal(size=VOCAB) * 2
    logits[STOP_ID] += 3
    return logits - np.log(np.exp(logits).sum())


def best_of(logprobs: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    order = np.argsort(-logprobs, kind="stable")[:k]
    return order, logprobs[order]


def solo_beams(request: Request, window: int = 0) -> list[Hypothesis]:
    """The search on contexts alone, without blocks, slots and batches."""
    search = BeamSearch(request)
    known = [np.empty(0, dtype=np.int32)]
    while True:
        contexts = [np.append(request.prompt_token_ids, one) for one in known]
        pairs = [best_of(logprobs_after(one[-window:]), search.num_candidates) for one in contexts]
        going_on = search.advance(
            known, np.stack([ids for ids, _ in pairs]), np.stack([values for _, values in pairs])
        )
        if going_on is None:
            return search.finished
        chosen = zip(going_on.parents, going_on.token_ids, strict=True)
        known = [np.append(known[parent], np.int32(token)) for parent, token in chosen]


def solo(request: Request, known: Sequence[int] = (), window: int = 0) -> list[int]:
    """What the request answers when nothing else exists. known: what a fork starts with; window:
    how many tokens the model sees, 0: all.
    """
    context = request.prompt_token_ids.tolist() + list(known)
    for _ in range(request.max_tokens - len(known)):
        context.append(next_token(np.array(context[-window:]), request.draw))
        if context[-1] in request.stop_token_ids:
            break
    return context[request.prompt_len :]


def make_request(
    name: str,
    prompt: list[int] | np.ndarray,
    max_tokens: int,
    *,
    stops: tuple[int, ...] = (),
    salt: str | None = None,
    priority: int = 0,
    n: int = 1,
    beam_width: int | None = None,
    **options: Any,
) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=np.asarray(prompt, dtype=np.int32),
        max_tokens=max_tokens,
        stop_token_ids=stops,
        cache_salt=salt,
        priority=priority,
        sampling_params=SamplingParams(n=n, temperature=0, beam_width=beam_width, **options),
    )


def answers_of(request: Request) -> list[Request]:
    """The request, or the answers of a group."""
    if not request.is_group:
        return [request]
    return [request.member(k) for k in range(request.num_answers)]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """A random prompt, the same for the same seed."""
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


@dataclass
class Simulation:
    """One manager, one scheduler, one fake cache, and all that has ended so far."""

    num_blocks: int = 64
    block_size: int = 4
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 32
    max_model_len: int = 128
    enable_prefix_caching: bool = True
    watermark: float = 0.01
    hash_bits: int = 128
    shuffle_seed: int = 0
    scheduling_policy: str = "fcfs"
    priority_ageing_steps: int = 256
    max_num_overtakes: int = 16
    max_num_paced_tokens: int = 0
    reserve_after_preemptions: int = 3
    num_cpu_blocks: int = 0
    preemption_mode: str = "auto"
    enable_kv_offloading: bool = False
    window: int = 0
    finished: dict[str, FinishedRequest] = field(default_factory=dict)
    requests: dict[str, Request] = field(default_factory=dict)
    candidates: Candidates | None = None
    forked_after: dict[str, list[int]] = field(default_factory=dict)  # tokens, by fork
    num_steps: int = 0
    num_preempted: int = 0
    has_waited: bool = False  # the last schedule() gave no step
    num_swapped_in_units: int = 0
    scheduler_type: ClassVar[type[Scheduler]] = Scheduler
    tables_type: ClassVar[Any] = StepTables

    def make_manager(self) -> BlockManager:
        return BlockManager(
            self.num_blocks,
            self.block_size,
            num_cpu_blocks=self.num_cpu_blocks,
            watermark=self.watermark,
            enable_prefix_caching=self.enable_prefix_caching,
            hash_bits=self.hash_bits,
            shuffle_seed=self.shuffle_seed,
            enable_kv_offloading=self.enable_kv_offloading,
        )

    def __post_init__(self) -> None:
        self.manager = self.make_manager()
        config = SchedulerConfig(
            **{one.name: getattr(self, one.name) for one in fields(SchedulerConfig)}
        )
        self.scheduler = self.scheduler_type(
            self.manager,
            config,
            max_model_len=self.max_model_len,
            enable_prefix_caching=self.enable_prefix_caching,
            window=self.window,
        )
        self.launched = LaunchedSteps(self.manager)
        max_num_blocks = -(-self.max_model_len // self.block_size)
        self.tables = self.tables_type(self.manager, self.max_num_seqs, max_num_blocks)
        # Poison: an entry that no table owns points outside the cache.
        self.block_tables = np.full((self.max_num_seqs, max_num_blocks), 10**6, dtype=np.int32)
        self.cache = np.full((self.num_blocks, self.block_size), NOTHING, dtype=np.int64)
        self.cpu_cache = np.full((self.num_cpu_blocks, self.block_size), NOTHING, dtype=np.int64)
        self.slot_mapping = np.zeros(self.max_num_batched_tokens, dtype=np.int64)
        self.positions = np.zeros(self.max_num_batched_tokens, dtype=np.int64)
        self.seq_lens = np.zeros(self.max_num_seqs, dtype=np.int32)
        self.query_start_loc = np.zeros(self.max_num_seqs + 1, dtype=np.int32)

    def most_blocks(self, num_tokens: int) -> int:
        """Blocks that a sequence holds at once until it has so many tokens, at worst."""
        size, needed = self.block_size, -(-num_tokens // self.block_size)
        if self.window == 0:
            return needed
        kept = max(self.window - 1, size)
        most = 1 + -(-(kept + min(self.max_num_batched_tokens, kept) - 1) // size)
        fits = 1 + -(-kept // size) <= self.num_blocks
        return min(needed, most, self.num_blocks) if fits else min(needed, most)

    def check(self) -> None:
        self.manager.check_invariants()
        self.scheduler.check_invariants()
        self.launched.look()
        check_reservations(self)

    def add(self, request: Request) -> None:
        self.scheduler.add(request)
        self.requests |= {one.request_id: one for one in answers_of(request)}
        self.check()

    def abort(self, name: str) -> None:
        self._end(self.scheduler.finish(name, "abort"))
        self.check()

    def fork(self, name: str, n: int) -> None:
        for request, token_ids in self.scheduler.fork(name, n):
            self.requests[request.request_id] = request
            self.forked_after[request.request_id] = token_ids.tolist()
        self.check()

    def schedule(self) -> ScheduledStep | None:
        step = self.scheduler.schedule()
        self.check()
        if step is None:
            self.has_waited = True
        else:
            self.num_steps += 1
            self.num_preempted += len(step.preempted)
            self.launched.scheduled(step)
            in_units = [one for one in step.preempted if one.choice.num_sequences > 1]
            self.num_swapped_in_units += len(in_units)
            check_step(self, step)
            self.has_waited = False
        check_explained(self, [] if step is None else step.slots.tolist())
        return step

    def run(self, step: ScheduledStep, *, bad_rows: np.ndarray | None = None) -> np.ndarray:
        """The model's step: write this step's tokens, then read every sampled row's context. What
        bad_rows write is garbage.
        """
        for block, cpu_block in step.swap_out:
            self.cpu_cache[cpu_block] = self.cache[block]
        free = self.manager.states() == BlockState.FREE.value
        self.cache[free] = NOTHING
        num_tokens = self.tables.write(
            step.seq_ids,
            step.query_lens,
            step.slots,
            block_tables=self.block_tables,
            slot_mapping=self.slot_mapping,
            positions=self.positions,
            seq_lens=self.seq_lens,
            query_start_loc=self.query_start_loc,
            only_changed=True,
        )
        assert num_tokens == step.num_tokens
        written = self.slot_mapping[:num_tokens] // self.block_size
        self.launched.check_written(
            np.concatenate([written, step.copies[:, 1], step.swap_in[:, 1]])
        )
        for cpu_block, block in step.swap_in:
            self.cache[block] = self.cpu_cache[cpu_block]
            self.cpu_cache[cpu_block] = NOTHING
        self.cpu_cache[self.manager.cpu_states() == BlockState.FREE.value] = NOTHING
        for source, destination in step.copies:
            self.cache[destination] = self.cache[source]
        slots = np.repeat(step.slots, step.query_lens)
        token_ids = self.tokens_at(slots, self.positions[:num_tokens])
        places = self.slot_mapping[:num_tokens]
        assert np.unique(places).size == num_tokens, "two tokens share a slot"
        self.cache.reshape(-1)[places] = token_ids
        if bad_rows is not None:
            is_bad = np.repeat(np.isin(np.arange(step.slots.size), bad_rows), step.query_lens)
            self.cache.reshape(-1)[places[is_bad]] = GARBAGE
        self.candidates = self._candidates(step)
        samples = zip(step.sample_rows, step.sample_draws, strict=True)
        return np.array([self._sample(step, row, draw) for row, draw in samples], dtype=np.int64)

    def tokens_at(self, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        return self.scheduler.slots.token_ids[slots, positions]

    def update(
        self, step: ScheduledStep, token_ids: np.ndarray, failed: np.ndarray | None = None
    ) -> None:
        self.launched.end_before(step)
        ended = self.scheduler.update(step, token_ids, failed, candidates=self.candidates)
        self.launched.landed(step)
        self._end(ended)
        self.check()

    def fail(self, step: ScheduledStep) -> None:
        self.launched.end_before(step)
        self._end(self.scheduler.fail(step, "injected"))
        self.launched.landed(step)
        self.check()

    def step(self) -> bool:
        """One whole step; False when there is nothing to do."""
        step = self.schedule()
        if step is None:
            return False
        self.update(step, self.run(step))
        return True

    def run_all(self, max_steps: int = 10_000) -> None:
        for _ in range(max_steps):
            if not self.step():
                return
        raise AssertionError(f"{max_steps} steps, and {self.scheduler.num_waiting} still wait")

    def check_outcome(self) -> None:
        """Everything ended, every answer is the solo one (or its beginning), the pool is whole."""
        assert not self.scheduler.has_work
        assert self.finished.keys() == self.requests.keys()
        for name, one in self.finished.items():
            if one.request.num_candidates:
                self._check_beam(one)
                continue
            assert one.num_preemptions <= self.reserve_after_preemptions, name
            expected = solo(self.requests[name], self.forked_after.get(name, ()), self.window)
            got = one.token_ids.tolist()
            if one.reason in ("stop", "length"):
                assert got == expected, name
                assert (one.reason == "stop") == (got[-1] in one.request.stop_token_ids)
            else:
                assert got == expected[: len(got)], name
        statistics = self.manager.statistics()
        assert statistics.num_free + statistics.num_cached_idle == self.num_blocks
        assert statistics.num_sequences == 0
        assert statistics.num_cpu_free + statistics.num_cpu_cached_idle == self.num_cpu_blocks

    def _check_beam(self, one: FinishedRequest) -> None:
        if one.reason in ("stop", "length"):
            expected = solo_beams(one.request, self.window)[one.request.draw]
            assert one.token_ids.tolist() == expected.token_ids.tolist(), one.request.request_id
            assert one.cumulative_logprob == expected.logprob
            assert (one.reason == "stop") == expected.has_stopped

    def _candidates(self, step: ScheduledStep) -> Candidates | None:
        rows = step.slots[step.sample_rows]
        samples = [
            i
            for i, slot in enumerate(rows.tolist())
            if self.scheduler.request_at(slot).num_candidates  # type: ignore[union-attr]
        ]
        if not samples:
            return None
        pairs = [
            best_of(logprobs_after(self._context(step, step.sample_rows[i])), VOCAB)
            for i in samples
        ]
        ids, values = zip(*pairs, strict=True)
        return Candidates(np.array(samples), np.stack(ids), np.stack(values))

    def _context(self, step: ScheduledStep, row: int) -> np.ndarray:
        """Read through the block table, from the first block that the window needs."""
        seq_len = int(self.seq_lens[row])
        first = max(0, seq_len - self.window) // self.block_size if self.window else 0
        table = self.block_tables[step.slots[row], first : -(-seq_len // self.block_size)]
        context = self.cache[table].reshape(-1)[: seq_len - first * self.block_size]
        return context[-self.window :]

    def _sample(self, step: ScheduledStep, row: int, draw: int) -> int:
        return next_token(self._context(step, row), int(draw))

    def _end(self, finished: list[FinishedRequest]) -> None:
        for one in finished:
            assert one.request.request_id not in self.finished
            self.finished[one.request.request_id] = one
