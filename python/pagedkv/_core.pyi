"""The compiled core: block manager and step tables (csrc/core, csrc/bindings). No torch.

Arrays of integers are NumPy arrays of any integer dtype, or anything NumPy converts to one (lists,
torch CPU tensors); contiguous int64 for ids and counts and int32 for tokens are taken without a
copy. Every mutating call either happens whole or raises and changes nothing.

Errors, beside those below: ValueError for a value that is not allowed (negative, too large, twice
in a batch, of another length), TypeError for what is not an integer or an array of integers. Each
message names the argument, the value and what is allowed.

Copies. append, swap_out and swap_in return (source, destination) pairs. They are an ordered
program: the caller runs them in the order in which the calls returned them, before the kernels of
the step being built.
"""

import enum

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pagedkv._core_step import PrefixGrouper as PrefixGrouper
from pagedkv._core_step import StepState as StepState
from pagedkv._core_step import StepTables as StepTables
from pagedkv._core_step import token_ids as token_ids

FREED_BLOCK: int
"""-2**31: entry of a block table whose block free_behind gave back."""

class OutOfBlocks(RuntimeError):
    """A pool has fewer blocks than the call needs; the message gives both numbers."""

class UnknownSequence(KeyError):
    """No sequence with this id; the message says if it was freed."""

class DoubleFree(RuntimeError):
    """A sequence that was freed before (the last 4,096 freed ids are remembered)."""

class InvariantViolation(RuntimeError):
    """Names the invariant, I1 to I10."""

class CanAllocate(enum.Enum):
    OK = ...
    LATER = ...
    NEVER = ...

class BlockState(enum.Enum):
    FREE = 0  # on the free list
    CACHED_IDLE = 1  # ref count 0, content findable; an allocation may evict it
    REFERENCED = 2  # held by at least one block table
    IN_TRANSIT = 3  # being swapped beside a launched step
    DRAINING = 4  # ref count 0, but a launched step may still touch it

class MissReason(enum.Enum):
    NONE = 0  # nothing is missing but what has to be computed in any case
    NEVER_CACHED = 1  # as far as is remembered; under another extra_key counts as never
    EVICTED = 2  # it was cached once
    CACHING_OFF = 3
    ON_CPU = 4  # it is in the CPU pool, and bringing it back would cost more than computing it

class PrefixMiss:
    """Why the cached prefix of a prompt ends where it does. What was evicted is remembered by its
    keyed hash, about as many blocks as the pool has (1,024 to 65,536)."""

    @property
    def reason(self) -> MissReason: ...
    @property
    def evicted_in(self) -> int: ...  # EVICTED: the step that was being built, the first is 1
    @property
    def evicted_for(self) -> int: ...  # EVICTED: the seq_id that needed the block

