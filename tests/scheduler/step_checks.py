"""What holds of every step that a scheduler makes, and of what it keeps for requests to come: what
`Simulation` looks at after each call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from simulation import Simulation

    from pagedkv.records import ScheduledStep


def check_step(simulation: Simulation, step: ScheduledStep) -> None:
    lens = step.query_lens
    assert (lens > 0).all()
    assert lens.sum() == step.num_tokens <= simulation.max_num_batched_tokens
    assert (np.diff((lens != 1).astype(int)) >= 0).all(), f"single tokens first: {lens}"
    assert np.unique(step.slots).size == step.slots.size
    for pairs in (step.swap_out, step.swap_in, step.copies):
        assert np.unique(pairs[:, 1]).size == len(pairs), "two moves into one block"
    in_step = {simulation.scheduler.request_at(int(slot)).request_id for slot in step.slots}  # type: ignore[union-attr]
    # Only where a beam search found everything in its way preempted, some start again at once;
    # and a step that comes after a wait tells of those preempted before it.
    searches = any(group.search for group in simulation.scheduler._forking.groups.values())
    if not searches and not simulation.has_waited:
        assert not in_step & {one.request_id for one in step.preempted}
    for one in step.admitted:  # matched first, sized after
        table = simulation.scheduler.slots
        query_len = int(step.query_lens[step.slots == one.slot][0])
        assert table.num_computed[one.slot] == one.num_cached_tokens + query_len
        assert table.num_computed[one.slot] <= table.num_tokens[one.slot]
    # Whoever has the lowest rank advances, so that no run of steps is without progress; a beam
    # that waits for others of its search has nothing to compute.
    table, order = simulation.scheduler.slots, simulation.scheduler._running.order
    busy = order[(table.num_computed[order] < table.num_tokens[order]) | np.isin(order, step.slots)]
    assert busy[0] in step.slots
    # Nothing is starved: every sequence with one token left is in the step, or waits for blocks
    # that launched steps hold back.
    if simulation.manager.num_returning_blocks:
        return
    running = np.flatnonzero(table.seq_ids >= 0)
    left_out = np.setdiff1d(running, step.slots)
    left_out = left_out[table.num_computed[left_out] < table.num_tokens[left_out]]
    assert (table.num_tokens[left_out] - table.num_computed[left_out] > 1).all()


def check_reservations(simulation: Simulation) -> None:
    """What is kept for running requests up to their ends is there. A block that two of them
    share serves both to their ends, but behind a window each goes on with one of its own.
    """
    table, order = simulation.scheduler.slots, simulation.scheduler._running.order
    reserved = order[table.worst_blocks[order] > 0]
    if reserved.size < 2:
        return
    kept = int(table.worst_blocks[reserved].sum())
    if simulation.window == 0:
        tables = [simulation.manager.block_table(seq_id) for seq_id in table.seq_ids[reserved]]
        held = np.concatenate(tables)
        kept -= held.size - np.unique(held).size
    assert kept <= simulation.num_blocks, (
        f"{kept} of {simulation.num_blocks} blocks are kept for {reserved}"
    )


def check_explained(simulation: Simulation, slots: list[int]) -> None:
    """Whoever has no part in the step that was made, whose rows have these slots, is told why.
    None is needed by one that ends with a launched step.
    """
    log, table = simulation.scheduler.log, simulation.scheduler.slots
    for name, entry in simulation.scheduler._entries.items():
        slot = entry.slot
        if slot in slots or (slot is not None and table.num_tokens[slot] == table.max_len[slot]):
            continue
        note = log._last_note(name)
        assert note is not None, name
        is_told = note.leaves_in_queue
        if slot is not None:
            is_told = note.kind == "waits" and not is_told and note.last_step == log.step
        assert is_told, f"{name} in step {log.step}: {log.explain(name)[0].text}"
