"""Blocks that move between the pool and the CPU; on a GPU on streams of their own, beside the step
that asks for it, which waits only for what it touches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from pagedkv.engine.stopwatch import Span, Stopwatch
from pagedkv.kv_cache import KVCache
from pagedkv.records import ScheduledStep


class Swaps:
    """What moves out was written by earlier steps, so it waits for these. Its blocks are free from
    then on: those that the step writes to move first, and the step waits for them alone; later
    steps may write to any, and wait for all.

    What comes in goes to blocks that no launched step touches (those given up beside one drain
    until it has ended), and comes from CPU blocks that earlier moves have filled. So it need only
    wait for these, and only the step that asks for it waits for it.
    """

    def __init__(self, cache: KVCache, watch: Stopwatch, stream: torch.cuda.Stream | None) -> None:
        """stream: where steps run; None: on a CPU, one after the other."""
        self._cache = cache
        self._watch = watch
        self._steps = stream
        self._inward: torch.cuda.Stream | None = None
        self._outward: torch.cuda.Stream | None = None
        self._last_out: torch.cuda.Event | None = None
        self._under_way: list[tuple[int, Span]] = []  # bytes
        if stream is not None and cache.num_cpu_blocks:
            self._inward = torch.cuda.Stream(stream.device)  # type: ignore[no-untyped-call]
            self._outward = torch.cuda.Stream(stream.device)  # type: ignore[no-untyped-call]

    def run(self, step: ScheduledStep, written_blocks: Callable[[], NDArray[np.int64]]) -> None:
        """Start what a step asks for. REQUIRES the steps' stream to be current.

        Args:
            written_blocks: blocks of the pool that the step's tokens are written to.
        """
        if self._last_out is not None and self._steps is not None:
            self._steps.wait_event(self._last_out)
        if step.swap_out.size:
            self._count(step.swap_out, self._take_out(step, written_blocks))
        if step.swap_in.size:
            self._count(step.swap_in, self._bring_in(torch.from_numpy(step.swap_in)))

    def ended(self) -> Iterator[tuple[int, float]]:
        """Bytes and seconds of each move that has ended since the last call."""
        under_way, self._under_way = self._under_way, []
        for num_bytes, span in under_way:
            if span.has_ended():
                yield num_bytes, span.seconds()
            else:
                self._under_way.append((num_bytes, span))

    def _count(self, pairs: NDArray[np.int64], span: Span) -> None:
        self._under_way.append((len(pairs) * self._cache.bytes_per_block, span))

    def _take_out(
        self, step: ScheduledStep, written_blocks: Callable[[], NDArray[np.int64]]
    ) -> Span:
        if self._outward is None or self._steps is None:
            begin = self._watch.mark()
            self._cache.swap_out(torch.from_numpy(step.swap_out))
            return Span(begin, self._watch.mark())
        touched = np.concatenate([written_blocks(), step.copies[:, 1]])
        first, rest = split(step.swap_out, touched)
        self._outward.wait_stream(self._steps)
        with torch.cuda.stream(self._outward):
            begin = end = self._watch.mark()
            for pairs in (first, rest):
                if pairs.size:
                    self._cache.swap_out(torch.from_numpy(pairs))
                    end = self._watch.mark()
                if pairs is first and first.size:
                    assert isinstance(end, torch.cuda.Event)
                    self._steps.wait_event(end)
        assert isinstance(end, torch.cuda.Event)
        self._last_out = end
        return Span(begin, end)

    def _bring_in(self, pairs: torch.Tensor) -> Span:
        if self._inward is None or self._steps is None:
            begin = self._watch.mark()
            self._cache.swap_in(pairs)
            return Span(begin, self._watch.mark())
        with torch.cuda.stream(self._inward):
            if self._last_out is not None:
                self._inward.wait_event(self._last_out)
            begin = self._watch.mark()
            self._cache.swap_in(pairs)
            end = self._watch.mark()
        assert isinstance(end, torch.cuda.Event)
        self._steps.wait_event(end)
        return Span(begin, end)


def split(
    pairs: NDArray[np.int64], touched: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Pairs (block, CPU block) whose blocks are touched, and the others. All of them are the first
    where two fill one CPU block, and their order counts.
    """
    is_touched = np.isin(pairs[:, 0], touched)
    if np.unique(pairs[:, 1]).size < len(pairs):
        is_touched[:] = True
    return pairs[is_touched], pairs[~is_touched]
