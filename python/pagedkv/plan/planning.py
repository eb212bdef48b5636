"""make_plan: what a model takes of a GPU, and what a GPU makes of a model, from a config.json and
the options alone. Memory is predicted by the code by which the engine predicts its own, which the
caller hands in (engine.memory_plan.predict: nothing here imports the engine).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from pagedkv.block_manager import BlockManager
from pagedkv.config import EngineConfig
from pagedkv.kv_cache import CacheShape
from pagedkv.models import ModelConfig
from pagedkv.plan.floors import Floor, Work
from pagedkv.plan.gpus import Gpu
from pagedkv.records import MemoryPlan
from pagedkv.scheduler.window import Window

BLOCK_SIZES = (8, 16, 32, 64)
RANKS = (1, 2, 4, 8)
DEFAULT_LENGTHS = (512, 2048, 8192, 32768, 131072)
# Batches whose decodes are floored, beside what fits.
_BATCHES = (1, 32, 256)
# Of the manager that is asked how much a window saves: more than any one sequence holds.
_MOST_BLOCKS = 2**20


class Predict(Protocol):
    """engine.memory_plan.predict. Raises ValueError where not one block fits."""

    def __call__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        dtype: torch.dtype,
        *,
        gpu_bytes: int | None,
        others_bytes: int = 0,
    ) -> MemoryPlan: ...


@dataclass(frozen=True, slots=True)
class Fit:
    """What each GPU holds under one choice of settings. concurrency: sequences that fit at once,
    for each of the plan's lengths. reason: why it does not fit; memory then has no pool.
    """

    name: str
    memory: MemoryPlan
    bytes_per_token: int
    num_tokens: int
    concurrency: tuple[int, ...]
    reason: str | None


@dataclass(frozen=True, slots=True)
class BlockSizeFit:
    """The same pool in blocks of another size. waste_tokens: (block_size - 1) / 2, what the last
    block of a sequence lacks on the average over lengths. waste_shares: which part that is of
    what a sequence of each of the plan's lengths holds.
    """

    block_size: int
    bytes_per_block: int
    num_blocks: int
    waste_tokens: float
    waste_bytes: float
    waste_shares: tuple[float, ...]
    concurrency: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """longest_model_len: the largest max_model_len of which one request fits; longest_bound:
    whether it is memory or model that ends it. variants: the effect of other choices, each beside
    fit. Floors are empty where the GPU's rates are not known.
    """

    model: str
    architecture: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    gpu: Gpu
    dtype: str
    kv_cache_dtype: str
    block_size: int
    max_model_len: int
    max_num_seqs: int
    tensor_parallel_size: int
    lengths: tuple[int, ...]
    fit: Fit
    longest_model_len: int
    longest_bound: str
    block_sizes: tuple[BlockSizeFit, ...]
    variants: tuple[Fit, ...]
    decode: tuple[Floor, ...]
    prefill: tuple[Floor, ...]


def make_plan(
    config: EngineConfig,
    model_config: ModelConfig,
    dtype: torch.dtype,
    gpu: Gpu,
    predict: Predict,
    *,
    lengths: Sequence[int] = (),
    tensor_parallel_size: int = 1,
) -> Plan:
    """Plan an engine of these options.

    Args:
        lengths: tokens of a request, prompt and answer; none: powers of four to max_model_len.
        tensor_parallel_size: all numbers are those of one of so many GPUs; what they tell each
            other takes time that no floor has.

    Raises:
        ValueError: a length below 1 or above max_model_len, heads that cannot be divided so, or
            what predict raises of a model that it does not know.
    """
    planner = _Planner(config, model_config, dtype, gpu, predict)
    max_model_len = config.max_model_len or model_config.max_position_embeddings
    for length in lengths:
        if not 1 <= length <= max_model_len:
            raise ValueError(f"a length is {length}; max_model_len allows 1 to {max_model_len}")
    shorter = [one for one in DEFAULT_LENGTHS if one < max_model_len]
    chosen = tuple(lengths) or (*shorter, max_model_len)
    fit = planner.fit("as asked", chosen, tensor_parallel_size)
    longest, bound = planner.longest(tensor_parallel_size)
    decode, prefill = planner.floors(fit, chosen, tensor_parallel_size)
    return Plan(
        model=config.model,
        architecture=model_config.architecture,
        num_layers=model_config.num_layers,
        num_heads=model_config.num_heads,
        num_kv_heads=model_config.num_kv_heads,
        head_dim=model_config.head_dim,
        gpu=gpu,
        dtype=str(dtype).removeprefix("torch."),
        kv_cache_dtype=config.cache.kv_cache_dtype,
        block_size=config.cache.block_size,
        max_model_len=max_model_len,
        max_num_seqs=config.scheduler.max_num_seqs,
        tensor_parallel_size=tensor_parallel_size,
        lengths=chosen,
        fit=fit,
        longest_model_len=longest,
        longest_bound=bound,
        block_sizes=planner.block_sizes(fit, chosen),
        variants=planner.variants(chosen, tensor_parallel_size),
        decode=decode,
        prefill=prefill,
    )


class _Planner:
    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        dtype: torch.dtype,
        gpu: Gpu,
        predict: Predict,
    ) -> None:
        self._config = config
        self._model = model
        self._dtype = dtype
        self._gpu = gpu
        self._predict = predict

    def fit(
        self,
        name: str,
        lengths: tuple[int, ...],
        num_ranks: int,
        config: EngineConfig | None = None,
        model: ModelConfig | None = None,
    ) -> Fit:
        config, whole = config or self._config, model or self._model
        share = whole.share(num_ranks)
        shape = self._cache_shape(share, config)
        memory, reason = self._memory(config, share, num_ranks)
        num_blocks, block_size = memory.num_blocks, config.cache.block_size
        return Fit(
            name=name,
            memory=memory,
            bytes_per_token=shape.bytes_per_token,
            num_tokens=num_blocks * block_size,
            concurrency=self._concurrency(num_blocks, block_size, lengths),
            reason=reason,
        )

    def longest(self, num_ranks: int) -> tuple[int, str]:
        """The largest max_model_len of which one request fits in the pool, and what bounds it.

        A longer one takes larger tables of positions, so that the pool shrinks as it grows: from
        above and below by turns, until both meet.
        """
        share, most = self._model.share(num_ranks), self._model.longest_context

        def room(max_model_len: int) -> int:
            config = replace(self._config, max_model_len=max(2, max_model_len))
            memory, reason = self._memory(config, share, num_ranks)
            if reason is not None or memory.num_blocks == 0:
                return 0
            return self._window(memory.num_blocks, config.cache.block_size).longest(max_model_len)

        low = min(room(most), most)
        if low == most:
            return most, "model"
        high = min(room(low), most)
        while low < high:
            if room(high) >= high:
                return high, "memory"
            low, high = max(low, room(high)), min(high - 1, room(low))
        return low, "memory"

    def block_sizes(self, fit: Fit, lengths: tuple[int, ...]) -> tuple[BlockSizeFit, ...]:
        found = []
        for block_size in sorted({*BLOCK_SIZES, self._config.cache.block_size}):
            bytes_per_block = fit.bytes_per_token * block_size
            num_blocks = fit.memory.pool_bytes // bytes_per_block
            waste = (block_size - 1) / 2
            found.append(
                BlockSizeFit(
                    block_size=block_size,
                    bytes_per_block=bytes_per_block,
                    num_blocks=num_blocks,
                    waste_tokens=waste,
                    waste_bytes=waste * fit.bytes_per_token,
                    waste_shares=tuple(waste / (length + waste) for length in lengths),
                    concurrency=self._concurrency(num_blocks, block_size, lengths),
                )
            )
        return tuple(found)

    def variants(self, lengths: tuple[int, ...], num_ranks: int) -> tuple[Fit, ...]:
        config, model = self._config, self._model
        other = "fp8" if config.cache.kv_cache_dtype == "auto" else "auto"
        stored = replace(config, cache=replace(config.cache, kv_cache_dtype=other))
        found = [self.fit(f"kv_cache_dtype {other}", lengths, num_ranks, config=stored)]
        if model.num_kv_heads < model.num_heads:
            whole = replace(model, num_kv_heads=model.num_heads)
            name = f"MHA: {model.num_heads} KV heads, not {model.num_kv_heads}"
            found.append(self.fit(name, lengths, num_ranks, model=whole))
        for ranks in RANKS:
            if ranks == num_ranks:
                continue
            try:
                model.share(ranks)
            except ValueError:  # its heads cannot be divided so
                continue
            name = "one GPU" if ranks == 1 else f"each of {ranks} GPUs"
            found.append(self.fit(name, lengths, ranks))
        return tuple(found)

    def floors(
        self, fit: Fit, lengths: tuple[int, ...], num_ranks: int
    ) -> tuple[tuple[Floor, ...], tuple[Floor, ...]]:
        bandwidth, flops = self._gpu.bandwidth, self._gpu.flops
        if bandwidth is None or flops is None:
            return (), ()
        work = Work.of(self._model.share(num_ranks), self._dtype.itemsize, fit.bytes_per_token)
        most = self._config.scheduler.max_num_seqs
        decode = []
        for length, held in zip(lengths, fit.concurrency, strict=True):
            full = min(held, most)
            batches = sorted({*(one for one in _BATCHES if one <= full), full} - {0})
            decode += [work.decode(one, length, bandwidth, flops) for one in batches]
        return tuple(decode), tuple(work.prefill(one, bandwidth, flops) for one in lengths)

    def _memory(
        self, config: EngineConfig, share: ModelConfig, num_ranks: int
    ) -> tuple[MemoryPlan, str | None]:
        """A prediction, and why it does not fit, if it does not: the pool is left out then."""
        gpu_bytes, others = self._gpu.memory_bytes, 0
        if num_ranks > 1:  # logits of all ranks, where they are put together
            others = config.scheduler.max_num_seqs * self._model.vocab_size * self._dtype.itemsize
        try:
            found = self._predict(
                config, share, self._dtype, gpu_bytes=gpu_bytes, others_bytes=others
            )
            needed = found.used_bytes + others
            if gpu_bytes is None or needed <= gpu_bytes:
                return found, None
            reason = f"{needed / 2**30:.2f} GiB do not fit in {gpu_bytes / 2**30:.2f}"
        except ValueError as error:
            reason = str(error)
        sized = replace(
            config.cache,
            num_gpu_blocks_override=1,
            kv_cache_memory_bytes=None,
            swap_space=0.0,
            enable_kv_offloading=False,
        )
        found = self._predict(replace(config, cache=sized), share, self._dtype, gpu_bytes=gpu_bytes)
        found = replace(found, num_blocks=0, pool_bytes=0)
        if gpu_bytes is not None:
            needed = found.used_bytes + others
            allowed = config.cache.gpu_memory_utilization * gpu_bytes
            if needed > allowed:
                reason = (
                    f"{needed / 2**30:.2f} GiB are needed before there is a pool, and "
                    f"gpu_memory_utilization allows {allowed / 2**30:.2f}"
                )
        return found, reason

    def _cache_shape(self, share: ModelConfig, config: EngineConfig) -> CacheShape:
        shape = CacheShape(share.num_layers, share.num_kv_heads, share.head_dim, self._dtype)
        return shape.stored_as(config.cache.kv_cache_dtype)

    def _concurrency(
        self, num_blocks: int, block_size: int, lengths: tuple[int, ...]
    ) -> tuple[int, ...]:
        if num_blocks == 0:
            return (0,) * len(lengths)
        window = self._window(num_blocks, block_size)
        return tuple(num_blocks // window.blocks_for(length) for length in lengths)

    def _window(self, num_blocks: int, block_size: int) -> Window:
        """How many blocks a sequence holds, by the scheduler's own arithmetic."""
        manager = BlockManager(min(num_blocks, _MOST_BLOCKS), block_size)
        tokens = self._config.scheduler.max_num_batched_tokens
        return Window(manager, self._model.window, tokens)