class Statistics:
    """One consistent set of counters.

    num_free + num_cached_idle + num_referenced + num_in_transit + num_draining = num_blocks.
    """

    @property
    def num_blocks(self) -> int: ...
    @property
    def num_free(self) -> int: ...
    @property
    def num_cached_idle(self) -> int: ...
    @property
    def num_referenced(self) -> int: ...
    @property
    def num_shared(self) -> int: ...  # ref count at least 2, whatever the state
    @property
    def num_in_transit(self) -> int: ...
    @property
    def num_draining(self) -> int: ...
    @property
    def num_cpu_blocks(self) -> int: ...
    @property
    def num_cpu_free(self) -> int: ...
    @property
    def num_cpu_cached_idle(self) -> int: ...  # evicted content in the CPU pool, findable
    @property
    def num_sequences(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...  # held in the pool, a shared block counted once
    @property
    def token_occupancy(self) -> float: ...  # num_tokens / (num_blocks * block_size)
    @property
    def block_occupancy(self) -> float: ...  # (referenced, in transit, draining) / num_blocks
    @property
    def prefix_cache_queries(self) -> int: ...  # tokens that allocate looked up
    @property
    def prefix_cache_hits(self) -> int: ...  # tokens that allocate found
    @property
    def prefix_cache_cpu_hits(self) -> int: ...  # of these, tokens that came back from the CPU pool
    @property
    def prefix_cache_misses(self) -> int: ...  # tokens that allocate looked up and did not find
    @property
    def prefix_cache_evictions(self) -> int: ...  # cached tokens given up for an allocation
    @property
    def num_evictions(self) -> int: ...  # blocks of those tokens
    @property
    def num_offloaded(self) -> int: ...  # of these, blocks whose content moved to the CPU pool
    @property
    def num_onloaded(self) -> int: ...  # blocks whose content came back from there for a hit
    @property
    def num_offload_drops(self) -> int: ...  # content given up in the CPU pool, for other
    @property
    def num_copies(self) -> int: ...  # copy-on-write, blocks
    @property
    def num_swapped_out(self) -> int: ...  # blocks
    @property
    def num_swapped_in(self) -> int: ...  # blocks

class Snapshot:
    """An immutable copy of the whole state, safe to read on any thread while the owner goes on.

    The arrays are read-only views of it.
    """

    @property
    def version(self) -> int: ...  # rises with every snapshot of one manager
    @property
    def block_size(self) -> int: ...
    @property
    def statistics(self) -> Statistics: ...
    @property
    def ref_counts(self) -> NDArray[np.int32]: ...  # [num_blocks]
    @property
    def states(self) -> NDArray[np.uint8]: ...  # [num_blocks], BlockState values
    @property
    def cpu_states(self) -> NDArray[np.uint8]: ...  # [num_cpu_blocks], BlockState values
    @property
    def seq_ids(self) -> NDArray[np.int64]: ...  # [num_sequences]
    @property
    def seq_num_tokens(self) -> NDArray[np.int64]: ...  # [num_sequences]
    @property
    def seq_start_loc(self) -> NDArray[np.int64]:
        """[num_sequences + 1]: sequence i has block_ids[loc[i] : loc[i + 1]]."""
    @property
    def block_ids(self) -> NDArray[np.int32]:
        """Block tables one after another; -1 - i is block i of the CPU pool, FREED_BLOCK none."""

class BlockManager:
    """The whole memory policy of a paged KV cache, as arithmetic on ids.

    Owns the pool, the CPU pool, the prefix cache and every sequence's block table. One thread owns
    a manager. seq_ids are the caller's, any int64; a freed one may be used again.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        *,
        num_cpu_blocks: int = 0,
        watermark: float = 0.01,
        enable_prefix_caching: bool = True,
        hash_secret: bytes | None = None,
        hash_bits: int = 128,
        shuffle_seed: int | None = None,
        enable_kv_offloading: bool = False,
    ) -> None:
        """
        Args:
            num_blocks: blocks of the pool, 1 to 2**26.
            block_size: tokens of a block, 1 to 65536.
            num_cpu_blocks: blocks of the CPU pool, 0 to 2**26.
            watermark: fraction of the pool that can_allocate leaves, at least 0 and below 1.
            enable_prefix_caching: False: nothing is ever found, publish only checks its arguments.
            hash_secret: key of the block hash, 16 random bytes or more; None: random, one per
                process.
            hash_bits: 1 to 128; fewer only weaken the hash, for tests: a hit is verified by tokens
                and parent either way.
            shuffle_seed: shuffles the initial order of the free list; None: rising ids.
            enable_kv_offloading: evicted content moves to the CPU pool and comes back for a hit
                (take_moves). Needs CPU blocks and prefix caching.
        """
    @property
    def num_blocks(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def has_offloading(self) -> bool: ...
    @property
    def num_allocatable_blocks(self) -> int:
        """Free plus cached-idle blocks: what an allocation can take now."""
    @property
    def num_returning_blocks(self) -> int:
        """Blocks that nobody holds any more, but that launched steps may still touch: an allocation
        can take them once the steps in flight have ended."""
    # -- one sequence ----------------------------------------------------------------------------
    def match(self, token_ids: ArrayLike, *, extra_key: bytes = b"") -> int:
        """Tokens of a cached prefix: a multiple of block_size, at most len - 1. Changes nothing,
        counts nothing. extra_key: everything but tokens that changes K/V (adapter, salt, ...)."""
    def can_allocate(
        self,
        token_ids: ArrayLike,
        *,
        max_new_tokens: int | None = None,
        reserve_tokens: int = 0,
        extra_key: bytes = b"",
        window: int = 0,
    ) -> CanAllocate:
        """NEVER if len(token_ids) + reserve_tokens do not fit in the whole pool; with a window, if
        max_window_blocks(window, max_new_tokens) do not either. LATER if the blocks for the cached
        prefix plus max_new_tokens (default: all the rest) cannot be taken now, or would leave fewer
        than the watermark while other sequences live. Otherwise OK."""
    def allocate(
        self,
        seq_id: int,
        token_ids: ArrayLike,
        *,
        max_new_tokens: int | None = None,
        extra_key: bytes = b"",
        window: int = 0,
    ) -> int:
        """Create seq_id, take its cached prefix, and blocks for up to max_new_tokens tokens after
        it (default: all).

        Returns the number of cached tokens. The sequence then holds cached + min(rest,
        max_new_tokens) tokens; later chunks come by append. Looks at no watermark. window: a token
        sees the last window tokens, itself included (0: all); of a cached prefix only the blocks
        that the next token sees are held then, as if free_behind had given back the others.

        Raises:
            OutOfBlocks, ValueError (seq_id exists, token_ids empty or negative).

        Example: block_size 4, [1, 2, 3, 4] published; allocate(7, [1, 2, 3, 4, 5]) returns 4, and
        sequence 7 holds that block and a new one.
        """
    def append(self, seq_id: int, num_tokens: int = 1) -> list[tuple[int, int]]:
        """Make room for num_tokens more. Returns copy-on-write pairs (source, destination)."""
    def fork(self, parent_id: int, child_id: int) -> None:
        """child_id is new and shares every block of parent_id. What the parent holds should have
        been computed: a shared block that is still to be written is refused by StepTables (I5)."""
    def free(self, seq_id: int) -> None:
        """Drop the sequence's references. Unknown id: UnknownSequence; freed before: DoubleFree."""
    def free_behind(self, seq_id: int, first_needed_token: int) -> int:
        """Give back the blocks wholly before position first_needed_token, which no later step will
        read: for a sliding window and num_computed tokens computed, num_computed - window + 1.
        Returns how many.

        The block table keeps its logical positions, with FREED_BLOCK in theirs. Published blocks
        stay findable until they are evicted. The last published block stays held while more can
        follow it, so a window shorter than a block keeps one more; a block behind the window that
        was not published ends the sequence's publishing, and so does swap_out of the first block
        that is left. Values that do not rise free nothing.

        Example: block_size 4, table [5, 3, 7], 10 tokens computed, window 5: position 10 sees 6 to
        10, so free_behind(0, 6) gives back block 5 and the table is [FREED_BLOCK, 3, 7].
        """
    def max_window_blocks(self, window: int, num_tokens: int = 1) -> int:
        """The most blocks that a sequence holds at once which computes num_tokens a step and calls
        free_behind after each: 1 + ceil((max(window - 1, block_size) + num_tokens - 1) /
        block_size)."""
    def publish(self, seq_id: int, token_ids: ArrayLike, num_computed_tokens: int) -> None:
        """Full blocks below num_computed_tokens become findable.

        Args:
            token_ids: the ids that follow those known so far (the prompt is known from allocate).
            num_computed_tokens: positions whose K/V is computed; at most the tokens held, and at
                most the ids known.

        Where equal content is findable already, the sequence's entry changes to that block and its
        own copy is released. After a reset_prefix_cache a sequence alive then publishes nothing.
        """
    def num_tokens(self, seq_id: int) -> int: ...  # positions held, computed or not
    def block_table(self, seq_id: int) -> NDArray[np.int32]:
        """[num_blocks of the sequence], a copy; a swapped-out entry is -1 - cpu_block, and one that
        free_behind gave back FREED_BLOCK."""
    def num_freed_blocks(self, seq_id: int) -> int: ...  # leading FREED_BLOCK entries of its table
    def is_swapped(self, seq_id: int) -> bool: ...
    def __contains__(self, seq_id: int) -> bool: ...
    # -- batches: one call a step; a sequence stands at most once in a batch --------------------
    def num_blocks_needed(self, seq_ids: ArrayLike, counts: ArrayLike) -> int:
        """Blocks that append_batch with the same arguments would take, copy-on-write included."""
    def append_batch(self, seq_ids: ArrayLike, counts: ArrayLike) -> NDArray[np.int64]:
        """counts[i] more tokens for seq_ids[i]. Returns copy-on-write pairs [n, 2]."""
    # A parent may stand several times.
    def fork_batch(self, parent_ids: ArrayLike, child_ids: ArrayLike) -> None: ...
    def free_batch(self, seq_ids: ArrayLike) -> None: ...
    def free_behind_batch(self, seq_ids: ArrayLike, first_needed_tokens: ArrayLike) -> int: ...
    def publish_batch(
        self,
        seq_ids: ArrayLike,
        token_ids: ArrayLike,
        counts: ArrayLike,
        num_computed_tokens: ArrayLike,
    ) -> None:
        """token_ids: concatenated, counts[i] of them belong to seq_ids[i]."""
    # -- swap ------------------------------------------------------------------------------------
    def swap_out(self, seq_ids: ArrayLike) -> list[tuple[int, int]]:
        """Move the blocks that these sequences alone hold to CPU blocks, one that several of them
        share once; blocks with a holder outside stay referenced. Returns pairs (block, CPU block).
        Published blocks stay findable until they are evicted. Raises OutOfBlocks if the CPU pool
        is short."""
    def swap_in(self, seq_ids: ArrayLike) -> list[tuple[int, int]]:
        """The way back: pairs (CPU block, block). They are published again at the next publish."""
    def num_swap_out_blocks(self, seq_ids: ArrayLike) -> int: ...  # that swap_out would take
    def num_swap_in_blocks(self, seq_ids: ArrayLike) -> int: ...  # that swap_in would take
    # -- steps in flight -------------------------------------------------------------------------
    def begin_step(self) -> int:
        """A step is launched: blocks freed, or swapped out or in, from here on stay draining or in
        transit until end_step of it. At most 16 steps may be in flight. Returns 1, 2, 3, ..."""
    def end_step(self, step_id: int, *, has_failed: bool = False) -> None:
        """Steps end in the order of their launch. has_failed: it is not known which of its moves
        have run, so what they moved cannot be found any more."""
    # -- offloading ------------------------------------------------------------------------------
    def take_moves(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Content that allocate, append and swap_in have moved between the pools since the last
        call: pairs [n, 2] (block, CPU block), and (CPU block, block) to run after all of them. Both
        run before the pairs of calls that follow, and before the step that begin_step launches
        next, which demands that they were taken."""
    @property
    def swap_in_cost(self) -> float:
        """What bringing a block back costs, as a multiple of what computing it costs; 0: nothing.
        From 1 on no block is moved out, and a cached prefix ends where the next blocks would cost
        more than they save."""
    @swap_in_cost.setter
    def swap_in_cost(self, cost: float) -> None: ...
    # -- the whole -------------------------------------------------------------------------------
    def reset_prefix_cache(self) -> int:
        """Forget every cached block; idle ones become free. Returns how many were findable."""
    def statistics(self) -> Statistics: ...
    def snapshot(self) -> Snapshot: ...
    def ref_counts(self) -> NDArray[np.int32]: ...  # [num_blocks], a copy
    def states(self) -> NDArray[np.uint8]: ...  # [num_blocks], BlockState values, a copy
    def cpu_states(self) -> NDArray[np.uint8]: ...  # [num_cpu_blocks], BlockState values, a copy
    def take_evicted(self) -> NDArray[np.int64]:
        """Evictions since the last call, oldest first: [n, 4], block_id (-1: it was in the CPU pool
        and is given up there), the seq_id that needed the room, steps launched since it went idle,
        CPU block (-1: it is given up). Of more than 16,384 the last half."""
    @property
    def last_miss(self) -> PrefixMiss:
        """Why the prefix that the last allocate found ends where it does."""
    def check_invariants(self) -> None:
        """Raises InvariantViolation naming the invariant (I1 to I10)."""
