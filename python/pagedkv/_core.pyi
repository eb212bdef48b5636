"""The compiled core: block manager and step tables (csrc/core, csrc/bindings). No torch.

Arrays are NumPy arrays, or anything with the buffer protocol or `__array__`; ids of sequences are int64, of tokens int32 or int64.
Every mutating call either happens whole or raises and changes nothing.
"""

import enum
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

class OutOfBlocks(RuntimeError):
    """The pool has fewer blocks than the call needs; the message gives both numbers."""

class UnknownSequence(KeyError): ...
class DoubleFree(RuntimeError): ...
class InvariantViolation(RuntimeError): ...

class CanAllocate(enum.Enum):
    OK = ...
    LATER = ...
    NEVER = ...

class Statistics:
    """One consistent set of counters. Blocks add up: free + cached_idle + referenced + in_transit + draining = num_blocks."""

    num_blocks: int
    num_free: int  # on the free list
    num_cached_idle: int  # ref count 0, content still findable; allocatable
    num_referenced: int
    num_shared: int  # ref count >= 2, a part of num_referenced
    num_in_transit: int
    num_draining: int
    num_cpu_blocks: int
    num_cpu_free: int
    num_sequences: int
    num_tokens: int  # token positions held by sequences, shared blocks counted once
    token_occupancy: float  # num_tokens / (num_blocks * block_size)
    block_occupancy: float  # (referenced + in_transit + draining) / num_blocks
    prefix_cache_queries: int  # tokens looked up
    prefix_cache_hits: int  # tokens found
    num_evictions: int
    num_copies: int  # copy-on-write
    num_swapped_out: int  # blocks
    num_swapped_in: int

class Snapshot:
    """An immutable copy of the whole state, safe to read on any thread while the owner goes on."""

    version: int
    block_size: int
    statistics: Statistics
    ref_counts: NDArray[np.int32]  # [num_blocks]
    states: NDArray[np.uint8]  # [num_blocks] BlockState values
    seq_ids: NDArray[np.int64]  # [num_sequences]
    seq_num_tokens: NDArray[np.int64]  # [num_sequences]
    seq_start_loc: NDArray[np.int64]  # [num_sequences + 1] into block_ids
    block_ids: NDArray[np.int32]

class BlockState(enum.Enum):
    FREE = 0
    CACHED_IDLE = 1
    REFERENCED = 2
    IN_TRANSIT = 3
    DRAINING = 4

