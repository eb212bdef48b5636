"""Where contiguous regions lie in a pool: best fit, as an allocator without pages has to do it.

Free space falls into holes between regions. A region goes into the smallest hole that holds it, the
lowest of several, and at that hole's beginning; what is given back joins the holes beside it.
"""

from __future__ import annotations

import bisect


class Holes:
    """The free parts of a pool of num_blocks blocks, in order of address.

    Invariant: holes are not empty, do not overlap and do not touch.
    """

    def __init__(self, num_blocks: int) -> None:
        self._starts = [0]
        self._sizes = [num_blocks]
        self.num_free = num_blocks

    def copy(self) -> Holes:
        made = Holes(0)
        made._starts, made._sizes = self._starts.copy(), self._sizes.copy()
        made.num_free = self.num_free
        return made

    @property
    def largest(self) -> int:
        return max(self._sizes, default=0)

    def as_pairs(self) -> list[tuple[int, int]]:
        """(start, size) of each."""
        return list(zip(self._starts, self._sizes, strict=True))

    def take(self, size: int) -> int | None:
        """The start of a region of size blocks, taken; None: no hole is large enough.

        Example: holes (0, 5), (8, 3) and (20, 3): take(3) is 8, and (0, 5), (20, 3) are left.
        """
        fits = [(hole, i) for i, hole in enumerate(self._sizes) if hole >= size]
        if not fits:
            return None
        _, i = min(fits)
        start = self._starts[i]
        self._starts[i] += size
        self._sizes[i] -= size
        if self._sizes[i] == 0:
            del self._starts[i], self._sizes[i]
        self.num_free -= size
        return start

    def give_back(self, start: int, size: int) -> None:
        """REQUIRES that the region was taken."""
        i = bisect.bisect_left(self._starts, start)
        self._starts.insert(i, start)
        self._sizes.insert(i, size)
        for left in (i, i - 1):  # join with what follows, then with what comes before
            if 0 <= left < len(self._starts) - 1:
                end = self._starts[left] + self._sizes[left]
                if end == self._starts[left + 1]:
                    self._sizes[left] += self._sizes.pop(left + 1)
                    del self._starts[left + 1]
        self.num_free += size

    def check_invariants(self, num_blocks: int) -> None:
        """Raise AssertionError if the books are wrong."""
        end = -1
        for start, size in self.as_pairs():
            assert size > 0, f"an empty hole at {start}"
            assert start > end, f"a hole at {start} touches or overlaps one that ends at {end}"
            end = start + size
        assert end <= num_blocks, f"a hole ends at {end} in a pool of {num_blocks}"
        assert self.num_free == sum(self._sizes), "free blocks are miscounted"
