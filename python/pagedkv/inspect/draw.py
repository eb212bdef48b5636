"""The paged cache as text: the pool as cells lettered by owner, then each sequence's block table.

Draws one `Snapshot`; the caller gives the sequences' names. Called by the CLI (`draw`, `generate
--draw`) and the examples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import pairwise

from rich.style import Style
from rich.text import Text

from pagedkv._core import FREED_BLOCK, BlockState, Snapshot

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_COLORS = ("cyan", "magenta", "yellow", "green", "blue", "red", "bright_cyan", "bright_magenta")
_SHARED = Style(bold=True, reverse=True)
_QUIET = Style(dim=True)
_STATE_CELLS = {
    BlockState.FREE.value: "··",
    BlockState.CACHED_IDLE.value: "c·",
    BlockState.IN_TRANSIT.value: "~~",
    BlockState.DRAINING.value: "--",
}
_FILL_WIDTH = 8


def draw_cache(
    snapshot: Snapshot,
    names: Mapping[int, str] | None = None,
    *,
    cells_per_row: int = 16,
    max_pool_rows: int = 32,
    max_sequences: int = 16,
) -> Text:
    """Draw a snapshot of the block manager.

    Args:
        snapshot: state of the manager (`BlockManager.snapshot()`).
        names: name shown for each seq_id; others are shown by number.
        cells_per_row: blocks in one line of the pool and of a block table.
        max_pool_rows: lines of the pool (rows that are free together take one); the rest is
            counted, not drawn.
        max_sequences: sequences with a table of their own; the rest is counted.

    Returns:
        Styled text; `.plain` is the same picture without colours.

    Raises:
        ValueError: a bound below 1.

    Example: two sequences that share block 0 of four blocks of four tokens::

        block   0 AB A  B  ··
    """
    for name, value in (
        ("cells_per_row", cells_per_row),
        ("max_pool_rows", max_pool_rows),
        ("max_sequences", max_sequences),
    ):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    tables = _tables(snapshot)
    letters = {seq_id: _LETTERS[i % len(_LETTERS)] for i, seq_id in enumerate(tables)}
    text = Text(no_wrap=True)
    _draw_summary(text, snapshot)
    _draw_pool(text, snapshot, tables, letters, cells_per_row, max_pool_rows)
    shown = list(tables)[:max_sequences]
    for index, seq_id in enumerate(shown):
        label = (names or {}).get(seq_id, str(seq_id))
        num_tokens = int(snapshot.seq_num_tokens[index])
        table, letter = tables[seq_id], letters[seq_id]
        text.append(f"\n{letter}", _style(letter) + Style(bold=True))
        num_freed = table.count(FREED_BLOCK)
        freed = f", {num_freed} more given back behind its window" if num_freed else ""
        text.append(f" = {label}: {num_tokens} tokens in {len(table) - num_freed} blocks{freed}\n")
        _draw_table(text, snapshot, table, letter, cells_per_row)
        text.append("  last block " + _fill(num_tokens, len(table), snapshot.block_size) + "\n")
    if len(shown) < len(tables):
        text.append(f"\n... and {len(tables) - len(shown)} more sequences\n", _QUIET)
    return text


def _tables(snapshot: Snapshot) -> dict[int, list[int]]:
    """Block table of each sequence, in the snapshot's order."""
    bounds = pairwise(snapshot.seq_start_loc.tolist())
    return {
        seq_id: snapshot.block_ids[begin:end].tolist()
        for seq_id, (begin, end) in zip(snapshot.seq_ids.tolist(), bounds, strict=True)
    }


def _style(letter: str) -> Style:
    return Style(color=_COLORS[_LETTERS.index(letter) % len(_COLORS)])


