"""Options of the engine as small frozen values, checked when made. `EngineConfig.from_options`
sorts flat keyword options into them.

An unknown option raises with the closest names that exist. Nothing here is ever mutated.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from dataclasses import dataclass, field
from typing import Any

from pagedkv.numbers import integer, real, truth

LOAD_FORMATS = ("auto", "dummy")
DTYPES = ("auto", "float32", "bfloat16", "float16")
SCHEDULING_POLICIES = ("fcfs", "priority")
PREEMPTION_MODES = ("auto", "swap", "recompute")
KV_CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3", "fp8_e5m2")
MAX_BLOCK_SIZE = 256
_DEVICE = re.compile(r"auto|cpu|cuda(:\d{1,3})?")


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The pool of KV blocks.

    Args:
        block_size: tokens in a block, 1 to 256.
        num_gpu_blocks_override: exactly this many blocks (the name users know; on the CPU too).
        kv_cache_memory_bytes: as many blocks as fit in this many bytes. Not together with
            num_gpu_blocks_override. With neither, a GPU's pool takes what a step of the largest
            size leaves of gpu_memory_utilization, and a CPU's holds max_num_seqs sequences of
            max_model_len tokens, at most 1 GiB.
        gpu_memory_utilization: part of the GPU's memory that the engine may use, what others use
            there included. Above 0, at most 1.
        enable_prefix_caching: find full blocks of earlier prompts and answers again by content.
        kv_cache_dtype: of the keys and values in the pool. auto is the model's dtype. fp8 (that is
            fp8_e4m3) and fp8_e5m2 take one byte for each number, so that twice as many tokens fit
            as with 16 bits: of each layer and KV head they hold real / scale, with the scales of
            the checkpoint, or, where it has none, measured when the engine starts.
        watermark: fraction of the pool kept free when a request is admitted, so that running ones
            can grow. In [0, 1).
        swap_space: GiB of CPU memory that preempted requests' blocks may be moved to. 0: none, so
            that they are computed again.
        enable_kv_offloading: what the prefix cache evicts moves to swap_space too, as far as
            preempted requests leave room, and comes back for a hit where that is cheaper than
            computing it. Off unless asked for: in a full pool every step that takes a block moves
            one, whether or not anybody ever asks for its content again.
    """

    block_size: int = 16
    num_gpu_blocks_override: int | None = None
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    kv_cache_dtype: str = "auto"
    watermark: float = 0.01
    swap_space: float = 0.0
    enable_kv_offloading: bool = False

    def __post_init__(self) -> None:
        _keep_integer(self, "block_size", 1, MAX_BLOCK_SIZE)
        if self.num_gpu_blocks_override is not None:
            _keep_integer(self, "num_gpu_blocks_override", 1)
            if self.kv_cache_memory_bytes is not None:
                raise ValueError(
                    "num_gpu_blocks_override and kv_cache_memory_bytes both size the pool: give one"
                )
        if self.kv_cache_memory_bytes is not None:
            _keep_integer(self, "kv_cache_memory_bytes", 1)
        _keep_truth(self, "enable_prefix_caching")
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            raise ValueError(
                f"kv_cache_dtype must be one of {', '.join(KV_CACHE_DTYPES)}, "
                f"got {self.kv_cache_dtype!r}"
            )
        for name in ("gpu_memory_utilization", "watermark", "swap_space"):
            object.__setattr__(self, name, real(name, getattr(self, name)))
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(
                "gpu_memory_utilization must be above 0 and at most 1, got "
                f"{self.gpu_memory_utilization!r}"
            )
        if not 0 <= self.watermark < 1:
            raise ValueError(f"watermark must be at least 0 and below 1, got {self.watermark!r}")
        if not 0 <= self.swap_space < 1e9:
            raise ValueError(
                f"swap_space must be at least 0 and below 1e9 GiB, got {self.swap_space!r}"
            )
        _keep_truth(self, "enable_kv_offloading")
        if self.enable_kv_offloading and not (self.swap_space and self.enable_prefix_caching):
            raise ValueError(
                "enable_kv_offloading needs swap_space above 0 and enable_prefix_caching, got "
                f"{self.swap_space!r} GiB and {self.enable_prefix_caching}"
            )


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """How much one step may hold.

    Args:
        max_num_seqs: most sequences that run at once.
        max_num_batched_tokens: most tokens in one step. At least max_num_seqs, so that every
            running sequence advances in every step and a prefill always gets a share beside
            decodes.
        max_num_paced_tokens: most tokens in a step with decodes while no prompt is in a hurry
            (scheduler/pace.py): for lists of requests with answers of different known lengths, on
            models whose weights take long to read. 0: max_num_batched_tokens. Else at
            least max_num_seqs, so that decodes leave some to a prompt that runs, and at most that.
        scheduling_policy: fcfs runs requests in order of arrival. priority runs urgent ones (lower
            value of `priority`) first; an urgent one displaces running ones that are less urgent,
            and its prompt gets a step's tokens before theirs.
        priority_ageing_steps: steps of waiting that make up for one level of priority, so that
            nobody waits for ever: a request of priority p is passed only by those of priority
            q < p that arrive at most (p - q) * priority_ageing_steps steps after it.
        max_num_overtakes: how many requests behind it may start while one waits for blocks that
            they do not need as many of; after that it is next. 0: never.
        reserve_after_preemptions: a request preempted this often starts again only with all the
            blocks it can ever need kept for it, and is not preempted any more.
        preemption_mode: swap moves a victim's blocks to the CPU and back, recompute drops them and
            computes them again; auto takes the cheaper one by measured rates. Where swap_space is
            used up, it is recompute always.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_num_paced_tokens: int = 0
    scheduling_policy: str = "fcfs"
    priority_ageing_steps: int = 256
    max_num_overtakes: int = 16
    reserve_after_preemptions: int = 3
    preemption_mode: str = "auto"

    def __post_init__(self) -> None:
        _keep_integer(self, "max_num_seqs", 1)
        _keep_integer(self, "max_num_batched_tokens", 1)
        if self.scheduling_policy not in SCHEDULING_POLICIES:
            raise ValueError(
                f"scheduling_policy must be one of {', '.join(SCHEDULING_POLICIES)}, "
                f"got {self.scheduling_policy!r}"
            )
        if self.preemption_mode not in PREEMPTION_MODES:
            raise ValueError(
                f"preemption_mode must be one of {', '.join(PREEMPTION_MODES)}, "
                f"got {self.preemption_mode!r}"
            )
        _keep_integer(self, "priority_ageing_steps", 1, 2**20)
        _keep_integer(self, "max_num_overtakes", 0)
        _keep_integer(self, "reserve_after_preemptions", 1)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, below max_num_seqs "
                f"{self.max_num_seqs}: "
                "raise the first or lower the second"
            )
        _keep_integer(self, "max_num_paced_tokens", 0)
        if self.max_num_paced_tokens and not (
            self.max_num_seqs <= self.max_num_paced_tokens <= self.max_num_batched_tokens
        ):
            raise ValueError(
                f"max_num_paced_tokens is {self.max_num_paced_tokens}: it must be 0, or at least "
                f"max_num_seqs {self.max_num_seqs} and at most max_num_batched_tokens "
                f"{self.max_num_batched_tokens}"
            )
        if self.max_num_paced_tokens and self.scheduling_policy != "fcfs":
            raise ValueError(
                f"max_num_paced_tokens is {self.max_num_paced_tokens}, but scheduling_policy is "
                f"{self.scheduling_policy!r}: prompts are paced under 'fcfs' only"
            )


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything an engine is made from.

    Args:
        model: the alias `smollm2`, a directory of safetensors, a .gguf file, or owner/name on the
            hub.
        device: where the model runs: cpu, cuda (the current GPU) or cuda:N; auto takes a GPU where
            there is one and pagedkv's CUDA library is built.
        dtype: of weights and activations, and of the cache unless kv_cache_dtype says otherwise;
            auto takes the checkpoint's, float32 if it names none.
        load_format: auto reads the weights; dummy fills them with small random numbers, the same
            each time, and needs nothing of a model but its config.json: for measurements.
        max_model_len: most tokens of a prompt and its answer. None: what the model allows.
        enforce_eager: on a GPU, launch every kernel of a step one by one instead of replaying a
            CUDA graph: slower, with less memory and a faster start.
        max_cudagraph_capture_size: most tokens of a step with prompts that is a CUDA graph; 0: none
            is. Steps of decodes alone always are, unless enforce_eager says otherwise.
        async_scheduling: schedule and launch the next step while one runs; whether a token ends its
            request is learnt one step late then. None: on a GPU.
        seed: makes the draws of requests without a seed of their own repeatable. None: they are
            random.
    """

    model: str
    device: str = "auto"
    dtype: str = "auto"
    load_format: str = "auto"
    max_model_len: int | None = None
    enforce_eager: bool = False
    max_cudagraph_capture_size: int = 256
    async_scheduling: bool | None = None
    seed: int | None = None
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if not isinstance(self.device, str) or not _DEVICE.fullmatch(self.device):
            raise ValueError(f"device must be auto, cpu, cuda or cuda:N, got {self.device!r}")
        if self.load_format not in LOAD_FORMATS:
            raise ValueError(
                f"load_format must be one of {', '.join(LOAD_FORMATS)}, got {self.load_format!r}"
            )
        if self.max_model_len is not None:
            _keep_integer(self, "max_model_len", 2)
        _keep_truth(self, "enforce_eager")
        _keep_integer(self, "max_cudagraph_capture_size", 0)
        if self.async_scheduling is not None:
            _keep_truth(self, "async_scheduling")
        if self.seed is not None:
            _keep_integer(self, "seed", 0, 2**64 - 1)

    @property
    def max_captured_tokens(self) -> int:
        """max_cudagraph_capture_size, as far as steps have so many; 0 where there is one sequence,
        as such a step has a row of padding.
        """
        if self.scheduler.max_num_seqs == 1:
            return 0
        return min(self.max_cudagraph_capture_size, self.scheduler.max_num_batched_tokens)

    @classmethod
    def from_options(cls, model: str, **options: Any) -> EngineConfig:
        """Flat keyword options, as users give them, into composed configs.

        Raises:
            ValueError: an option that does not exist (with the closest that do), or a value out of
                its range.
        """
        parts: dict[str, Any] = {"cache": CacheConfig, "scheduler": SchedulerConfig}
        own = {f.name for f in dataclasses.fields(cls)} - {"model", *parts}
        homes = dict.fromkeys(own, "")
        for part, kind in parts.items():
            homes.update({f.name: part for f in dataclasses.fields(kind)})
        sorted_options: dict[str, dict[str, Any]] = {"": {}, **{part: {} for part in parts}}
        for name, value in options.items():
            if name not in homes:
                raise ValueError(unknown_option(name, list(homes)))
            sorted_options[homes[name]][name] = value
        made = {part: kind(**sorted_options[part]) for part, kind in parts.items()}
        return cls(model=model, **sorted_options[""], **made)


def unknown_option(name: str, allowed: list[str]) -> str:
    """The message for an option that does not exist."""
    close = difflib.get_close_matches(name, allowed, n=3, cutoff=0.5)
    hint = f"options are {', '.join(sorted(allowed))}"
    if close:
        hint = f"did you mean {' or '.join(close)}?"
    return f"unknown option {name!r}: {hint}"


def _keep_integer(config: object, name: str, low: int, high: int | None = None) -> None:
    object.__setattr__(config, name, integer(name, getattr(config, name), low=low, high=high))


def _keep_truth(config: object, name: str) -> None:
    object.__setattr__(config, name, truth(name, getattr(config, name)))