class BlockManager:
    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        *,
        num_cpu_blocks: int = 0,
        watermark: float = 0.01,
        enable_prefix_caching: bool = True,
        hash_secret: bytes | None = None,  # None: random, one per process
        hash_bits: int = 128,  # fewer bits only weaken the hash (tests); a hit is verified by tokens either way
        shuffle_seed: int | None = None,  # initial order of the free list
    ) -> None: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def num_allocatable_blocks(self) -> int:
        """Free plus cached-idle blocks: what an allocation can take now."""
    # -- one sequence ------------------------------------------------------------------------------------------------
    def match(self, token_ids: ArrayLike, *, extra_key: bytes = b"") -> int:
        """Tokens of a cached prefix, a multiple of block_size, at most len - 1. Changes nothing, counts nothing."""
    def can_allocate(
        self,
        token_ids: ArrayLike,
        *,
        max_new_tokens: int | None = None,
        reserve_tokens: int = 0,
        extra_key: bytes = b"",
    ) -> CanAllocate:
        """NEVER if len(token_ids) + reserve_tokens cannot fit in the whole pool; LATER if the blocks for the cached prefix plus
        max_new_tokens (default: all the rest) would leave fewer than the watermark; otherwise OK."""
    def allocate(
        self,
        seq_id: int,
        token_ids: ArrayLike,
        *,
        max_new_tokens: int | None = None,
        extra_key: bytes = b"",
    ) -> int:
        """Create seq_id, take its cached prefix, and blocks for up to max_new_tokens tokens after it (default: all). Returns the number of
        cached tokens. The sequence then holds cached + min(rest, max_new_tokens) tokens; later chunks come by append."""
    def append(self, seq_id: int, num_tokens: int = 1) -> list[tuple[int, int]]:
        """Make room for num_tokens more. Returns copy-on-write pairs (source, destination) to run before the next write."""
    def fork(self, parent_id: int, child_id: int) -> None: ...
    def free(self, seq_id: int) -> None:
        """Drop the sequence's references. Unknown id: UnknownSequence; an id freed before: DoubleFree."""
    def publish(self, seq_id: int, token_ids: ArrayLike, num_computed_tokens: int) -> None:
        """token_ids: the ids that follow those known so far (the prompt is known from allocate). Full blocks below num_computed_tokens
        become findable."""
    def swap_out(self, seq_ids: ArrayLike) -> list[tuple[int, int]]:
        """Move the exclusively held blocks of these sequences to CPU blocks: pairs (block, CPU block). Shared blocks stay referenced."""
    def swap_in(self, seq_ids: ArrayLike) -> list[tuple[int, int]]: ...
    def num_swap_out_blocks(self, seq_ids: ArrayLike) -> int: ...
    def num_swap_in_blocks(self, seq_ids: ArrayLike) -> int: ...
    def num_tokens(self, seq_id: int) -> int: ...
    def block_table(self, seq_id: int) -> NDArray[np.int32]:
        """[num_blocks of the sequence]; a swapped-out entry is -1 - cpu_block."""
    def is_swapped(self, seq_id: int) -> bool: ...
    def __contains__(self, seq_id: int) -> bool: ...
    # -- batches: one call a step ------------------------------------------------------------------------------------
    def num_blocks_needed(self, seq_ids: ArrayLike, counts: ArrayLike) -> int:
        """Blocks that append_batch with the same arguments would take, copy-on-write included."""
    def append_batch(self, seq_ids: ArrayLike, counts: ArrayLike) -> NDArray[np.int64]:
        """Copy-on-write pairs [n, 2]."""
    def fork_batch(self, parent_ids: ArrayLike, child_ids: ArrayLike) -> None: ...
    def free_batch(self, seq_ids: ArrayLike) -> None: ...
    def publish_batch(
        self, seq_ids: ArrayLike, token_ids: ArrayLike, counts: ArrayLike, num_computed_tokens: ArrayLike
    ) -> None:
        """token_ids: concatenated, counts[i] of them belong to seq_ids[i]."""
    # -- steps in flight ---------------------------------------------------------------------------------------------
    def begin_step(self) -> int:
        """A step is launched: blocks freed, or swapped out or in, from here on stay draining or in transit until end_step of it."""
    def end_step(self, step_id: int) -> None: ...
    # -- the whole ---------------------------------------------------------------------------------------------------
    def reset_prefix_cache(self) -> int:
        """Forget every cached block; idle ones become free. Returns how many blocks were findable."""
    def statistics(self) -> Statistics: ...
    def snapshot(self) -> Snapshot: ...
    def ref_counts(self) -> NDArray[np.int32]: ...
    def states(self) -> NDArray[np.uint8]: ...
    def take_evicted(self) -> NDArray[np.int32]:
        """Blocks whose cached content was evicted since the last call."""
    def check_invariants(self) -> None:
        """Raises InvariantViolation naming the invariant (I1..I10 of docs/invariants)."""

class StepTables:
    """Writes a batch's tables into the caller's buffers, in one call; remembers per slot what it last wrote."""

    def __init__(self, manager: BlockManager, max_num_slots: int, max_num_blocks: int) -> None: ...
    def write(
        self,
        seq_ids: ArrayLike,  # [num_seqs] int64
        query_lens: ArrayLike,  # [num_seqs]: this step's tokens, already appended
        slots: ArrayLike,  # [num_seqs]: stable row of the device state per sequence
        *,
        block_tables: Any,  # int32 [>= max slot + 1, max_num_blocks], row per slot
        slot_mapping: Any,  # int64 [>= num_tokens]
        positions: Any,  # int64 [>= num_tokens]
        seq_lens: Any,  # int32 [>= num_seqs]
        query_start_loc: Any,  # int32 [>= num_seqs + 1]
        only_changed: bool = False,
    ) -> int:
        """Returns the number of tokens. only_changed: block-table entries that this buffer set already holds are not written again."""
    def forget(self, block_tables: Any) -> None:
        """The content of this buffer is not known any more; the next write fills it whole."""
    @property
    def num_entries_written(self) -> int: ...
