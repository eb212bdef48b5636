"""Regions of a contiguous cache and the lanes in them: one lane for each answer to a prompt. Who
holds a lane is contiguous.py's business.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from claims.regions import Holes
from claims.reserving import Reservation
from pagedkv.block_manager import OutOfBlocks


@dataclass(slots=True, eq=False)
class Lane:
    """Room for one sequence. holders: sequences that read it, 0: it is free, or draining while
    draining_until names a launched step that may still touch it.
    """

    start: int
    num_blocks: int
    region: Region
    holders: int = 0
    draining_until: int = 0

    @property
    def is_free(self) -> bool:
        return self.holders == 0 and self.draining_until == 0


@dataclass(slots=True, eq=False)
class Region:
    """Lanes one behind the other. It is given back when all of them are free."""

    family: str
    lanes: list[Lane] = field(default_factory=list)


class Lanes:
    """All regions of a pool. Invariant: lanes and holes make up the pool."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.holes = Holes(num_blocks)
        self.draining: list[Lane] = []
        self._families: dict[str, list[Region]] = {}
        self._wide: list[Region] = []  # those of several lanes: only these can have a free one

    @property
    def num_free_blocks(self) -> int:
        """In holes and in free lanes."""
        lanes = [lane for region in self._wide for lane in region.lanes]
        return self.holes.num_free + sum(lane.num_blocks for lane in lanes if lane.is_free)

    def __iter__(self) -> Iterator[Lane]:
        for regions in self._families.values():
            for region in regions:
                yield from region.lanes

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def fit(self, wanted: list[Reservation]) -> bool:
        """Whether all of these could be taken now, in this order."""
        if len(wanted) == 1 and wanted[0].family not in self._families:
            size = wanted[0].num_lanes * self.blocks_for(wanted[0].num_tokens)
            return size <= self.holes.largest
        holes, taken, opened = self.holes.copy(), set[int](), set[str]()
        for one in wanted:
            lane = self._free_lane(one.family, taken)
            if lane is not None:
                taken.add(id(lane))
                continue
            if any(lane.region.family == one.family for lane in self.draining):
                return False  # its own lane comes back soon
            is_new = one.family not in self._families and one.family not in opened
            opened.add(one.family)
            num_lanes = one.num_lanes if is_new else 1
            if holes.take(num_lanes * self.blocks_for(one.num_tokens)) is None:
                return False
        return True

    def take(self, wanted: Reservation) -> Lane:
        """A free lane of the family, or the first of a new region: of all its lanes if it has none.

        Raises OutOfBlocks: no hole holds it.
        """
        lane = self._free_lane(wanted.family, set())
        if lane is None:
            lane = self._open(wanted)
        lane.holders = 1
        return lane

    def let_go(self, lane: Lane, last_step: int | None) -> None:
        """One holder less. last_step: the newest that is in flight, None: none is."""
        lane.holders -= 1
        if lane.holders:
            return
        if last_step is None:
            self._close(lane.region)
        else:
            lane.draining_until = last_step
            self.draining.append(lane)

    def end_step(self, step_id: int) -> None:
        done = [lane for lane in self.draining if lane.draining_until <= step_id]
        self.draining = [lane for lane in self.draining if lane.draining_until > step_id]
        for lane in done:
            lane.draining_until = 0
        for lane in done:
            if lane.region in self._families.get(lane.region.family, ()):
                self._close(lane.region)

    def _free_lane(self, family: str, taken: set[int]) -> Lane | None:
        for region in self._families.get(family, ()):
            for lane in region.lanes:
                if lane.is_free and id(lane) not in taken:
                    return lane
        return None

    def _open(self, wanted: Reservation) -> Lane:
        num_lanes = 1 if wanted.family in self._families else wanted.num_lanes
        size = self.blocks_for(wanted.num_tokens)
        start = self.holes.take(num_lanes * size)
        if start is None:
            raise OutOfBlocks(
                f"a region of {num_lanes * size} blocks fits in no hole: {self.holes.num_free} "
                f"blocks are free, {self.holes.largest} of them together"
            )
        region = Region(wanted.family)
        region.lanes += [Lane(start + i * size, size, region) for i in range(num_lanes)]
        self._families.setdefault(wanted.family, []).append(region)
        if num_lanes > 1:
            self._wide.append(region)
        return region.lanes[0]

    def _close(self, region: Region) -> None:
        """Give the region back if nobody is left in it."""
        if not all(lane.is_free for lane in region.lanes):
            return
        first = region.lanes[0]
        self.holes.give_back(first.start, len(region.lanes) * first.num_blocks)
        regions = self._families[region.family]
        regions.remove(region)
        if len(region.lanes) > 1:
            self._wide.remove(region)
        if not regions:
            del self._families[region.family]

    def check_invariants(self) -> None:
        """Raise AssertionError if the books are wrong."""
        self.holes.check_invariants(self.num_blocks)
        end = 0
        parts = [(lane.start, lane.num_blocks) for lane in self] + self.holes.as_pairs()
        for start, size in sorted(parts):
            assert start == end, f"block {end} is nobody's, or two lanes' ({start})"
            end += size
        assert end == self.num_blocks, f"blocks from {end} on are nobody's"
        for lane in self:
            assert not (lane.holders and lane.draining_until), "a lane that is held drains"
            assert (lane in self.draining) == (lane.draining_until > 0), "draining is miscounted"
            assert any(not one.is_free for one in lane.region.lanes), "an empty region is kept"
