"""Owner of the K/V memory: one allocation, the per-layer views that models write to, the scales of
what is stored in 8 bits, and how many blocks fit. Which block belongs to whom is the block
manager's business; what a GPU has room for is measured by the engine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from pagedkv import ops
from pagedkv.config import CacheConfig

DEFAULT_CPU_BYTES = 2**30
_FP8 = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What of a model decides the size of its cache."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        """2 * num_layers * num_kv_heads * head_dim * dtype_size: K and V of every layer."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def is_fp8(self) -> bool:
        """Whether what is stored needs scales."""
        return self.dtype.itemsize == 1

    def stored_as(self, kv_cache_dtype: str) -> CacheShape:
        """The shape in the pool. kv_cache_dtype: one of config.KV_CACHE_DTYPES."""
        if kv_cache_dtype == "auto":
            return self
        return replace(self, dtype=_FP8[kv_cache_dtype])


def num_blocks_for(
    config: CacheConfig,
    shape: CacheShape,
    *,
    max_num_seqs: int,
    max_model_len: int,
    num_free_bytes: int | None = None,
) -> int:
    """Blocks of the pool, as config says; without a word there, as many as fit in num_free_bytes,
    or, if that is None, enough for max_num_seqs sequences of max_model_len tokens, at most 1 GiB.

    Args:
        num_free_bytes: what a GPU has for the pool under gpu_memory_utilization; None: on a CPU.

    Raises:
        ValueError: not even one block fits.
    """
    if config.num_gpu_blocks_override is not None:
        return config.num_gpu_blocks_override
    bytes_per_block = shape.bytes_per_token * config.block_size
    if config.kv_cache_memory_bytes is not None:
        num_blocks = config.kv_cache_memory_bytes // bytes_per_block
        if num_blocks == 0:
            raise ValueError(
                f"kv_cache_memory_bytes is {config.kv_cache_memory_bytes}, but one block of "
                f"{config.block_size} tokens takes {bytes_per_block} bytes"
            )
        return num_blocks
    if num_free_bytes is not None:
        if num_free_bytes < bytes_per_block:
            raise ValueError(
                f"gpu_memory_utilization is {config.gpu_memory_utilization}, which leaves "
                f"{num_free_bytes} bytes for the pool, but one block of {config.block_size} tokens "
                f"takes {bytes_per_block}: raise it, or lower max_num_batched_tokens or "
                "max_num_seqs"
            )
        return num_free_bytes // bytes_per_block
    wanted = max_num_seqs * -(-max_model_len // config.block_size)
    return max(1, min(wanted, DEFAULT_CPU_BYTES // bytes_per_block))


def num_cpu_blocks_for(config: CacheConfig, shape: CacheShape) -> int:
    """Blocks that swap_space holds.

    Raises:
        ValueError: there is some, but not enough for one block.
    """
    bytes_per_block = shape.bytes_per_token * config.block_size
    num_blocks = int(config.swap_space * 2**30) // bytes_per_block
    if config.swap_space and num_blocks == 0:
        raise ValueError(
            f"swap_space is {config.swap_space} GiB, but one block of {config.block_size} tokens "
            f"takes {bytes_per_block} bytes"
        )
    return num_blocks


def empty_pool(
    shape: CacheShape,
    num_blocks: int,
    block_size: int,
    *,
    block_major: bool,
    device: torch.device | str,
    pin_memory: bool = False,
) -> torch.Tensor:
    """A pool [num_layers, 2, num_blocks, num_kv_heads, block_size, head_dim], not initialised.

    block_major: in memory all layers of a block lie together, otherwise all blocks of a layer. To
    every operator that is only strides.
    """
    inner = (shape.num_kv_heads, block_size, shape.head_dim)
    outer = (shape.num_layers, 2, num_blocks)
    if block_major:
        outer = (num_blocks, shape.num_layers, 2)
    pool = torch.empty(*outer, *inner, dtype=shape.dtype, device=device, pin_memory=pin_memory)
    return pool.permute(1, 2, 0, 3, 4, 5) if block_major else pool


class KVCache:
    """kv_cache [num_layers, 2, num_blocks, num_kv_heads, block_size, head_dim] and its views, on
    one device.

    Not initialised: a slot that was never written holds anything, NaN included, and attention
    never lets it through. cpu_tensor has the same shape but num_cpu_blocks blocks, pinned where
    the cache is on a GPU: swapped-out blocks.

    On a GPU both are block-major: a block over all layers is one run of memory, which the copy
    engines move at the link's rate beside the model's kernels, while runs of one layer are so short
    that a kernel has to move them, at their expense; decodes are as fast either way
    (benchmarks/results, gpu-ops). On a CPU both are layer-major: there is no link, and a
    layer's keys share pages.

    scales: fp32 [num_layers, 2, num_kv_heads], stored value * scale = real value of K and of V; of
    an fp8 cache, None otherwise.

    Raises:
        ValueError: they do not fit in memory; it names the option that sized them. Or scales are
            lacking, of another shape, or given for a cache that has none.
    """

    def __init__(
        self,
        shape: CacheShape,
        num_blocks: int,
        block_size: int,
        num_cpu_blocks: int = 0,
        *,
        device: torch.device | str = "cpu",
        scales: torch.Tensor | None = None,
    ) -> None:
        expected = (shape.num_layers, 2, shape.num_kv_heads) if shape.is_fp8 else None
        if (None if scales is None else tuple(scales.shape)) != expected:
            given = None if scales is None else list(scales.shape)
            raise ValueError(
                f"a cache of {shape.dtype} has scales of shape {expected and list(expected)}, "
                f"got {given}"
            )
        self.num_cpu_blocks = num_cpu_blocks
        self.bytes_per_block = shape.bytes_per_token * block_size
        home = torch.device(device)
        self.scales = None if scales is None else scales.to(home, torch.float32)
        on_gpu = home.type == "cuda"

        def empty(
            num_blocks: int, options: str, device: torch.device | str, pin_memory: bool
        ) -> torch.Tensor:
            try:
                return empty_pool(
                    shape,
                    num_blocks,
                    block_size,
                    block_major=on_gpu,
                    device=device,
                    pin_memory=pin_memory,
                )
            except RuntimeError as error:
                raise ValueError(
                    f"{num_blocks} blocks of {self.bytes_per_block} bytes do not fit in memory: "
                    f"lower {options}"
                ) from error

        self.tensor = empty(
            num_blocks, "num_gpu_blocks_override or kv_cache_memory_bytes", home, False
        )
        self.cpu_tensor = empty(num_cpu_blocks, "swap_space", "cpu", on_gpu)
        self.layers: list[tuple[torch.Tensor, torch.Tensor]] = [
            (layer[0], layer[1]) for layer in self.tensor
        ]

    def copy_blocks(self, pairs: torch.Tensor) -> None:
        """Run copy-on-write pairs int64 [n, 2] on all layers. Mutates the cache."""
        ops.copy_blocks(self.tensor, pairs)

    def swap_out(self, pairs: torch.Tensor) -> None:
        """Move blocks to the CPU: (block, CPU block) int64 [n, 2]. Mutates cpu_tensor."""
        ops.swap_blocks(self.tensor, self.cpu_tensor, pairs)

    def swap_in(self, pairs: torch.Tensor) -> None:
        """Bring blocks back: (CPU block, block) int64 [n, 2]. Mutates the cache."""
        ops.swap_blocks(self.cpu_tensor, self.tensor, pairs)
