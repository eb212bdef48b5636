"""Several sequences from one: the answers of a group after their common prefill, and forks of a
request that runs. A fork takes a slot like any other sequence; without a free one it queues, and
finds its full blocks in the prefix cache when its turn comes.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagedkv.block_manager import BlockManager
from pagedkv.records import Admitted, FinishReason, ScheduledStep
from pagedkv.request import Request, fork_name
from pagedkv.scheduler.decision_log import DecisionLog
from pagedkv.scheduler.entry import Entry, Family, ForkGroup
from pagedkv.scheduler.queue import RankedQueue
from pagedkv.scheduler.running import RunningSet


@dataclass(frozen=True, slots=True, eq=False)
class Forked:
    """Forks that got a slot: slots, new_ids int64 [n]. ended: forks without a slot that do not
    queue either, since their first token ended them.
    """

    slots: NDArray[np.int64]
    new_ids: NDArray[np.int64]
    ended: list[tuple[Entry, FinishReason]]


class Forking:
    """Owner of the groups. Adds forks to the running set, the queue and entries (by name)."""

    def __init__(
        self,
        manager: BlockManager,
        running: RunningSet,
        queue: RankedQueue,
        entries: dict[str, Entry],
        log: DecisionLog,
    ) -> None:
        self._log = log
        self._manager = manager
        self._running = running
        self._queue = queue
        self._entries = entries
        self.groups: dict[str, ForkGroup] = {}
        self._group_names: set[str] = set()
        self._in_new_slots: list[Admitted] = []
        self._first_tokens: list[tuple[Request, int]] = []

    # -- names -------------------------------------------------------------------------

    def _require_free(self, name: str) -> None:
        if name in self._entries or name in self.groups or name in self._group_names:
            raise ValueError(f"request id {name!r} is in use by an unfinished request")

    def check_names(self, request: Request) -> None:
        """Raise ValueError if an unfinished request has the name, or one that its answers need."""
        names = [request.request_id]
        if request.is_group:
            names += [fork_name(request.request_id, k) for k in range(request.num_forks)]
        for name in names:
            self._require_free(name)

    # -- groups ------------------------------------------------------------------------

    def open_group(self, request: Request, seq_id: int, rank: int) -> Entry:
        """The entry of answer 0, which computes the prompt; answer k will have seq_id + k."""
        group = ForkGroup(request, seq_id)
        self.groups[request.request_id] = group
        self._group_names.update(group.names)
        leader = Entry(request.member(0), seq_id, rank)
        leader.group = group
        group.beams = [leader]
        return leader

    def new_beam(self, group: ForkGroup, parent: Entry) -> Entry:
        """A fork of a running beam, under a name that no beam has now. The manager's fork is left
        to the caller.
        """
        k = next(k for k, name in enumerate(group.names) if name not in self._entries)
        beam = Entry(group.request.member(k), group.first_seq_id + k, parent.rank)
        beam.group = group
        beam.num_cached_tokens = group.num_cached_tokens
        assert parent.slot is not None
        table = self._running.slots
        beam.token_ids = table.known_token_ids(parent.slot)
        self._entries[beam.request.request_id] = beam
        if table.num_free:
            self._enter(beam, int(table.num_computed[parent.slot]), parent.slot)
        return beam

    def members(self, group: ForkGroup) -> list[Entry]:
        """Entries of the answers that have not ended."""
        return [self._entries[name] for name in group.names if name in self._entries]

    def leave_group(self, entry: Entry) -> list[Request]:
        """An entry of a group has ended; the answers that end with it: all if the prompt was not
        yet computed.
        """
        group = entry.group
        assert group is not None
        ended = [entry.request]
        if not group.is_forked:
            ended = [group.request.member(k) for k in range(len(group.names))]
        group.num_left -= len(ended)
        if group.num_left == 0:
            self.close_group(group)
        return ended

    def close_group(self, group: ForkGroup) -> None:
        """Its names are free again."""
        del self.groups[group.request.request_id]
        self._group_names.difference_update(group.names)

    def expand(
        self, slots: NDArray[np.int64], sample_rows: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Sampled rows and their draws: a row whose prompt is to be forked once for each answer.

        Example: rows [0, 1] with 1 and 3 answers, draws [0, 0] -> [0, 1, 1, 1], [0, 0, 1, 2]
        """
        table = self._running.slots
        slots = slots[sample_rows]
        draws, num_answers = table.draws[slots], table.num_answers[slots]
        if (num_answers == 1).all():
            return sample_rows, draws
        begins = np.cumsum(num_answers) - num_answers
        place = np.arange(num_answers.sum()) - np.repeat(begins, num_answers)
        return np.repeat(sample_rows, num_answers), np.repeat(draws, num_answers) + place

    def fork_groups(
        self,
        step: ScheduledStep,
        samples: NDArray[np.int64],
        token_ids: NDArray[np.int64],
        logprobs: NDArray[np.float64] | None,
    ) -> Forked:
        """Give answers 1, 2, .. of prompts computed in this step their sequences.

        Args:
            samples: their indices into step.sample_rows, ascending.
            token_ids, logprobs: [num_samples]; logprobs None: all 0.

        REQUIRES that the leaders' own new tokens are not yet in the slot table.
        """
        running, table = self._running, self._running.slots
        parents, slots, in_slots = [], [], []
        ended: list[tuple[Entry, FinishReason]] = []
        for i in samples.tolist():
            leader_slot = int(step.slots[step.sample_rows[i]])
            leader = running.entry_at(leader_slot)
            group, k = leader.group, int(step.sample_draws[i])
            assert group is not None
            group.is_forked = True
            table.num_answers[leader_slot] = 1
            child = Entry(group.request.member(k), leader.seq_id + k, leader.rank)
            child.group = group
            child.num_cached_tokens = leader.num_cached_tokens
            child.token_ids = table.known_token_ids(leader_slot)
            self._entries[child.request.request_id] = child
            child.cumulative_logprob = 0.0 if logprobs is None else float(logprobs[i])
            token_id = int(token_ids[i])
            self._first_tokens.append((child.request, token_id))
            if table.num_free:
                parents.append(leader.seq_id)
                in_slots.append(i)
                slots.append(self._enter(child, child.token_ids.size, leader_slot))
                self.note(child, leader)
                continue
            child.token_ids = np.append(child.token_ids, np.int32(token_id))
            if token_id in child.request.stop_token_ids:
                ended.append((child, "stop"))
            elif child.request.max_tokens == 1:
                ended.append((child, "length"))
            else:
                self._queue.push(child)
                self.note(child, leader)
        chosen = np.array(in_slots, dtype=np.int64)
        new_slots = np.array(slots, dtype=np.int64)
        seq_ids = table.seq_ids[new_slots]
        if seq_ids.size:
            self._manager.fork_batch(np.array(parents, dtype=np.int64), seq_ids)
        return Forked(new_slots, token_ids[chosen], ended)

    def num_generated(self, entry: Entry) -> int:
        """Tokens that it has beyond its prompt."""
        num_tokens = entry.token_ids.size
        if entry.slot is not None:
            num_tokens = int(self._running.slots.num_tokens[entry.slot])
        return num_tokens - entry.request.prompt_len

    # -- forks of a running request ----------------------------------------------------

    def fork_running(
        self, parent: Entry, like: Request, n: int, first_seq_id: int
    ) -> list[tuple[Request, NDArray[np.int32]]]:
        """Make n forks that go on from where parent is, with the seq_ids from first_seq_id on.
        like: their requests but for name and draw.

        Returns:
            each fork's request, and the tokens it starts with beyond the prompt.
        """
        family = parent.family or Family(parent.request.request_id)
        draws = range(family.next_draw, family.next_draw + n)
        names = [fork_name(family.root, k) for k in draws]
        for name in names:
            self._require_free(name)
        table, slot = self._running.slots, parent.slot
        token_ids, num_computed = parent.token_ids, 0
        if slot is not None:
            token_ids = table.known_token_ids(slot)
            num_computed = int(table.num_computed[slot])
        num_generated = token_ids.size - like.prompt_len
        if num_generated >= like.max_tokens:
            raise ValueError(
                f"request {parent.request.request_id!r} has generated {num_generated} tokens, "
                f"which count for its forks: their max_tokens is {like.max_tokens}, at least "
                f"{num_generated + 1} is needed"
            )
        # A prompt still being computed has nothing to go on from: its fork computes, or finds, it.
        can_share = num_computed == token_ids.size - 1 and slot is not None
        family.next_draw += n
        parent.family = family
        requests, in_slots = [], []
        for i, (k, name) in enumerate(zip(draws, names, strict=True)):
            request = dataclasses.replace(like, request_id=name, draw=k)
            child = Entry(request, first_seq_id + i, parent.rank)
            child.family, child.token_ids = family, token_ids
            self._entries[name] = child
            requests.append((request, token_ids[request.prompt_len :]))
            if can_share and table.num_free:
                child.num_cached_tokens = num_computed
                assert slot is not None
                self._enter(child, num_computed, slot)
                in_slots.append(child.seq_id)
            else:
                self._queue.push(child)
            self.note(child, parent)
        if in_slots:
            children = np.array(in_slots, dtype=np.int64)
            self._manager.fork_batch(np.full_like(children, parent.seq_id), children)
        return requests

    def _enter(self, entry: Entry, num_computed: int, parent_slot: int) -> int:
        num_freed = int(self._running.slots.num_freed_blocks[parent_slot])
        slot = self._running.enter(entry, num_computed, 0, num_freed_blocks=num_freed)
        self._in_new_slots.append(Admitted(entry.request, slot, num_computed))
        return slot

    def note(self, child: Entry, parent: Entry) -> None:
        """Tell a fork what it was made from, and whether it waits."""
        has_slot = child.slot is not None
        self._log.note(
            child.request,
            "forked",
            parent=parent.request.request_id,
            num_tokens=int(child.token_ids.size),
            has_slot=int(has_slot),
            place="and runs beside it" if has_slot else "and waits for a slot",
        )

    # -- what others must hear of ------------------------------------------------------

    def take_in_new_slots(self) -> tuple[Admitted, ...]:
        """Forks that got a slot since the last call and hold it still."""
        by_slot = self._running.by_slot
        taken = tuple(
            one
            for one in self._in_new_slots
            if (entry := by_slot[one.slot]) is not None and entry.request is one.request
        )
        self._in_new_slots.clear()
        return taken

    def take_first_tokens(self) -> list[tuple[Request, int]]:
        """The first tokens of the answers that groups were forked into since the last call."""
        taken, self._first_tokens = self._first_tokens, []
        return taken
