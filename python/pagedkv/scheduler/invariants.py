"""The scheduler's books, checked against each other and against the manager. For tests and idle
moments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagedkv.scheduler.slots import FREE

if TYPE_CHECKING:
    from pagedkv.scheduler.scheduler import Scheduler


def check(scheduler: Scheduler) -> None:
    """I8 and the order of turns, and, between steps, that the manager counts as the scheduler does.

    Raises AssertionError. Does not check the manager's own invariants.
    """
    table, manager = scheduler.slots, scheduler._manager
    table.check_invariants()
    waiting = [entry.key for entry in scheduler._queue]
    running = [(int(table.ranks[s]), int(table.seq_ids[s])) for s in scheduler._running.order]
    known = sorted(entry.key for entry in scheduler._entries.values())
    _require(sorted(waiting + running) == known, "I8", f"{waiting} + {running} is not {known}")
    _require(waiting == sorted(waiting), "order of turns", f"{waiting} wait")
    _require(running == sorted(running), "order of turns", f"{running} run")
    for slot, entry in enumerate(scheduler._running.by_slot):
        holder = FREE if entry is None else entry.seq_id
        _require(table.seq_ids[slot] == holder, "slot", f"{slot} is not {holder}'s")
        if entry is not None:
            kept = bool(table.worst_blocks[slot])
            _require(kept == entry.is_reserved, "reserved", f"{entry.seq_id}: {kept}")
    for entry in scheduler._entries.values():
        runs = entry.slot is not None
        swapped = entry.is_swapped
        _require(not (runs and swapped), "I8", f"{entry.seq_id} runs and is swapped out")
        _require(
            (entry.seq_id in manager) == (runs or swapped),
            "blocks",
            f"of {entry.seq_id}: {runs}, {swapped}",
        )
        if swapped:
            _require(manager.is_swapped(entry.seq_id), "swapped", f"{entry.seq_id} is not")
        unit = [one.key for one in entry.unit]
        _require(
            unit == sorted(unit) and entry.key in unit, "unit", f"{entry.key} is not in {unit}"
        )
        for one in entry.unit:
            is_whole = one.unit is entry.unit and (len(unit) == 1 or one.is_swapped)
            _require(is_whole, "unit", f"{one.key} is not swapped out with {unit}")
        if runs and not scheduler._in_flight:
            computed = int(table.num_computed[entry.slot])
            held = manager.num_tokens(entry.seq_id)
            _require(computed == held, "num_computed", f"{computed} is not {held}")
        if runs or swapped:
            freed = table.num_freed_blocks[entry.slot] if runs else entry.num_freed_blocks
            there = manager.num_freed_blocks(entry.seq_id)
            _require(freed == there, "num_freed_blocks", f"{freed} is not {there}")


def _require(holds: bool, name: str, detail: str) -> None:
    if not holds:
        raise AssertionError(f"scheduler invariant broken, {name}: {detail}")
