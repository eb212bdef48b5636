"""What pagedkv._core has to describe a step: its tables, and the groups that share a prefix.

Only a stub, a part of `_core.pyi`, whose words on arrays and errors hold here too.
"""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pagedkv._core import BlockManager

class StepTables:
    """Writes a batch's tables into the caller's buffers, in one call; remembers per slot what it
    last wrote into each of up to four block-table buffers (a pinned pair used alternately needs
    two), and keeps those buffers alive."""

    def __init__(self, manager: BlockManager, max_num_slots: int, max_num_blocks: int) -> None:
        """max_num_blocks: entries of a block-table row."""
    def write(
        self,
        seq_ids: ArrayLike,
        query_lens: ArrayLike,
        slots: ArrayLike,
        *,
        block_tables: Any,
        slot_mapping: Any,
        positions: Any,
        seq_lens: Any,
        query_start_loc: Any,
        only_changed: bool = False,
        first_written: Any = None,
    ) -> int:
        """Write the tables of one step.

        Args:
            seq_ids: [num_seqs] int64, each once.
            query_lens: [num_seqs]: this step's tokens of each sequence, already appended.
            slots: [num_seqs]: the sequence's stable row in block_tables, each once.
            block_tables: int32 [more rows than the largest slot, at least max_num_blocks]. Entries
                past a sequence's table, and those that free_behind gave back, are left alone.
            slot_mapping: int64 [at least num_tokens].
            positions: int64 [at least num_tokens].
            seq_lens: int32 [at least num_seqs].
            query_start_loc: int32 [at least num_seqs + 1].
            only_changed: block-table entries that this buffer holds already are not written again.
            first_written: int32 [at least num_seqs]: of each sequence's table, the entry from which
                on it was written by this call; as many as it has where none was. None: not wanted.

        The buffers are writable NumPy arrays or torch CPU tensors and are written in place.

        Returns the number of tokens.

        Raises:
            InvariantViolation: I5, a token would be written into a shared or published block, or
                one that was given back.

        Example: block_size 4, sequence 7 with blocks [9, 2] and 6 tokens, the last one new:
        write([7], [1], [3], ...) writes block_tables[3, :2] = [9, 2], slot_mapping[0] = 2 * 4 + 1,
        positions[0] = 5, seq_lens[0] = 6, query_start_loc[:2] = [0, 1] and returns 1.
        """
    def forget(self, block_tables: Any) -> None:
        """This buffer's content is not known any more (somebody else wrote into it): the next
        write fills its rows whole. Also lets go of its memory."""
    @property
    def num_entries_written(self) -> int:
        """Block-table entries written so far."""

class PrefixGrouper:
    """Which sequences of a batch share a prefix that is worth attending to once.
    `block_manager/prefix_costs.py` has the rule, measured costs, arguments and results."""

    def __init__(
        self,
        block_size: int,
        *,
        max_query_len: int = 1,
        window: int = 0,
        per_step: float = 0.0,
        per_row: float = 0.0,
        per_row_key: float = 0.0,
        seqs_per_tile: int = 1,
    ) -> None: ...
    def find(
        self,
        block_tables: Any,
        seq_lens: ArrayLike,
        query_lens: ArrayLike,
        slots: ArrayLike | None = None,
    ) -> NDArray[np.int32]:
        """Groups among neighbouring sequences, as rows of prefix_groups."""
    def arrange(
        self,
        block_tables: Any,
        seq_lens: ArrayLike,
        query_lens: ArrayLike,
        slots: ArrayLike | None = None,
    ) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """(order, groups) where the sequences may change places."""

class StepState:
    """What a device knows of the running sequences, as an image of its memory, and the words of it
    that a step changes. `include/pagedkv/core/step_state.h` has its sections and rules."""

    def __init__(self, max_num_slots: int, max_num_blocks: int, block_size: int) -> None: ...
    @property
    def image(self) -> NDArray[np.int32]:
        """All words, writable: block tables are written into the first section of it."""
    def section(self, name: str) -> tuple[int, int]:
        """Its first word and its number of words; ValueError for a name that is none."""
    def update(
        self,
        slots: ArrayLike,
        query_lens: ArrayLike,
        seq_lens: ArrayLike,
        first_written: ArrayLike,
        sample_rows: ArrayLike,
        sample_draws: ArrayLike,
        params: Any,
        token_ids: Any,
        padded: tuple[int, int] | None = None,
    ) -> None:
        """Bring the image to where the device has to be when a step begins, remember what changes,
        and count the step's tokens into it.

        Args:
            slots, query_lens, seq_lens, first_written: [num_rows], as StepTables.write has them.
            sample_rows, sample_draws: [num_samples]: rows that get tokens, ascending; the draws of
                one row count up.
            params: int32 [max_num_slots, 8], writable.
            token_ids: int32 [max_num_slots, max_model_len], writable; -1: the step before chooses.
            padded: tokens and rows of the step with rows of padding behind its own: each has a
                token and a sample, as far as there are so many, the last all that are left; there
                are as many samples as rows then. None: no padding.
        """
    def tell(self, name: str, values: ArrayLike) -> None:
        """The section's first words become these."""
    def take(self) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int32]]:
        """What is to be sent: the step's token ids from the first one on that is known (-1 among
        them: the step before chooses); indices and values of changed words, each word once. Valid
        until the next call; the words count as sent.
        """
    def forget(self) -> None:
        """All words are 0 again, here and on the device. The tables' writer must forget too."""

def token_ids(values: list[int], vocab_size: int) -> NDArray[np.int32] | None:
    """[len(values)], or None if one of them is no int from 0 to vocab_size - 1."""