def _draw_summary(text: Text, snapshot: Snapshot) -> None:
    stats = snapshot.statistics
    capacity = stats.num_blocks * snapshot.block_size
    text.append(f"KV cache: {stats.num_blocks} blocks of {snapshot.block_size} tokens\n", "bold")
    text.append(
        f"  blocks  {stats.num_referenced} referenced ({stats.num_shared} shared), "
        f"{stats.num_cached_idle} cached, {stats.num_free} free: "
        f"{100 * stats.block_occupancy:.1f}% occupied\n"
        f"  tokens  {stats.num_tokens} of {capacity}: {100 * stats.token_occupancy:.1f}% occupied\n"
    )


def _draw_pool(
    text: Text,
    snapshot: Snapshot,
    tables: Mapping[int, list[int]],
    letters: Mapping[int, str],
    cells_per_row: int,
    max_pool_rows: int,
) -> None:
    owners: dict[int, list[str]] = {}
    for seq_id, table in tables.items():
        for block_id in table:
            owners.setdefault(block_id, []).append(letters[seq_id])
    states = snapshot.states.tolist()
    text.append(
        "\npool (letters: owners, ·· free, c· cached, ~~ in transit, -- draining)\n", _QUIET
    )
    drawn = 0
    first = 0
    while first < len(states) and drawn < max_pool_rows:
        end = _end_of_free_run(states, first, cells_per_row)
        if end - first > cells_per_row:
            text.append(f"block {first:>4} to {end - 1}: free\n", _QUIET)
        else:
            end = min(first + cells_per_row, len(states))
            text.append(f"block {first:>4} ", _QUIET)
            for block_id in range(first, end):
                _draw_cell(text, states[block_id], owners.get(block_id, []))
            text.append("\n")
        first = end
        drawn += 1
    if first < len(states):
        text.append(f"... and {len(states) - first} more blocks\n", _QUIET)


def _end_of_free_run(states: list[int], first: int, cells_per_row: int) -> int:
    """The end of the whole rows from `first` on that are free; `first` if the first row is not."""
    end = first
    while end < len(states):
        row = states[end : end + cells_per_row]
        if any(state != BlockState.FREE.value for state in row):
            break
        end += len(row)
    return end


def _draw_cell(text: Text, state: int, owners: list[str]) -> None:
    if state != BlockState.REFERENCED.value:
        text.append(_STATE_CELLS[state], _QUIET)
    elif len(owners) > 2:
        text.append(owners[0] + "+", _SHARED)
    else:
        label = "".join(owners) or "?"
        text.append(label, _SHARED if len(owners) == 2 else _style(label[0]))
        text.append(" " * (2 - len(label)))
    text.append(" ")


def _draw_table(
    text: Text, snapshot: Snapshot, table: list[int], letter: str, cells_per_row: int
) -> None:
    """Logical index, block id and ref count of each entry; a swapped one (-1 - cpu_block) counts
    the tables that name it, and one given back behind a window is a dot."""
    holders = Counter(snapshot.block_ids.tolist()) if min(table, default=0) < 0 else Counter[int]()
    holders[FREED_BLOCK] = 0
    for first in range(0, len(table), cells_per_row):
        part = table[first : first + cells_per_row]
        counts = [int(snapshot.ref_counts[b]) if b >= 0 else holders[b] for b in part]
        logical = "".join(f"{first + i:>6}" for i in range(len(part)))
        text.append("  logical  " + logical + "\n", _QUIET)
        text.append("  block    ")
        for block_id, count in zip(part, counts, strict=True):
            shown = str(block_id) if block_id >= 0 else f"cpu{-1 - block_id}"
            if block_id == FREED_BLOCK:
                shown = "."
            text.append(f"{shown:>6}", Style(bold=True) if count > 1 else _style(letter))
        text.append("\n  refs     ")
        text.append("".join(f"{count:>6}" for count in counts) + "\n", _QUIET)


def _fill(num_tokens: int, num_blocks: int, block_size: int) -> str:
    """How full the last block is, as a bar and as numbers."""
    used = max(0, num_tokens - max(0, num_blocks - 1) * block_size)
    filled = round(_FILL_WIDTH * used / block_size)
    return f"[{'#' * filled}{'.' * (_FILL_WIDTH - filled)}] {used}/{block_size} tokens"
